"""Plans, layers, models and the engine."""

import numpy as np
import pytest

import fovea
from problems import assert_close, expected_attention

HIDDEN, HEADS = 32, 4


def weights(rng, shapes):
    return {name: (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
            for name, shape in shapes.items()}


def test_plan_says_what_it_decided():
    plan = fovea.BatchPlan([0, 1, 2, 6], [5, 9, 14], context_plan="packed", workspace_rows=16)
    assert (plan.num_decodes, plan.num_prefills, plan.num_actual_tokens) == (2, 1, 6)
    assert plan.num_chunks == 1 and plan.peak_context_rows == 10
    assert "decode" in str(plan) and plan.to_json().startswith("{")
    with pytest.raises(ValueError, match="seq_lens"):
        fovea.BatchPlan([0, 4], [3])
    with pytest.raises(ValueError, match='context_plan is "best"; it must be one of "packed"'):
        fovea.BatchPlan([0, 1], [3], context_plan="best")


def test_attention_layer(rng):
    dims = fovea.GqaDims(hidden_size=HIDDEN, num_heads=HEADS, num_kv_heads=2)
    w = weights(rng, {"q_proj": (HIDDEN, HIDDEN), "k_proj": (16, HIDDEN), "v_proj": (16, HIDDEN),
                      "o_proj": (HIDDEN, HIDDEN)})
    layer = fovea.AttentionLayer(dims, w)
    cache = fovea.PagedKvCache.heads(2, 8, num_blocks=4, format="f32")
    sequence = cache.new_sequence()
    hidden = rng.standard_normal((6, HIDDEN)).astype(np.float32)
    outs = []
    for begin, end in ((0, 5), (5, 6)):  # A prompt, then a decode.
        plan = fovea.BatchPlan([0, end - begin], [end], context_plan="paged")
        slots = sequence.reserve(end)
        outs.append(layer(hidden[begin:end], cache, plan, [sequence.blocks], slots))
        sequence.advance(end)
    q, k, v = (hidden.astype(np.float64) @ w[name].T.astype(np.float64)
               for name in ("q_proj", "k_proj", "v_proj"))
    attended, _ = expected_attention([q.reshape(6, HEADS, 8)], [k.reshape(6, 2, 8)],
                                     [v.reshape(6, 2, 8)], 8 ** -0.5)
    assert_close(attended.reshape(6, HIDDEN) @ w["o_proj"].T, np.concatenate(outs), "float32")


def mla_world(rng):
    dims = fovea.MlaDims(hidden_size=HIDDEN, num_heads=HEADS, kv_lora_rank=16, qk_nope_head_dim=8,
                         qk_rope_head_dim=4, v_head_dim=6)
    w = weights(rng, {"q_b_proj": (HEADS * 12, HIDDEN), "kv_a_proj": (20, HIDDEN),
                      "kv_b_proj": (HEADS * 14, 16), "o_proj": (HIDDEN, HEADS * 6)})
    w["kv_a_layernorm"] = np.ones(16, np.float32)
    return dims, w


def expected_mla(hidden, w):
    """One sequence from position 0 on, expanded, without rotation."""
    hidden = hidden.astype(np.float64)
    tokens = len(hidden)
    q = (hidden @ w["q_b_proj"].T).reshape(tokens, HEADS, 12)
    latent, k_pe = np.split(hidden @ w["kv_a_proj"].T, [16], axis=1)
    latent /= np.sqrt((latent ** 2).mean(1, keepdims=True) + 1e-6)
    k_nope, v = np.split((latent @ w["kv_b_proj"].T).reshape(tokens, HEADS, 14), [8], axis=2)
    k = np.concatenate([k_nope, np.repeat(k_pe[:, None], HEADS, 1)], 2)
    out, _ = expected_attention([q], [k], [v], 12 ** -0.5)
    return out.reshape(tokens, -1) @ w["o_proj"].T


@pytest.mark.parametrize("absorption", ["two_step", "full"])
def test_mla_layer(rng, absorption):
    dims, w = mla_world(rng)
    assert dims.sm_scale == pytest.approx(12 ** -0.5)
    layer = fovea.MlaLayer(dims, w, absorption=absorption)
    cache = fovea.PagedKvCache.latent(16, 4, num_blocks=4, format="f32")
    sequence = cache.new_sequence()
    hidden = rng.standard_normal((9, HIDDEN)).astype(np.float32)
    outs = []
    for begin, end in ((0, 5), (5, 8), (8, 9)):  # A prompt in two chunks, then a decode.
        plan = fovea.BatchPlan([0, end - begin], [end])
        slots = sequence.reserve(end)
        outs.append(layer(hidden[begin:end], cache, plan, [sequence.blocks], slots))
        sequence.advance(end)
    assert_close(expected_mla(hidden, w), np.concatenate(outs), "float32")


def test_layers_name_what_is_wrong(rng):
    dims, w = mla_world(rng)
    with pytest.raises(ValueError, match='weights has "kv_proj"; its names may be'):
        fovea.MlaLayer(dims, dict(w, kv_proj=w["o_proj"]))
    with pytest.raises(ValueError, match="kv_b_proj"):
        fovea.MlaLayer(dims, dict(w, kv_b_proj=w["kv_b_proj"][:-1]))
    with pytest.raises(TypeError, match="rotary is a str"):
        fovea.MlaLayer(dims, w, rotary="yarn")
    with pytest.raises(ValueError, match="kv_lora_rank"):
        fovea.MlaDims(hidden_size=8, num_heads=1, kv_lora_rank=0, qk_nope_head_dim=1,
                      qk_rope_head_dim=2, v_head_dim=1)


DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 100, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 128, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}


def test_dims_come_from_configs(tmp_path):
    import json
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    for config in (DEEPSEEK, tmp_path, tmp_path / "config.json", str(tmp_path)):
        dims = fovea.MlaDims.from_config(config)
        assert (dims.num_heads, dims.q_lora_rank, dims.latent_dim) == (4, 24, 40)
        assert dims.sm_scale == pytest.approx(24 ** -0.5)
    assert fovea.RotaryEmbedding.from_config(DEEPSEEK).dim == 8
    with pytest.raises(ValueError, match="use MlaDims.from_config"):
        fovea.GqaDims.from_config(DEEPSEEK)
    with pytest.raises(ValueError, match="kv_lora_rank"):
        fovea.MlaDims.from_config({k: v for k, v in DEEPSEEK.items() if k != "kv_lora_rank"})
    with pytest.raises(ValueError, match="cannot be read"):
        fovea.MlaDims.from_config(tmp_path / "none.json")


@pytest.mark.parametrize("preset", ["deepseek-v2-lite", "gpt-oss-20b"])
def test_engine_serves_and_verifies(preset):
    model = fovea.Model.load(preset, num_layers=1, max_position=256)
    engine = fovea.Engine(model, block_size=8, token_budget=64)
    report = engine.serve(fovea.Workload.of_lengths([40, 70], [3, 2]), verify_rows=4)
    assert report["finished"] == 2 and report["answer_tokens"] == 5 and not report["refused"]
    assert 0 < report["worst_relative_error"] <= report["error_limit"], report["worst_row"]
    with pytest.raises(ValueError, match="block_size"):
        fovea.Engine(model, block_size=0)
