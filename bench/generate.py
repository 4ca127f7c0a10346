#!/usr/bin/env python3
"""Times decode steps of transformers' models with eager, sdpa and fovea attention, in turns.

Two layers with the attention of published models and a small MLP, random weights, one sequence
whose cache holds random numbers: generate.py [--context 4096] [--steps 8] [--dtype float32]. Prints the
median milliseconds of a step.
"""

import argparse
import statistics
import time

import torch
import transformers
from transformers import (DeepseekV2Config, DeepseekV2ForCausalLM, DynamicCache, LlamaConfig,
                          LlamaForCausalLM)

import fovea.transformers  # noqa: F401: registers "fovea"

SMALL = dict(num_hidden_layers=2, intermediate_size=256, vocab_size=256,
             max_position_embeddings=8192)
MODELS = {
    "llama-3-8b": (LlamaForCausalLM, LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128, **SMALL)),
    "deepseek-v2-lite": (DeepseekV2ForCausalLM, DeepseekV2Config(
        hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        first_k_dense_replace=2, **SMALL)),
}
WAYS = ("eager", "sdpa", "fovea")


def milliseconds(call):
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def filled_cache(model, context):
    """A cache of `context` tokens: latents, or keys and values."""
    config, dtype = model.config, model.dtype
    cache = DynamicCache(config=config)
    if hasattr(config, "kv_lora_rank"):
        shapes = [(1, 1, context, config.kv_lora_rank), (1, 1, context, config.qk_rope_head_dim)]
    else:
        shapes = [(1, config.num_key_value_heads, context, config.head_dim)] * 2
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(shape, dtype=dtype) for shape in shapes), layer)
    return cache


@torch.no_grad()
def measure(model, context, steps):
    """{way: median ms of a step}"""
    caches = {way: filled_cache(model, context) for way in WAYS}
    decode = {way: [] for way in WAYS}
    token = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(steps + 2):
        for way in WAYS:  # In turns: other load hits all.
            model.set_attn_implementation(way)
            decode[way].append(milliseconds(
                lambda: model(token, cache=caches[way], use_cache=True)))
    return {way: statistics.median(times[2:]) for way, times in decode.items()}  # 2 warm up.


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    for name, (kind, config) in MODELS.items():
        torch.manual_seed(0)
        model = kind(config).eval().to(getattr(torch, options.dtype))
        for way, step in measure(model, options.context, options.steps).items():
            print(f"{name:18} {way:6} context {options.context}: decode step {step:7.2f} ms",
                  flush=True)


if __name__ == "__main__":
    main()
