#!/usr/bin/env python3
"""Times torch's scaled_dot_product_attention on cases of the suite cpu: torch_sdpa.py FOVEA.json OUT.json

FOVEA.json is a result of `fovea bench --suite cpu --json FOVEA.json` on this machine. OUT.json has the same form, so
that `compare.py FOVEA.json OUT.json` puts both side by side.

torch has no paged cache: keys and values are contiguous, [1, heads, tokens, channels], which is what it is fastest
with. A latent row is one key head of 576 channels whose first 512 are the value.
"""
import peer
import torch
from torch.nn.functional import scaled_dot_product_attention

# heads, key heads, query tokens, keys, channels of a key, channels of a value
CASES = {
    "mla_decode_bf16_h128_kv4096": (128, 1, 1, 4096, 576, 512),
    "mla_decode_bf16_h16_kv4096": (16, 1, 1, 4096, 576, 512),
    "mla_decode_bf16_h16_kv16384": (16, 1, 1, 16384, 576, 512),
    "mla_decode_bf16_h20_kv4096": (20, 1, 1, 4096, 576, 512),
    "prefill_192_128_h16_q512_kv4096": (16, 16, 512, 4096, 192, 128),
    "prefill_gqa_128_32_8_q512_kv4096": (32, 8, 512, 4096, 128, 128),
    "gqa_decode_bf16_32_8_kv32768": (32, 8, 1, 32768, 128, 128),
}


def operands(heads, kv_heads, tokens, keys, k_dim, v_dim):
    q = torch.randn(1, heads, tokens, k_dim, dtype=torch.bfloat16)
    k = torch.randn(1, kv_heads, keys, k_dim, dtype=torch.bfloat16)
    is_latent = kv_heads == 1
    v = k[..., :v_dim] if is_latent else torch.randn(1, kv_heads, keys, v_dim, dtype=torch.bfloat16)
    return q, k, v


def main():
    fovea = peer.fovea_result(__doc__)
    torch.set_num_threads(fovea["machine"]["threads"])
    torch.manual_seed(1)
    calls = {}
    for case in fovea["cases"]:
        if case["case"] in CASES:
            q, k, v = operands(*CASES[case["case"]])
            calls[case["case"]] = lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, enable_gqa=True)
    with torch.inference_mode():
        peer.time_and_write(fovea, "torch scaled_dot_product_attention", torch.__version__, calls)


if __name__ == "__main__":
    main()
