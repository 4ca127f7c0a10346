"""A case's operands in somebody's library, and its float64 answers."""

import numpy as np

import fovea


class Arrays:
    """Makes and reads arrays of a library in one dtype."""

    def __init__(self, library, dtype, device):
        self.library, self.dtype, self.device = library, dtype, device
        if library == "torch":
            import torch
            self.torch = torch
        elif library != "numpy":
            raise ValueError(f"library is {library!r}; it must be \"torch\" or \"numpy\"")

    def floats(self, values, dtype=None):
        dtype = dtype or self.dtype
        if self.library == "torch":
            return self.torch.tensor(np.asarray(values, np.float32), device=self.device).to(
                getattr(self.torch, dtype))
        if dtype == "bfloat16":
            import ml_dtypes  # NumPy has no bfloat16 of its own.
            return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16)
        return np.asarray(values, np.float32).astype(dtype)

    def integers(self, values):
        values = np.asarray(values, np.int32)
        return self.torch.tensor(values, device=self.device) if self.library == "torch" else values

    def bytes(self, values):
        return self.torch.tensor(values, device=self.device) if self.library == "torch" else values

    def read(self, array):
        """Any result as float64 of NumPy."""
        if hasattr(array, "detach"):
            return array.detach().cpu().double().numpy()
        return np.asarray(array).astype(np.float64)

    def rounded(self, values):
        """float64 values as the dtype stores them."""
        return self.read(self.floats(values))


class Problem:
    """Requests' queries, keys and values in float64, and the same in blocks with hostile bytes.

    Attributes:
        q, k, v: lists of [tokens, heads, width] float64, as stored.
        table: [requests, width] int32; entries behind a length name a block of garbage.
        sinks: [N] float64 or None. sm_scale: what the kernel is asked for.
    """

    def __init__(self, case, adapter, dims, dtype, format, library, device, block_size, seed):
        self.case, self.format, self.block_size = case, format, block_size
        self.arrays = Arrays(library, dtype, device)
        self.heads, self.kv_heads, self.qk_dim, self.v_dim = adapter.widths(dims)
        self.is_latent = adapter.is_latent
        self.sm_scale = dims.sm_scale * case.scale
        self.worst_error = 0.0
        rng = np.random.default_rng(seed)
        # Scores sum qk_dim products of variance 1: their deviation becomes the case's.
        gain = case.score_size / (self.sm_scale * self.qk_dim ** 0.5)
        self.q = [self.arrays.rounded(gain * rng.standard_normal((n, self.heads, self.qk_dim)))
                  for n in case.query_lens]
        self.k = [self._rows(rng, n, self.qk_dim) for n in case.key_lens]
        if case.shared:  # As far as the first one's whole blocks go.
            shared = min(case.key_lens) // block_size * block_size
            self.k[1][:shared] = self.k[0][:shared]
        self.v = ([rows[..., :self.v_dim] for rows in self.k] if self.is_latent else
                  [self._rows(rng, n, self.v_dim) for n in case.key_lens])
        if case.shared and not self.is_latent:
            self.v[1][:shared] = self.v[0][:shared]
        self.sinks = rng.standard_normal(self.heads) * 2 if case.sinks else None
        self._assign_blocks(rng)

    def _rows(self, rng, tokens, width):
        return self.arrays.rounded(rng.standard_normal((tokens, self.kv_heads, width)))

    def _assign_blocks(self, rng):
        counts = [-(-n // self.block_size) for n in self.case.key_lens]
        self.num_blocks = sum(counts) + 2
        ids = rng.permutation(self.num_blocks).astype(np.int32)
        self.table = np.full((len(counts), max(counts) + 1), ids[-1], np.int32)
        used = 0
        for row, count in zip(self.table, counts):
            row[:count] = ids[used:used + count]
            used += count
        if self.case.shared:
            shared = min(self.case.key_lens) // self.block_size
            self.table[1, :shared] = self.table[0, :shared]

    def _with_nan(self, rows):
        """Keys as the kernel gets them."""
        if not self.case.nan_key:
            return rows
        rows = [one.copy() for one in rows]
        rows[1][0] = np.nan
        return rows

    def ragged(self):
        """k and v of all sequences, one after the other."""
        return (np.concatenate(self._with_nan(self.k)), np.concatenate(self.v))

    def slots(self, request):
        positions = np.arange(self.case.key_lens[request])
        return (self.table[request, positions // self.block_size].astype(np.int64) *
                self.block_size + positions % self.block_size)

    def paged(self, rows, width):
        """Rows in blocks [num_blocks, block_size, kv_heads, width]; the others hold garbage."""
        garbage = {"nan": np.nan, "inf": np.inf, "large": 1e4}[self.case.garbage]
        pool = np.full((self.num_blocks * self.block_size, self.kv_heads, width), garbage)
        for request, one in enumerate(rows):
            pool[self.slots(request)] = one
        return pool.reshape(self.num_blocks, self.block_size, self.kv_heads, width)

    def paged_keys(self):
        return self.paged(self._with_nan(self.k), self.qk_dim)

    def paged_values(self):
        return self.paged(self.v, self.v_dim)

    def storage(self, row_bytes):
        """Blocks of rows whose bytes a format does not write: all ones, NaN in most of them."""
        return np.full((self.num_blocks, self.block_size, row_bytes), 255, np.uint8)

    def use_stored(self, keys, values):
        """Float64 reads these rows, which a format that rounds has stored."""
        self.k, self.v = keys, values

    def expected(self, **changes):
        """out [T, N, Dv] and lse [N, T] in float64, with the case's rules or others."""
        asked = dict(self.case.rules, sm_scale=self.sm_scale, sinks=self.sinks, q=self.q,
                     aligned_to_end=True)
        asked.update(changes)
        queries, aligned = asked.pop("q"), asked.pop("aligned_to_end")
        sinks = asked.pop("sinks")
        asked["sinks"] = [] if sinks is None else [float(sink) for sink in sinks]
        results = [self._one(*operands, aligned, asked)
                   for operands in zip(queries, self.k, self.v)]
        return (np.concatenate([out for out, _ in results]),
                np.concatenate([lse for _, lse in results], axis=1))

    def _one(self, q, k, v, aligned, asked):
        contiguous = np.ascontiguousarray
        if aligned or len(k) <= len(q):
            return fovea.oracle_attention(contiguous(q), contiguous(k), contiguous(v), **asked)
        # The mistake of a mask from the first key on: query i sees keys up to i.
        keys = len(q)
        return fovea.oracle_attention(contiguous(q), contiguous(k[:keys]), contiguous(v[:keys]),
                                      **asked)

    def nan_rows(self):
        """[T, N] rows that see the NaN key."""
        seen = np.zeros((sum(self.case.query_lens), self.heads), bool)
        if self.case.nan_key:
            begin = self.case.query_lens[0]
            seen[begin:begin + self.case.query_lens[1]] = True
        return seen

    def where(self, token):
        """(request, query token) of a row."""
        starts = np.cumsum([0] + list(self.case.query_lens))
        request = int(np.searchsorted(starts, token, side="right")) - 1
        return request, int(token - starts[request])
