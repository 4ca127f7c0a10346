"""Random problems with NaN in everything that an op does not own, and their float64 answers."""

import numpy as np

import fovea

# Of a row's norm: operands of the dtype and an output rounded once, as in the C++ tests.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.2e-2}
BLOCK_SIZE = 4


def assert_close(expected, got, dtype, what="out"):
    """Rows [..., width] of both, by the norm of the expected row. Says where the worst one is."""
    expected, got = np.asarray(expected, np.float64), np.asarray(got, np.float64)
    assert expected.shape == got.shape, (expected.shape, got.shape)
    norm = np.maximum(np.linalg.norm(expected, axis=-1), 1e-3)
    error = np.linalg.norm(got - expected, axis=-1) / norm
    assert not np.isnan(got).any(), f"{what}: NaN at {tuple(np.argwhere(np.isnan(got))[0])}"
    worst = np.unravel_index(np.argmax(error), error.shape)
    assert error[worst] <= TOLERANCE[dtype], (
        f"{what} row {tuple(int(i) for i in worst)}: off by {error[worst]:.2e}\n"
        f"expected {expected[worst][:8]}\ngot      {got[worst][:8]}")


class Library:
    """How the tests make arrays of a library and read them back; "cuda" is torch on a GPU."""

    def __init__(self, name):
        self.name = name
        self.torch = None
        if name in ("torch", "cuda"):
            import torch
            self.torch = torch
            self.device = "cuda" if name == "cuda" else "cpu"
        if name == "jax":
            import jax.numpy
            self.jnp = jax.numpy

    def __repr__(self):
        return self.name

    def array(self, values, dtype):
        values = np.asarray(values, np.float32 if "float" in dtype else dtype)
        if self.torch:
            return self.torch.tensor(values, device=self.device).to(getattr(self.torch, dtype))
        if self.name == "jax":
            return self.jnp.asarray(values, dtype)
        if dtype == "bfloat16":
            import ml_dtypes
            return values.astype(ml_dtypes.bfloat16)
        return values.astype(dtype)

    def unset(self, shape):
        """A writable float32 array of NaN: NumPy's for libraries whose arrays never change."""
        values = np.full(shape, np.nan, np.float32)
        return self.array(values, "float32") if self.torch else values

    def numpy(self, array):
        if self.torch:
            return array.to(self.torch.float64).cpu().numpy()
        return np.asarray(array).astype(np.float64)

    def dtype_of(self, array):
        return str(array.dtype).removeprefix("torch.")


def blocks_of(lengths, rng, spare=3):
    """A shuffled block table [requests, width] whose unneeded entries are garbage, and its size."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    ids = rng.permutation(sum(counts) + spare).astype(np.int32)
    table = np.full((len(lengths), max(counts) + 2), 2**30, np.int32)
    used = 0
    for row, count in zip(table, counts):
        row[:count] = ids[used:used + count]
        used += count
    return table, len(ids)


class Paged:
    """Rows of each request in blocks; everything else of the pool is NaN."""

    def __init__(self, library, dtype, lengths, shape, rng):
        self.table, num_blocks = blocks_of(lengths, rng)
        values = np.full((num_blocks, BLOCK_SIZE, *shape), np.nan, np.float32)
        self.rows = []
        for length, blocks in zip(lengths, self.table):
            rows = library.numpy(library.array(rng.standard_normal((length, *shape)), dtype))
            for position, row in enumerate(rows):
                values[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = row
            self.rows.append(rows)
        self.tensor = library.array(values, dtype)


def split(values, query_lens):
    """The requests' rows of an array [T, ...]."""
    return np.split(values, np.cumsum(query_lens)[:-1])


def expected_attention(q, keys, values, sm_scale, sinks=None, **rules):
    """Of requests' q, k and v, lists of [tokens, heads, width]: out [T, N, Dv] and lse [N, T]."""
    outs, lses = [], []
    for one_q, one_k, one_v in zip(q, keys, values):
        out, lse = fovea.oracle_attention(
            *(np.ascontiguousarray(x) for x in (one_q, one_k, one_v)), sm_scale=sm_scale,
            sinks=[] if sinks is None else list(map(float, sinks)), **rules)
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs), np.concatenate(lses, axis=1)
