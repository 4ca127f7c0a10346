"""CUDA tensors beyond what test_ops.py does with them: streams, sequences, mixed devices."""

import numpy as np
import pytest

import fovea
from conftest import has_cuda
from fovea.compat import flash_mla
from problems import Library, Paged, assert_close, expected_attention, split

if not has_cuda():
    pytest.skip("needs a GPU and a build of fovea with CUDA", allow_module_level=True)

import torch  # noqa: E402

CUDA = Library("cuda")


def mla_problem(rng, seq_lens=(9, 30), heads=4):
    rows = Paged(CUDA, "float32", seq_lens, (24,), rng)
    q = CUDA.array(rng.standard_normal((len(seq_lens), heads, 24)), "float32")
    keys = [one[:, None] for one in rows.rows]
    expected, _ = expected_attention(split(CUDA.numpy(q), [1] * len(seq_lens)), keys,
                                     [one[..., :16] for one in keys], 0.2)
    arguments = (q[..., :16], q[..., 16:], rows.tensor, rows.table, list(seq_lens))
    return arguments, expected


def test_work_goes_to_the_current_stream(rng):
    """What a call reads is written by a slow kernel that is queued just before, on that stream."""
    (q_latent, q_pe, rows, table, lengths), expected = mla_problem(rng)
    late = torch.full_like(rows, torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        late.copy_(rows)
        out = fovea.mla_decode(q_latent, q_pe, late, table, lengths, sm_scale=0.2)
        out = out.clone()
        late.fill_(torch.nan)
        torch.cuda.current_stream().synchronize()
    assert_close(expected, CUDA.numpy(out), "float32")


def test_a_runtime_has_a_stream_that_waits_for_operands(rng):
    (q_latent, q_pe, rows, table, lengths), expected = mla_problem(rng)
    stream = torch.cuda.Stream()
    runtime = fovea.Runtime(backend="cuda", cuda_stream=stream.cuda_stream)
    late = torch.full_like(rows, torch.nan)
    out = torch.full_like(q_latent, torch.nan)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    late.copy_(rows)
    fovea.mla_decode(q_latent, q_pe, late, table, lengths, sm_scale=0.2, out=out, runtime=runtime)
    stream.synchronize()
    assert_close(expected, CUDA.numpy(out), "float32")


def test_calls_are_captured_into_graphs(rng):
    (q_latent, q_pe, rows, table, lengths), expected = mla_problem(rng)
    plan = fovea.BatchPlan([0, 1, 2], lengths, runtime=fovea.Runtime(backend="cuda"))
    out = torch.full_like(q_latent, torch.nan)

    def call():
        fovea.mla_decode(q_latent, q_pe, rows, table, plan=plan, sm_scale=0.2, out=out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # Reserves scratch, which a capture must not.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    out.fill_(torch.nan)
    graph.replay()
    assert_close(expected, CUDA.numpy(out), "float32")


def test_lengths_and_tables_of_the_gpu_are_copied(rng):
    (q_latent, q_pe, rows, table, lengths), expected = mla_problem(rng)
    out = fovea.mla_decode(q_latent, q_pe, rows, torch.tensor(table).cuda(),
                           torch.tensor(lengths).cuda(), sm_scale=0.2)
    assert_close(expected, CUDA.numpy(out), "float32")


def test_sequences_over_a_storage(rng):
    storage = torch.full((6, 4, 24), torch.nan, device="cuda")
    cache = fovea.PagedKvCache.latent(16, 8, format="f32", storage=storage)
    first = cache.new_sequence()
    rows = CUDA.array(rng.standard_normal((11, 24)), "float32")
    first.append(rows[:6, :16], rows[:6, 16:])
    second = first.fork()  # Both share a block that is half full.
    for sequence, part in ((first, rows[6:]), (second, rows[6:] + 1)):
        sequence.append(part[:, :16], part[:, 16:])
    cache.grow(torch.full((9, 4, 24), torch.nan, device="cuda"))
    q = CUDA.array(rng.standard_normal((2, 3, 24)), "float32")
    out = fovea.mla_decode(q[..., :16], q[..., 16:], cache, [first.blocks, second.blocks],
                           [11, 11], sm_scale=0.3)
    keys = [CUDA.numpy(rows)[:, None], CUDA.numpy(torch.cat([rows[:6], rows[6:] + 1]))[:, None]]
    expected, _ = expected_attention(split(CUDA.numpy(q), [1, 1]), keys,
                                     [one[..., :16] for one in keys], 0.3)
    assert_close(expected, CUDA.numpy(out), "float32")


def test_operands_of_different_devices_are_refused(rng):
    (q_latent, q_pe, rows, table, lengths), _ = mla_problem(rng)
    with pytest.raises(NotImplementedError, match="q_pe"):
        fovea.mla_decode(q_latent, q_pe.cpu(), rows, table, lengths, sm_scale=0.2)
    with pytest.raises(NotImplementedError, match="on CUDA device 0"):
        fovea.mla_decode(q_latent, q_pe, rows, table, lengths, sm_scale=0.2,
                         runtime=fovea.Runtime(backend="cpu"))


def test_flash_mla_script():
    torch.manual_seed(0)
    q = torch.randn(2, 2, 16, 576, dtype=torch.bfloat16, device="cuda")
    rows = torch.randn(4, 64, 1, 576, dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([100, 65], dtype=torch.int32, device="cuda")
    metadata, splits = flash_mla.get_mla_metadata(lengths, 2 * 16, 1)
    results = [flash_mla.flash_mla_with_kvcache(*(x.to(device) for x in (q, rows, table, lengths)),
                                                512, metadata, splits, causal=True)
               for device in ("cuda", "cpu")]
    for expected, got, dtype in zip(results[1], results[0], ("bfloat16", "float32")):
        assert got.is_cuda
        assert_close(expected.double().numpy(), got.double().cpu().numpy(), dtype)


def test_compiled_graphs_run():
    import fovea.torch  # noqa: F401  Registers the ops.
    q, k, v = (torch.randn(5, 2, 16, device="cuda") for _ in range(3))
    starts = torch.tensor([0, 5], dtype=torch.int32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v):
        return torch.ops.fovea.attention_prefill(q * 2, k, v, starts, starts, 0.25)[0] + 1

    expected = fovea.attention_prefill(q * 2, k, v, starts, starts, sm_scale=0.25) + 1
    assert torch.equal(step(q, k, v), expected)


@pytest.mark.parametrize("format", ["bf16", "int8_per_token"])
@pytest.mark.parametrize("op", [fovea.mla_decode, fovea.attention_decode, fovea.attention_prefill])
def test_check_finds_nothing(op, format):
    if op is fovea.mla_decode:
        dims = fovea.MlaDims(hidden_size=64, num_heads=5, kv_lora_rank=32, qk_nope_head_dim=16,
                             qk_rope_head_dim=16, v_head_dim=16)
    else:
        dims = fovea.GqaDims(hidden_size=64, num_heads=6, num_kv_heads=2, head_dim=32)
    if op is fovea.attention_prefill:
        format = "f16"
    report = fovea.check(op, dims, format, device="cuda")
    assert report.ok and not report.refused, report


def test_generate_of_transformers():
    transformers = pytest.importorskip("transformers")
    import fovea.transformers  # noqa: F401  Registers the implementation.
    config = transformers.DeepseekV3Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, vocab_size=128, first_k_dense_replace=2,
        max_position_embeddings=256)
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config).eval().cuda()
    tokens = torch.randint(0, 128, (2, 20), device="cuda")
    texts = []
    for implementation in ("eager", "fovea"):
        model.set_attn_implementation(implementation)
        texts.append(model.generate(tokens, attention_mask=torch.ones_like(tokens),
                                    max_new_tokens=6, do_sample=False, pad_token_id=0))
    assert np.array_equal(*(text.cpu().numpy() for text in texts))
