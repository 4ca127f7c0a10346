"""Each op with tensors of each library, against float64."""

import numpy as np
import pytest

import fovea
from problems import BLOCK_SIZE, Paged, assert_close, expected_attention, split

DTYPES = ["float32", "float16", "bfloat16"]
RULES = [{}, {"window_left": 3}, {"attention_chunk": 5}, {"soft_cap": 2.0}]


@pytest.fixture(params=DTYPES)
def dtype(request, library):
    if request.param == "bfloat16" and library.name == "numpy":
        pytest.importorskip("ml_dtypes")
    return request.param


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_attention_prefill(library, dtype, rules, rng):
    query_lens, key_lens, scale = [3, 1, 6], [7, 1, 6], 0.3
    q = library.array(rng.standard_normal((10, 6, 16)), dtype)
    k = library.array(rng.standard_normal((14, 2, 16)), dtype)
    v = library.array(rng.standard_normal((14, 2, 8)), dtype)
    out, lse = fovea.attention_prefill(q, k, v, np.array([0, 3, 4, 10], np.int32), [0, 7, 8, 14],
                                       sm_scale=scale, return_lse=True, **rules)
    assert library.dtype_of(out) == dtype and library.dtype_of(lse) == "float32"
    assert type(out).__module__ == type(q).__module__
    expected, expected_lse = expected_attention(
        split(library.numpy(q), query_lens), split(library.numpy(k), key_lens),
        split(library.numpy(v), key_lens), scale, **rules)
    assert_close(expected, library.numpy(out), dtype)
    assert_close(expected_lse[..., None], library.numpy(lse)[..., None], dtype, "lse")


@pytest.mark.parametrize("sinks", [False, True])
def test_attention_prefill_of_one_request_needs_no_lengths(library, rng, sinks):
    q, k, v = (library.array(rng.standard_normal((5, 2, 8)), "float32") for _ in range(3))
    sink = rng.standard_normal(2).astype(np.float32)
    out = fovea.attention_prefill(q, k, v,
                                  sinks=library.array(sink, "float32") if sinks else None)
    expected, _ = expected_attention([library.numpy(q)], [library.numpy(k)], [library.numpy(v)],
                                     8 ** -0.5, sinks=sink if sinks else None)
    assert_close(expected, library.numpy(out), "float32")


def test_attention_prefill_over_blocks_and_new_rows(library, rng):
    contexts, query_lens = [6, 0], [3, 4]
    seq_lens = [9, 4]
    keys = Paged(library, "float32", seq_lens, (2, 8), rng)
    values = Paged(library, "float32", seq_lens, (2, 4), np.random.default_rng(7))
    q = library.array(rng.standard_normal((7, 4, 8)), "float32")
    expected, _ = expected_attention(split(library.numpy(q), query_lens), keys.rows, values.rows,
                                     0.4)
    paged = dict(cache=(keys.tensor, values.tensor), block_table=keys.table, sm_scale=0.4,
                 cu_seqlens_q=[0, 3, 7], cu_seqlens_k=[0, 9, 13])
    assert_close(expected, library.numpy(fovea.attention_prefill(q, **paged)), "float32")
    fresh = [library.array(np.concatenate([rows[context:] for rows, context
                                           in zip(paged_rows.rows, contexts)]), "float32")
             for paged_rows in (keys, values)]
    assert_close(expected, library.numpy(fovea.attention_prefill(q, *fresh, **paged)), "float32")


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("queries", [1, 2])
def test_mla_decode(library, dtype, queries, rules, rng):
    seq_lens, latent, rope, heads, scale = [9, 2, 30], 24, 8, 5, 0.2
    rows = Paged(library, dtype, seq_lens, (latent + rope,), rng)
    q = library.array(rng.standard_normal((3 * queries, heads, latent + rope)), dtype)
    out, lse = fovea.mla_decode(q[..., :latent], q[..., latent:], rows.tensor, rows.table,
                                np.array(seq_lens, np.int32), sm_scale=scale, return_lse=True,
                                **rules)
    assert library.dtype_of(out) == dtype
    keys = [one[:, None] for one in rows.rows]
    expected, expected_lse = expected_attention(
        split(library.numpy(q), [queries] * 3), keys, [one[..., :latent] for one in keys], scale,
        **rules)
    assert_close(expected, library.numpy(out), dtype)
    assert_close(expected_lse[..., None], library.numpy(lse)[..., None], dtype, "lse")


