"""Grouped-query attention from its formulas, as Hugging Face configs describe it, in float64."""

import math

import numpy as np

import seeded_weights
from formulas import rms_norm, rotary_frequencies, rotate


def windows(config):
    """Keys that each layer's queries see, themselves included; None: all before them."""
    layers, kind = config["num_hidden_layers"], config["model_type"]
    window = config.get("sliding_window")
    if kind == "mistral":
        return [window] * layers
    if kind in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
        return [None] * layers
    if config.get("layer_types"):
        return [window if t == "sliding_attention" else None for t in config["layer_types"]]
    if kind in ("qwen2", "qwen3"):
        return [window if i >= config["max_window_layers"] else None for i in range(layers)]
    if kind == "gemma3_text":
        pattern = config["sliding_window_pattern"]
        return [window if (i + 1) % pattern else None for i in range(layers)]
    assert kind == "llama", kind
    return [None] * layers


def rotation(config, head_dim, windowed):
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta")
    if config["model_type"] == "gemma3_text":
        if "full_attention" in parameters:
            parameters = parameters["sliding_attention" if windowed else "full_attention"]
        elif windowed:
            parameters, theta = {}, config["rope_local_base_freq"]
    theta = parameters.get("rope_theta") or theta
    return rotary_frequencies(head_dim, theta, parameters, config["max_position_embeddings"])


def layers(config, seed, tokens):
    """For each layer its stored rows [T, Hk * (D + D)], keys then values, and its output [T, H]."""
    kind = config["model_type"]
    H, N = config["hidden_size"], config["num_attention_heads"]
    K, D = config.get("num_key_value_heads") or N, config.get("head_dim") or H // N
    sm_scale = 1 / math.sqrt(config.get("query_pre_attn_scalar", D))
    biased = config.get("attention_bias", kind == "qwen2")
    x = np.stack([seeded_weights.token_hidden_state(seed, t, H) for t in range(tokens)])
    x = x.astype(np.float64)
    position = np.arange(tokens)
    for layer, window in enumerate(windows(config)):
        freq, amplitude = rotation(config, D, window is not None)
        dims = dict(hidden_size=H, num_heads=N, num_kv_heads=K, head_dim=D, sm_scale=sm_scale,
                    rope_amplitude=amplitude, qk_norm=kind in ("qwen3", "gemma3_text"),
                    attention_bias=biased, o_bias=biased and kind != "qwen2",
                    sinks=kind == "gpt_oss")
        w = seeded_weights.seeded_gqa_layer(dims, seed, layer)
        w = {name: value.astype(np.float64) for name, value in w.items()}

        q = (x @ w["q_proj"].T + w.get("q_bias", 0)).reshape(tokens, N, D)
        k = (x @ w["k_proj"].T + w.get("k_bias", 0)).reshape(tokens, K, D)
        v = (x @ w["v_proj"].T + w.get("v_bias", 0)).reshape(tokens, K, D)
        if "q_norm" in w:
            q = rms_norm(q, w["q_norm"], config["rms_norm_eps"])
            k = rms_norm(k, w["k_norm"], config["rms_norm_eps"])
        q, k = (rotate(y, freq, amplitude, interleaved=False) for y in (q, k))

        logits = np.einsum("tnd,snd->nts", q, np.repeat(k, N // K, axis=1)) * sm_scale
        cap = config.get("attn_logit_softcapping")
        if cap:
            logits = cap * np.tanh(logits / cap)
        hidden = position[None, :] > position[:, None]
        if window is not None:
            hidden |= position[None, :] <= position[:, None] - window
        logits[:, hidden] = -np.inf
        top = logits.max(axis=-1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(axis=-1, keepdims=True)
        if "sinks" in w:
            total = total + np.exp(w["sinks"][:, None, None] - top)
        out = np.einsum("nts,snd->tnd", weights / total, np.repeat(v, N // K, axis=1))
        out = out.reshape(tokens, N * D) @ w["o_proj"].T + w.get("o_bias", 0)
        yield np.concatenate([k.reshape(tokens, -1), v.reshape(tokens, -1)], axis=1), out
