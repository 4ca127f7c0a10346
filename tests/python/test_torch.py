"""Custom ops: what their fakes promise, and graphs compiled through them."""

import pytest

import fovea

torch = pytest.importorskip("torch")

import fovea.torch  # noqa: E402

INT = dict(dtype=torch.int32)


def operands():
    torch.manual_seed(0)
    table, lengths = torch.tensor([[1, 0], [2, 2]], **INT), torch.tensor([6, 3], **INT)
    starts = torch.tensor([0, 1, 3], **INT)
    latent, keys, values = (torch.randn(3, 4, *shape) for shape in ((24,), (2, 8), (2, 6)))
    q, k, v = torch.randn(3, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 6)
    state = fovea.attention_prefill(q, q, q, return_lse=True)
    slots = torch.tensor([5, 0, 7])
    return {
        "mla_decode": (torch.randn(3, 4, 16), q, latent, table, lengths, starts, 0.3),
        "attention_decode": (q, keys, values, table, lengths, starts, 0.3),
        "attention_prefill": (q, k, v, starts, torch.tensor([0, 2, 5], **INT), 0.3),
        "merge_state": (*state, *state),
        "kv_append": (torch.randn(3, 16), torch.randn(3, 8), slots, latent),
        "gqa_append": (k[:3], v[:3], slots, keys, values),
    }


@pytest.mark.parametrize("name", fovea.torch.__all__)
def test_fakes_promise_what_ops_do(name):
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(fovea.torch, name), operands()[name], test_utils=checks)


def test_compiled_graphs_have_no_break():
    q_latent, q_pe, cache, table, lengths, starts, scale = operands()["mla_decode"]
    kv_c, k_pe, slots, _ = operands()["kv_append"]

    def step(q_latent, q_pe, kv_c, k_pe, cache):
        torch.ops.fovea.kv_append(kv_c, k_pe, slots, cache)
        out, lse = torch.ops.fovea.mla_decode(2 * q_latent, q_pe, cache, table, lengths, starts,
                                              scale)
        return out.relu() + lse.T[..., None]

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    caches = cache.clone(), cache.clone()
    expected, got = (call(q_latent, q_pe, kv_c, k_pe, one)
                     for call, one in zip((step, compiled), caches))
    assert torch.equal(expected, got) and torch.equal(*caches)
    assert not torch.equal(caches[0], cache)
