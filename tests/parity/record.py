#!/usr/bin/env python3
"""Makes tiny random models with transformers and records what their attention layers do.

For each model, DIR/<name> gets what save_pretrained writes, and recordings.safetensors with, per
layer i, hidden states that enter attention (after input_layernorm) and what leaves it (after o_proj):

    layer.i.full.{input,output}     one forward over PREFILL + DECODE tokens
    layer.i.prefill.{input,output}  one forward over PREFILL tokens, filling transformers' cache
    layer.i.decode.{input,output}   DECODE forwards of one token each with that cache

A model is saved in its dtype but runs in float32 on weights and attention inputs rounded to it, so
that the recordings hold no rounding but float32's. DIR/models.txt lists the names.
"""

import argparse
import json
import pathlib

import safetensors.torch
import torch
import transformers
from transformers import (DynamicCache, DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config,
                          DeepseekV3ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig,
                          Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, GptOssConfig,
                          GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, MiniCPM3Config,
                          MiniCPM3ForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

PREFILL, DECODE = 96, 64
LAYERS = 3

COMMON = dict(hidden_size=96, intermediate_size=64, num_hidden_layers=LAYERS,
              num_attention_heads=8, num_key_value_heads=8, vocab_size=512, q_lora_rank=40,
              kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20,
              max_position_embeddings=1024)
# Grouped queries: three heads share a key head, and heads are wider than hidden_size / heads.
GROUPED = dict(hidden_size=96, intermediate_size=64, num_hidden_layers=LAYERS,
               num_attention_heads=6, num_key_value_heads=2, head_dim=32, vocab_size=512,
               max_position_embeddings=1024)
WINDOW = 16  # Of the windowed layers: many times shorter than the sequences.
# The last layer has experts, so that checkpoints hold tensors that attention must pass over.
EXPERTS = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
               topk_group=1, n_shared_experts=1)
SPARSE_LAST = dict(EXPERTS, first_k_dense_replace=LAYERS - 1)


def yarn(**changes):
    # Original lengths below the sequence's, so that stretched frequencies matter.
    return dict({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32,
                 "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
                 "original_max_position_embeddings": 64}, **changes)


def longrope(original):
    pairs = COMMON["qk_rope_head_dim"] // 2
    return {"rope_type": "longrope", "rope_theta": 10000.0,
            "short_factor": [1 + 0.2 * i for i in range(pairs)],
            "long_factor": [1 + 0.9 * i for i in range(pairs)],
            "original_max_position_embeddings": original}


def default_rope(theta=10000.0):
    return {"rope_type": "default", "rope_theta": theta}