def test_mla_decode_with_sinks_and_a_plan(library, rng):
    rows = Paged(library, "float32", [5, 11], (20,), rng)
    q = library.array(rng.standard_normal((3, 4, 20)), "float32")
    sinks = rng.standard_normal(4).astype(np.float32)
    plan = fovea.BatchPlan([0, 1, 3], [5, 11], decode_threshold=2, query_lens="varlen",
                           window_left=4)
    out = fovea.mla_decode(q[..., :16], q[..., 16:], rows.tensor, rows.table, plan=plan,
                           sm_scale=0.5, sinks=library.array(sinks, "float32"))
    keys = [one[:, None] for one in rows.rows]
    expected, _ = expected_attention(split(library.numpy(q), [1, 2]), keys,
                                     [one[..., :16] for one in keys], 0.5, sinks=sinks,
                                     window_left=4)
    assert_close(expected, library.numpy(out), "float32")
    with pytest.raises(ValueError, match="are the plan's"):
        fovea.mla_decode(q[..., :16], q[..., 16:], rows.tensor, rows.table, plan=plan,
                         sm_scale=0.5, window_left=3)


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_attention_decode(library, dtype, rules, rng):
    seq_lens, scale = [9, 1, 30], 0.25
    keys = Paged(library, dtype, seq_lens, (2, 16), rng)
    values = Paged(library, dtype, seq_lens, (2, 8), np.random.default_rng(7))
    q = library.array(rng.standard_normal((4, 6, 16)), dtype)
    out = fovea.attention_decode(q, (keys.tensor, values.tensor), keys.table, seq_lens,
                                 query_start_loc=[0, 1, 2, 4], sm_scale=scale, **rules)
    expected, _ = expected_attention(split(library.numpy(q), [1, 1, 2]), keys.rows, values.rows,
                                     scale, **rules)
    assert_close(expected, library.numpy(out), dtype)


def test_merge_state(library, dtype, rng):
    q = library.array(rng.standard_normal((3, 4, 8)), dtype)
    k, v = (library.array(rng.standard_normal((10, 2, 8)), dtype) for _ in range(2))
    parts = [fovea.attention_prefill(q, k[part], v[part], causal=False, return_lse=True)
             for part in (slice(0, 4), slice(4, 10))]
    out, lse = fovea.merge_state(*parts[0], *parts[1])
    expected, expected_lse = expected_attention([library.numpy(q)], [library.numpy(k)],
                                                [library.numpy(v)], 8 ** -0.5, causal=False)
    assert_close(expected, library.numpy(out), dtype)
    assert_close(expected_lse[..., None], library.numpy(lse)[..., None], dtype, "lse")


def test_outputs_are_written_in_place_and_nothing_else_is():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(4, 2, 8) for _ in range(3))
    around = torch.full((6, 2, 16), torch.nan)
    out = around[1:5, :, 4:12]
    assert fovea.attention_prefill(q, k, v, out=out) is out
    assert torch.equal(out, fovea.attention_prefill(q, k, v))
    around[1:5, :, 4:12] = torch.nan
    assert around.isnan().all()


def test_append_and_gather(library, rng):
    storage = library.unset((3, BLOCK_SIZE, 12))
    kv_c = library.array(rng.standard_normal((5, 8)), "float32")
    k_pe = library.array(rng.standard_normal((5, 4)), "float32")
    fovea.kv_append(kv_c, k_pe, library.array([4, 5, -1, 6, 7], "int32"), storage)
    out = library.unset((6, 12))
    fovea.kv_gather(storage, [[1]], [4], out[1:5])
    storage, out = library.numpy(storage), library.numpy(out)
    expected = np.concatenate([library.numpy(kv_c), library.numpy(k_pe)], 1)[[0, 1, 3, 4]]
    assert np.array_equal(out[1:5], expected)
    assert np.isnan(out[[0, 5]]).all() and np.isnan(storage[[0, 2]]).all()


def test_float8_queries():
    torch = pytest.importorskip("torch")
    q = torch.randn(2, 4, 24).to(torch.float8_e4m3fn)
    rows = torch.randn(3, BLOCK_SIZE, 24)
    arguments = dict(block_table=[[0, 1], [2, -1]], seq_lens=[7, 3], sm_scale=0.1)
    out = fovea.mla_decode(q[..., :16], q[..., 16:], rows, q_scale=0.5, **arguments)
    wide = q.float() * 0.5
    expected = fovea.mla_decode(wide[..., :16], wide[..., 16:], rows, **arguments)
    assert out.dtype == torch.bfloat16
    assert_close(expected.numpy(), out.float().numpy(), "bfloat16")


def test_threads_share_a_runtime(rng):
    from concurrent.futures import ThreadPoolExecutor
    q, k, v = (rng.standard_normal((64, 4, 32)).astype(np.float32) for _ in range(3))
    expected = fovea.attention_prefill(q, k, v)
    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(lambda _: fovea.attention_prefill(q, k, v), range(32)):
            assert np.array_equal(out, expected)
