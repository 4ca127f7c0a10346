"""fovea.check: every kernel of ours holds, and each known mistake is found and named."""

import numpy as np
import pytest

import fovea

torch = pytest.importorskip("torch")

from fovea.compat import flash_attn, flash_mla  # noqa: E402

# Scales are not the width's own, so that who ignores what is passed is found.
MLA = fovea.MlaDims(hidden_size=8, num_heads=6, kv_lora_rank=32, qk_nope_head_dim=16,
                    qk_rope_head_dim=8, v_head_dim=16, sm_scale=0.3)
GQA = fovea.GqaDims(hidden_size=8, num_heads=6, num_kv_heads=2, head_dim=16, v_head_dim=16,
                    sm_scale=0.3)


@pytest.mark.parametrize("format", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("call, dims, refused", [
    (fovea.mla_decode, MLA, set()),
    (fovea.attention_decode, GQA, set()),
    (fovea.attention_prefill, GQA, set()),
    (flash_mla.flash_mla_with_kvcache, MLA, set()),
    (flash_attn.flash_attn_varlen_func, GQA, set()),
    (flash_attn.flash_attn_with_kvcache, GQA, set()),
], ids=lambda value: getattr(value, "__name__", ""))
def test_ours_hold(call, dims, refused, format):
    report = fovea.check(call, dims, format)
    assert report.ok and set(report.refused) == refused, str(report)
    assert len(report.cases) >= 10 and report.worst_error > 0


@pytest.mark.parametrize("call, dims", [(fovea.mla_decode, MLA), (fovea.attention_decode, GQA)],
                         ids=["mla", "gqa"])
@pytest.mark.parametrize("format", ["fp8_e4m3", "int8_per_token", "int4_per_token"])
def test_stored_formats_hold(call, dims, format):
    report = fovea.check(call, dims, format)
    assert report.ok, str(report)


def test_numpy_arrays():
    report = fovea.check(fovea.mla_decode, MLA, "f32", library="numpy")
    assert report.ok, str(report)


def broken_mla(change):
    """mla_decode with `change(keywords)` before, which may return a change of its results."""
    def mla_decode(q_latent, q_pe, cache, block_table, seq_lens, **keywords):
        after = change(keywords)
        out, lse = fovea.mla_decode(q_latent, q_pe, cache, block_table, seq_lens, **keywords)
        return after(out, lse, keywords) if after else (out, lse)
    return mla_decode


def with_sinks_in_lse(keywords):
    def after(out, lse, keywords):
        if keywords["sinks"] is not None:
            lse = torch.logaddexp(lse, keywords["sinks"][:, None])
        return out, lse
    return after


MISTAKES = [
    (lambda k: k.update(sm_scale=40 ** -0.5), "another scale", "the scale is the width's own"),
    (lambda k: k.update(causal=False), "several query tokens", "the causal mask is missing"),
    (lambda k: k.update(window_left=k["window_left"] + 1) if k["window_left"] >= 0 else None,
     "window", "one key too wide"),
    (lambda k: k.update(window_left=-1), "window", "the window is ignored"),
    (lambda k: k.update(attention_chunk=0), "attention chunks", "attention chunks are ignored"),
    (lambda k: k.update(soft_cap=0.0), "soft cap", "the soft cap is ignored"),
    (lambda k: k.update(sinks=None), "sinks", "sinks are ignored"),
    (lambda k: k.update(sinks=k["sinks"] * k["sm_scale"]) if k["sinks"] is not None else None,
     "sinks", "sinks are scaled"),
    (with_sinks_in_lse, "sinks", "lse has the sinks in it"),
    (lambda k: lambda out, lse, _: (out, lse / np.log(2)), "random lengths", "lse is in base 2"),
    (lambda k: lambda out, lse, _: (out.nan_to_num(), lse), "a NaN key", ""),
    (lambda k: lambda out, lse, _: (out, lse.T), "random lengths", "lse has (5, 6)"),
]


@pytest.mark.parametrize("change, case, diagnosis", MISTAKES,
                         ids=[f"{case}: {text}" for _, case, text in MISTAKES])
def test_mistakes_are_named(change, case, diagnosis):
    report = fovea.check(broken_mla(change), MLA, "f32")
    found = {finding.case: finding for finding in report.findings}
    assert not report.ok and case in found, str(report)
    assert diagnosis in found[case].diagnosis, str(found[case])
    assert case in str(report)


def dense_softmax(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal,
                  head_of_query, hides):
    """A plain decode of [batch, queries, heads, width] that masks as `hides` does."""
    outs, lses = [], []
    for one_q, length, blocks in zip(q.double(), cache_seqlens.tolist(), block_table):
        k, v = (cache[blocks].flatten(0, 1).double() for cache in (k_cache, v_cache))
        heads = [head_of_query(n) for n in range(q.shape[2])]
        scores = torch.einsum("qhd,khd->hqk", one_q, k[:, heads]) * softmax_scale
        position = torch.arange(k.shape[0])
        visible = position < length
        if causal:
            last = length - one_q.shape[0] + torch.arange(one_q.shape[0])
            visible = visible & (position <= last[:, None])
        scores, v = hides(scores, v, visible, length)
        lses.append(scores.logsumexp(-1))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0), v[:, heads]))
    return torch.stack(outs), torch.stack(lses)


def hides_by_value(scores, v, visible, length):
    return scores.masked_fill(~visible, -torch.inf), v  # NaN * 0 is NaN.


def hides_well(scores, v, visible, length):
    v = v.clone()
    v[length:] = 0
    return scores.masked_fill(~visible, -torch.inf), v


def kv_cache_kernel(head_of_query, hides):
    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale,
                                causal, window_size, softcap, return_softmax_lse):
        if window_size != (-1, -1) or softcap:
            raise NotImplementedError("windows and caps")
        return dense_softmax(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal,
                             head_of_query, hides)
    return flash_attn_with_kvcache


def test_foreign_kernels():
    in_groups, in_turn = (lambda n: n // 3), (lambda n: n % 2)
    leaky = fovea.check(kv_cache_kernel(in_groups, hides_by_value), GQA, "f32")
    assert set(leaky.refused) == {"window", "soft cap"}
    assert "NaN comes through" in {f.case: f for f in leaky.findings}["random lengths"].diagnosis
    turned = fovea.check(kv_cache_kernel(in_turn, hides_well), GQA, "f32")
    assert "heads read key heads in turn" in str(turned.findings[0])
    raising = fovea.check(lambda *args, **_: 1 / 0, GQA, signature="flash_attn_with_kvcache")
    assert all("ZeroDivisionError" in finding.diagnosis for finding in raising.findings)
    assert raising.findings


def test_arguments_are_named():
    with pytest.raises(ValueError, match="signature is 'nothing'; it must be one of mla_decode"):
        fovea.check(lambda: None, MLA, signature="nothing")
    with pytest.raises(TypeError, match="dims is a MlaDims; attention_decode needs GqaDims"):
        fovea.check(fovea.attention_decode, MLA)
    with pytest.raises(ValueError, match="takes bf16, f16 and f32"):
        fovea.check(fovea.attention_prefill, GQA, "fp8_e4m3")
