"""PagedKvCache: sequences, forks, formats and foreign memory."""

import numpy as np
import pytest

import fovea
from problems import assert_close, expected_attention


def rows(rng, tokens, latent=16, rope=8):
    return (rng.standard_normal((tokens, latent)).astype(np.float32),
            rng.standard_normal((tokens, rope)).astype(np.float32))


def gathered(cache, sequence):
    out = np.empty((len(sequence), cache.rows.format.row_elements), np.float32)
    return fovea.kv_gather(cache, [sequence.blocks], [len(sequence)], out)


def test_sequences_grow_fork_and_give_blocks_back(rng):
    cache = fovea.PagedKvCache.latent(16, 8, num_blocks=6, block_size=4, format="f32")
    first = cache.new_sequence()
    old = rows(rng, 6)
    first.append(*old)
    assert len(first) == 6 and cache.pool.num_used == 2
    second = first.fork()
    new = rows(rng, 3)
    second.append(*new)
    assert np.array_equal(gathered(cache, first), np.hstack(old))
    assert np.array_equal(gathered(cache, second), np.vstack([np.hstack(old), np.hstack(new)]))
    assert first.blocks[0] == second.blocks[0] and first.blocks[1] != second.blocks[1]
    second.truncate(4)
    first.close()
    assert cache.pool.num_used == 1 and len(second) == 4
    del second
    assert cache.pool.num_free == 6


def test_failed_append_changes_nothing(rng):
    cache = fovea.PagedKvCache.latent(16, 8, num_blocks=2, block_size=4, format="f32")
    sequence = cache.new_sequence()
    sequence.append(*rows(rng, 3))
    with pytest.raises(ValueError, match="9 tokens need more blocks than are free: 1 of 2"):
        sequence.append(*rows(rng, 6))
    with pytest.raises(ValueError, match="k_pe"):
        sequence.append(rows(rng, 3)[0], rows(rng, 4)[1])
    assert len(sequence) == 3 and cache.pool.num_used == 1
    sequence.reserve(7)
    with pytest.raises(ValueError, match="k_pe"):
        sequence.append(rows(rng, 3)[0], rows(rng, 4)[1])
    assert cache.pool.num_used == 2  # What was reserved before stays.


def test_forks_do_not_share_what_is_reserved(rng):
    cache = fovea.PagedKvCache.latent(16, 8, num_blocks=9, block_size=4, format="f32")
    first = cache.new_sequence()
    first.reserve(10)
    second = first.fork()
    parts = rows(rng, 10), rows(rng, 10)
    for sequence, part in zip((first, second), parts):
        sequence.append(*part)
    for sequence, part in zip((first, second), parts):
        assert np.array_equal(gathered(cache, sequence), np.hstack(part))


def test_growing_keeps_rows_and_refuses_what_does_not_fit(rng):
    storage = np.full((2, 4, 24), np.nan, np.float32)
    cache = fovea.PagedKvCache.latent(16, 8, format="f32", storage=storage)
    sequence = cache.new_sequence()
    old, new = rows(rng, 7), rows(rng, 9)
    sequence.append(*old)
    read_only = np.zeros((5, 4, 24), np.float32)
    read_only.flags.writeable = False
    for bad in (read_only, np.zeros((5, 4, 96), np.uint8), np.zeros((5, 3, 24), np.float32),
                np.zeros((1, 4, 24), np.float32)):
        with pytest.raises(ValueError):
            cache.grow(bad)
    assert cache.num_blocks == 2
    cache.grow(np.full((5, 4, 24), np.nan, np.float32))
    sequence.append(*new)
    assert np.array_equal(gathered(cache, sequence), np.hstack([np.vstack(part) for part in
                                                                zip(old, new)]))
    with pytest.raises(ValueError, match="grows from tensors"):
        fovea.PagedKvCache.latent(16, 8, num_blocks=2).grow(storage)


def test_a_storage_keeps_its_memory(rng):
    torch = pytest.importorskip("torch")
    storage = torch.full((2, 4, 24), torch.nan)
    cache = fovea.PagedKvCache.latent(16, 8, format="f32", storage=storage)
    storage.data = torch.zeros(1)
    sequence = cache.new_sequence()
    part = rows(rng, 5)
    sequence.append(*part)
    assert np.array_equal(gathered(cache, sequence), np.hstack(part))


def test_heads_over_foreign_memory(rng):
    torch = pytest.importorskip("torch")
    # Keys and values of a block side by side, as engines store them.
    storage = torch.full((5, 2, 4, 2, 8), torch.nan, dtype=torch.bfloat16)
    cache = fovea.PagedKvCache.heads(2, 8, k_storage=storage[:, 0], v_storage=storage[:, 1])
    sequence = cache.new_sequence()
    k, v = (torch.randn(7, 2, 8, dtype=torch.bfloat16) for _ in range(2))
    sequence.append(k, v)
    assert torch.equal(storage[sequence.blocks[0], 0], k[:4])
    q = torch.randn(1, 4, 8, dtype=torch.bfloat16)
    out = fovea.attention_decode(q, cache, [sequence.blocks], [len(sequence)])
    expected, _ = expected_attention(*([x.double().numpy()] for x in (q, k, v)), 8 ** -0.5)
    assert_close(expected, out.double().numpy(), "bfloat16")


@pytest.mark.parametrize("format", fovea.kv_format_names())
def test_every_format(format, rng):
    latent, rope = 512, 64  # The widths that fp8_ds_mla has.
    cache = fovea.PagedKvCache.latent(latent, rope, num_blocks=8, block_size=4, format=format)
    sequence = cache.new_sequence()
    kv_c, k_pe = rows(rng, 9, latent, rope)
    sequence.append(kv_c, k_pe)
    q = rng.standard_normal((1, 4, latent + rope)).astype(np.float32)
    out = fovea.mla_decode(q[..., :latent], q[..., latent:], cache, [sequence.blocks], [9],
                           sm_scale=0.05)
    stored = gathered(cache, sequence).astype(np.float64)[:, None]
    expected, _ = expected_attention([q.astype(np.float64)], [stored], [stored[..., :latent]], 0.05)
    assert_close(expected, out, "float32")


def test_wrong_kinds_of_cache_are_refused(rng):
    latent = fovea.PagedKvCache.latent(16, 8, num_blocks=2)
    heads = fovea.PagedKvCache.heads(2, 8, num_blocks=2)
    with pytest.raises(ValueError, match="it must be of latent rows"):
        fovea.kv_append(*rows(rng, 1), [0], heads)
    with pytest.raises(ValueError, match="it must be of keys and values"):
        fovea.attention_decode(np.zeros((1, 2, 8), np.float32), latent, [[0]], [1])
    with pytest.raises(ValueError, match="num_blocks must be given"):
        fovea.PagedKvCache.latent(16, 8)
    with pytest.raises(ValueError, match="format|bf17"):
        fovea.PagedKvCache.latent(16, 8, num_blocks=2, format="bf17")