def gqa_models():
    """As models(), of the families with grouped-query attention."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    # The published ramp, neither end of which is a whole channel pair.
    gpt_oss = GptOssConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, layer_types=types,
                           sliding_window=WINDOW, rms_norm_eps=1e-5, rope_parameters={
                               "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0,
                               "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                               "original_max_position_embeddings": 64})
    llama3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
                  high_freq_factor=4.0, original_max_position_embeddings=64)
    qwen2 = Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=WINDOW,
                        max_window_layers=1, rope_parameters=default_rope(1e6))
    qwen3 = Qwen3Config(**GROUPED, use_sliding_window=True, sliding_window=WINDOW,
                        layer_types=types, rope_parameters=default_rope(1e6))
    mistral = MistralConfig(**dict(GROUPED, head_dim=None, hidden_size=108), rms_norm_eps=1e-5,
                            sliding_window=WINDOW, rope_parameters=default_rope())
    gemma = Gemma3TextConfig(**GROUPED, sliding_window=WINDOW, query_pre_attn_scalar=24,
                             layer_types=types, rope_parameters={
                                 "full_attention": {"rope_type": "linear", "factor": 8.0,
                                                    "rope_theta": 1e6},
                                 "sliding_attention": default_rope()})
    both = (("", torch.float32), ("_bf16", torch.bfloat16))
    for suffix, dtype in both:
        yield (f"gpt_oss{suffix}", gpt_oss, GptOssForCausalLM, dtype, {})
        yield (f"llama3{suffix}", LlamaConfig(**GROUPED, rope_parameters=llama3),
               LlamaForCausalLM, dtype, {})
        yield (f"qwen2{suffix}", qwen2, Qwen2ForCausalLM, dtype, {})
        yield (f"qwen3{suffix}", qwen3, Qwen3ForCausalLM, dtype, {})
        yield (f"mistral{suffix}", mistral, MistralForCausalLM, dtype, {})
        yield (f"gemma3{suffix}", gemma, Gemma3ForCausalLM, dtype, {})
    # Llama 2: as many key heads as heads. The biases are an option of newer files.
    yield ("llama2_bias",
           LlamaConfig(**dict(GROUPED, num_key_value_heads=6, head_dim=None), attention_bias=True,
                       rope_parameters=default_rope()), LlamaForCausalLM, torch.float32, {})
    yield ("llama_linear",
           LlamaConfig(**GROUPED, rope_parameters=dict(default_rope(), rope_type="linear",
                                                       factor=4.0)),
           LlamaForCausalLM, torch.float32, {})
    yield ("llama_yarn",
           LlamaConfig(**GROUPED, rope_parameters={
               "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0,
               "attention_factor": 1.25, "original_max_position_embeddings": 64}),
           LlamaForCausalLM, torch.float32, {})


def models():
    """name, config, class, dtype, options: tensors per file, fields of config.json to replace."""
    yield from mla_models()
    yield from gqa_models()


def mla_models():
    v2 = dict(COMMON, **SPARSE_LAST, topk_method="greedy")
    v3 = dict(COMMON, **SPARSE_LAST)
    glm = dict(COMMON, **EXPERTS, mlp_layer_types=["dense"] * (LAYERS - 1) + ["sparse"])
    yield ("deepseek_v2", DeepseekV2Config(**v2, rope_parameters=yarn()), DeepseekV2ForCausalLM,
           torch.float32, {})
    yield ("deepseek_v2_lite", DeepseekV2Config(**dict(v2, q_lora_rank=None),
                                                rope_parameters=yarn()),
           DeepseekV2ForCausalLM, torch.float32, {})
    yield ("deepseek_v2_lite_bf16", DeepseekV2Config(**dict(v2, q_lora_rank=None),
                                                     rope_parameters=yarn()),
           DeepseekV2ForCausalLM, torch.bfloat16, {})
    yield ("deepseek_v3", DeepseekV3Config(**v3, attention_bias=True,
                                           rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0)),
           DeepseekV3ForCausalLM, torch.float32, {"max_shard_size": "50KB"})
    yield ("deepseek_v3_amplitude",
           DeepseekV3Config(**v3, rope_parameters=yarn(mscale=1.0, mscale_all_dim=0.5)),
           DeepseekV3ForCausalLM, torch.float32, {})
    yield ("deepseek_v3_neox", DeepseekV3Config(**v3, rope_interleave=False, rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0}), DeepseekV3ForCausalLM, torch.float32, {})
    yield ("deepseek_v3_bf16",
           DeepseekV3Config(**v3, rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0)),
           DeepseekV3ForCausalLM, torch.bfloat16, {"max_shard_size": "50KB"})
    # Kimi-K2 is DeepSeek-V3 with other numbers under a model type of its own.
    yield ("kimi_k2", DeepseekV3Config(**dict(v3, num_attention_heads=6, num_key_value_heads=6),
                                       rope_parameters=yarn(rope_theta=50000.0, factor=32.0,
                                                            beta_fast=1, mscale=1.0,
                                                            mscale_all_dim=1.0)),
           DeepseekV3ForCausalLM, torch.float32, {"config": {"model_type": "kimi_k2"}})
    for suffix, original, dtype in (("short", 512, torch.float32), ("long", 64, torch.float32),
                                    ("bf16", 512, torch.bfloat16)):
        yield (f"minicpm3_{suffix}",
               MiniCPM3Config(**dict(COMMON, v_head_dim=None), rms_norm_eps=1e-5,
                              rope_parameters=longrope(original)),
               MiniCPM3ForCausalLM, dtype, {})
    # 20 heads with wide values are the published model's; here five.
    wide = dict(glm, num_attention_heads=5, num_key_value_heads=5, hidden_size=80,
                qk_nope_head_dim=48, v_head_dim=64, rms_norm_eps=1e-5)
    for suffix, dtype in (("", torch.float32), ("_bf16", torch.bfloat16)):
        yield (f"glm4_moe_lite{suffix}", Glm4MoeLiteConfig(**wide, rope_parameters={
            "rope_type": "default", "rope_theta": 1e6}), Glm4MoeLiteForCausalLM, dtype, {})


def randomise(model, generator):
    """Weights whose attention tells keys apart: the default initialisation gives uniform averages.

    Logits get a standard deviation of about 2 whatever the softmax scale; bf16's error grows with it.
    """
    attention = model.model.layers[0].self_attn
    if hasattr(attention, "qk_head_dim"):
        query_gain = 2.0 / (attention.scaling * attention.qk_head_dim ** 0.5)
    else:
        # Whole heads turn: a rotation's amplitude counts in queries and in keys.
        amplitude = getattr(model.model.rotary_emb, "attention_scaling", 1.0)
        query_gain = 2.0 / (attention.scaling * attention.head_dim ** 0.5 * amplitude ** 2)
    # Behind a norm the projection's size means nothing; the norm's weights have it then.
    normed = hasattr(attention, "q_norm")
    stored_less = 1 if isinstance(model, Gemma3ForCausalLM) else 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                gain = query_gain if name.endswith("q_norm.weight") else 1.0
                parameter.copy_(gain * (1 + 0.3 * noise) - stored_less)
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name or name.endswith(".sinks"):
                parameter.copy_(noise)
            else:
                is_query = "q_b_proj" in name or "q_proj" in name
                gain = query_gain if is_query and not normed else 1.0
                parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)


class Recorder:
    """Rounds what enters each attention layer to `dtype` and keeps it with what leaves."""

    def __init__(self, model, dtype):
        self.dtype, self.inputs, self.outputs, self.weights = dtype, {}, {}, []
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.register_forward_pre_hook(self.before(index), with_kwargs=True)
            layer.self_attn.register_forward_hook(self.after(index), with_kwargs=True)

    def before(self, index):
        def hook(module, args, kwargs):
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            rounded = hidden.to(self.dtype).to(torch.float32)
            self.inputs.setdefault(index, []).append(rounded[0].to(self.dtype))
            if "hidden_states" in kwargs:
                return args, dict(kwargs, hidden_states=rounded)
            return (rounded,) + args[1:], kwargs
        return hook

    def after(self, index):
        def hook(module, args, kwargs, result):
            self.outputs.setdefault(index, []).append(result[0][0])
            self.weights.append(result[1])
        return hook

    def take(self, name):
        taken = {}
        for index in self.inputs:
            taken[f"layer.{index}.{name}.input"] = torch.cat(self.inputs[index]).contiguous()
            taken[f"layer.{index}.{name}.output"] = torch.cat(self.outputs[index]).contiguous()
        self.inputs, self.outputs = {}, {}
        return taken


@torch.no_grad()
def record(model, dtype, generator):
    recorder = Recorder(model, dtype)
    tokens = torch.randint(0, model.config.vocab_size, (1, PREFILL + DECODE), generator=generator)
    model(tokens, use_cache=False)
    tensors = recorder.take("full")
    # Uniform attention would hide mistakes: the largest weight of the last row against 1 / length.
    peak = torch.stack([w[0, :, -1].max(-1).values.mean() for w in recorder.weights]).mean().item()
    assert peak > 10 / (PREFILL + DECODE), f"attention is nearly uniform: largest weight {peak}"

    cache = DynamicCache(config=model.config)
    model(tokens[:, :PREFILL], cache=cache, use_cache=True)
    tensors |= recorder.take("prefill")
    for position in range(PREFILL, PREFILL + DECODE):
        model(tokens[:, position:position + 1], cache=cache, use_cache=True)
    tensors |= recorder.take("decode")

    # Both of transformers' ways must agree, or there is nothing to compare with.
    for index in range(LAYERS):
        whole = tensors[f"layer.{index}.full.output"][PREFILL:]
        stepwise = tensors[f"layer.{index}.decode.output"]
        limit = 1e-4 if dtype == torch.float32 else 2e-2
        difference = ((whole - stepwise).norm(dim=1) / whole.norm(dim=1)).max().item()
        assert difference < limit, f"layer {index}: decode differs from prefill by {difference}"
    return tensors, peak


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path)
    directory = parser.parse_args().directory
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)  # Of these sizes threads only wait for each other.
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    names = []
    for seed, (name, config, model_class, dtype, options) in enumerate(models()):
        generator = torch.Generator().manual_seed(seed)
        config._attn_implementation = "eager"
        model = model_class(config).eval()
        randomise(model, generator)
        target = directory / name
        model.to(dtype).save_pretrained(target, max_shard_size=options.get("max_shard_size", "5GB"))
        assert "max_shard_size" not in options or list(target.glob("*.index.json")), target
        model = model.to(torch.float32)
        # Other frequencies in bf16 than in f32 are no property of the checkpoint.
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        tensors, peak = record(model, dtype, generator)
        safetensors.torch.save_file(tensors, target / "recordings.safetensors")
        if "config" in options:
            path = target / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | options["config"]))
        names.append(name)
        print(f"  {name}: mean of the largest attention weight {peak:.2f}", flush=True)
    (directory / "models.txt").write_text("\n".join(names) + "\n")


if __name__ == "__main__":
    main()
