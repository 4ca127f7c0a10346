"""What fovea.check cannot ask of the functions of other libraries: their layouts and refusals."""

import pytest

import fovea

torch = pytest.importorskip("torch")

from fovea.compat import flash_attn, flash_mla  # noqa: E402
from problems import assert_close  # noqa: E402


def test_flash_mla_script():
    batch, queries, heads, length = 2, 2, 4, 70
    q = torch.randn(batch, queries, heads, 576, dtype=torch.bfloat16)
    k_cache = torch.randn(8, 64, 1, 576, dtype=torch.bfloat16)
    block_table = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32)
    cache_seqlens = torch.tensor([length, 64], dtype=torch.int32)
    metadata, num_splits = flash_mla.get_mla_metadata(cache_seqlens, queries * heads, 1)
    out, lse = flash_mla.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512,
                                                metadata, num_splits, causal=True)
    assert out.shape == (batch, queries, heads, 512) and lse.shape == (batch, heads, queries)
    rows = k_cache[block_table[0]].flatten(0, 1)[:length].double().numpy()
    expected, expected_lse = fovea.oracle_attention(q[0].double().numpy(), rows,
                                                    rows[..., :512].copy(), sm_scale=576 ** -0.5)
    assert_close(expected, out[0].double().numpy(), "bfloat16")
    assert_close(expected_lse[..., None], lse[0].double().numpy()[..., None], "bfloat16", "lse")


def test_flash_mla_fp8_rows():
    cache = fovea.PagedKvCache.latent(
        512, 64, format="fp8_ds_mla", storage=(storage := torch.zeros(2, 64, 656,
                                                                      dtype=torch.uint8)))
    fovea.kv_append(torch.randn(70, 512), torch.randn(70, 64), list(range(70)), cache)
    q = torch.randn(1, 1, 4, 576)
    out, _ = flash_mla.flash_mla_with_kvcache(
        q, storage.view(torch.float8_e4m3fn)[:, :, None], torch.tensor([[0, 1]]).int(),
        torch.tensor([70]).int(), 512, is_fp8_kvcache=True, softmax_scale=0.05)
    with pytest.raises(ValueError):
        flash_mla.flash_mla_with_kvcache(q, storage[:, :, None, :600], torch.zeros(1, 2).int(),
                                         torch.tensor([70]).int(), 512, is_fp8_kvcache=True)
    expected = fovea.mla_decode(q[0, ..., :512], q[0, ..., 512:], cache, [[0, 1]], [70],
                                sm_scale=0.05)
    assert torch.equal(out[0], expected)


def test_flash_attn_caches_without_a_table_grow_in_place():
    q, k, v = (torch.randn(2, 1, heads, 16) for heads in (4, 2, 2))
    k_cache, v_cache = (torch.randn(3, 12, 2, 16) for _ in range(2))
    before = k_cache.clone()
    lengths = torch.tensor([4, 7], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths,
                                             cache_batch_idx=torch.tensor([2, 0]), causal=True)
    for i, (row, length) in enumerate(((2, 4), (0, 7))):
        assert torch.equal(k_cache[row, length], k[i, 0])
        keys, values = (cache[row, :length + 1].double().numpy() for cache in (k_cache, v_cache))
        expected, _ = fovea.oracle_attention(q[i].double().numpy(), keys, values,
                                             sm_scale=16 ** -0.5)
        assert_close(expected, out[i].numpy(), "float32")
        before[row, length] = k[i, 0]
    assert torch.equal(k_cache, before)


def test_flash_attn_func():
    q, k, v = (torch.randn(2, n, heads, 16) for n, heads in ((3, 4), (8, 2), (8, 2)))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(2, 0),
                                             return_attn_probs=True)
    for i in range(2):
        expected, expected_lse = fovea.oracle_attention(
            *(x[i].double().numpy() for x in (q, k, v)), sm_scale=0.25, window_left=2)
        assert_close(expected, out[i].numpy(), "float32")
        assert_close(expected_lse[..., None], lse[i].numpy()[..., None], "float32", "lse")


@pytest.mark.parametrize("options, text", [
    (dict(dropout_p=0.1), "dropout_p is given"),
    (dict(alibi_slopes=torch.ones(4)), "alibi_slopes is given"),
    (dict(window_size=(3, 3)), r"window_size is \(3, 3\)"),
])
def test_flash_attn_refusals(options, text):
    q = torch.randn(1, 3, 4, 16)
    with pytest.raises(NotImplementedError, match=text):
        flash_attn.flash_attn_func(q, q, q, **options)


def test_flash_mla_refusals():
    q, rows = torch.randn(1, 1, 4, 24), torch.randn(2, 4, 1, 24)
    table, lengths = torch.zeros(1, 1).int(), torch.ones(1).int()
    with pytest.raises(NotImplementedError, match="indices is given: fovea has no sparse"):
        flash_mla.flash_mla_with_kvcache(q, rows, table, lengths, 16, indices=table)
    with pytest.raises(ValueError, match="k_cache has 2 heads; latent rows have one"):
        flash_mla.flash_mla_with_kvcache(q, rows.expand(2, 4, 2, 24), table, lengths, 16)
    with pytest.raises(ValueError, match="head_dim_v is 24"):
        flash_mla.flash_mla_with_kvcache(q, rows, table, lengths, 24)
