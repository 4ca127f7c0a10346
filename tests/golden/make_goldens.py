#!/usr/bin/env python3
"""Writes goldens.safetensors: what one MLA layer gives for each config in cases/, and each layer
for those in gqa_cases/ (see gqa_layer.py), in float64.

Multi-head latent attention straight from its formulas (DeepSeek-V2, arXiv 2405.04434), with the
weights and hidden states of seeded_weights.py. Only outputs are stored. Needs numpy, nothing else:

    python3 tests/golden/make_goldens.py            # writes
    python3 tests/golden/make_goldens.py --check    # compares with the file
"""

import argparse
import json
import math
import pathlib
import sys

import numpy as np

import gqa_layer
import seeded_weights
from formulas import rms_norm, rotary_frequencies, rotate, yarn_mscale

HERE = pathlib.Path(__file__).parent
SEED = 11
LAYER = 0
TOKENS = 40
LARGE_TOKENS = 20  # of cases whose hidden size is a real model's
LATENT_NORM_EPS = 1e-6  # modeling code builds q_a_layernorm and kv_a_layernorm with its default


def rotation(config):
    """Frequencies, amplitude, and the softmax scale's factor."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or config.get("rope_theta")
    freq, amplitude = rotary_frequencies(config["qk_rope_head_dim"], theta, scaling,
                                         config["max_position_embeddings"])
    all_dim = scaling.get("mscale_all_dim", 0)
    return freq, amplitude, yarn_mscale(scaling["factor"], all_dim) ** 2 if all_dim else 1.0


def attention_layer(config):
    """Latent rows [T, L + R] and the output after o_proj [T, H] of tokens 0 to T - 1."""
    H, N, L = (config[k] for k in ("hidden_size", "num_attention_heads", "kv_lora_rank"))
    P, R = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    V = config.get("v_head_dim") or H // N
    freq, amplitude, scale_factor = rotation(config)
    sm_scale = scale_factor / math.sqrt(P + R)
    interleaved = config.get("rope_interleave", config["model_type"] != "minicpm3")

    tokens = LARGE_TOKENS if H > 1024 else TOKENS
    x = np.stack([seeded_weights.token_hidden_state(SEED, t, H) for t in range(tokens)])
    x = x.astype(np.float64)
    dims = dict(config, num_heads=N, v_head_dim=V, sm_scale=sm_scale,
                q_lora_rank=config["q_lora_rank"] or 0)
    w = seeded_weights.seeded_layer(dims, SEED, LAYER)
    w = {name: value.astype(np.float64) for name, value in w.items()}

    if config["q_lora_rank"]:
        q = x @ w["q_a_proj"].T + w.get("q_a_bias", 0)
        q = rms_norm(q, w["q_a_layernorm"], LATENT_NORM_EPS) @ w["q_b_proj"].T
    else:
        q = x @ w["q_proj"].T
    q = q.reshape(tokens, N, P + R)
    q_pe = rotate(q[..., P:], freq, amplitude, interleaved)

    kv = x @ w["kv_a_proj_with_mqa"].T + w.get("kv_a_bias", 0)
    kv_c = rms_norm(kv[:, :L], w["kv_a_layernorm"], LATENT_NORM_EPS)
    k_pe = rotate(kv[:, L:], freq, amplitude, interleaved)
    expanded = (kv_c @ w["kv_b_proj"].T).reshape(tokens, N, P + V)
    k_nope, v = expanded[..., :P], expanded[..., P:]

    logits = np.einsum("tnp,snp->nts", q[..., :P], k_nope) + np.einsum("tnr,sr->nts", q_pe, k_pe)
    logits *= sm_scale
    logits[:, np.triu(np.ones((tokens, tokens), bool), 1)] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.einsum("nts,snv->tnv", weights, v).reshape(tokens, N * V)
    out = out @ w["o_proj"].T + w.get("o_bias", 0)
    return np.concatenate([kv_c, k_pe], axis=1), out


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, values in tensors.items():
        content = values.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(values.shape),
                        "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_safetensors(path):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8:8 + length]), content[8 + length:]
    return {name: np.frombuffer(data[slice(*entry["data_offsets"])], "<f4").reshape(entry["shape"])
            for name, entry in header.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    tensors = {}
    for path in sorted((HERE / "cases").glob("*.json")):
        latent, output = attention_layer(json.loads(path.read_text()))
        tensors[path.stem + ".latent"], tensors[path.stem + ".output"] = latent, output
    for path in sorted((HERE / "gqa_cases").glob("*.json")):
        for i, (rows, output) in enumerate(gqa_layer.layers(json.loads(path.read_text()), SEED,
                                                            TOKENS)):
            tensors[f"{path.stem}.{i}.rows"], tensors[f"{path.stem}.{i}.output"] = rows, output
    file = HERE / "goldens.safetensors"
    if not options.check:
        write_safetensors(file, tensors)
        return 0
    stored = read_safetensors(file)
    assert stored.keys() == tensors.keys(), (stored.keys(), tensors.keys())
    worst = max(np.abs(stored[name] - tensors[name]).max() / np.abs(tensors[name]).max()
                for name in tensors)
    print(f"{len(tensors)} tensors, worst relative difference {worst:.1e}")
    return 0 if worst < 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
