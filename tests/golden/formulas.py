"""Rotation and RMS norm in float64, straight from their papers."""

import math

import numpy as np


def yarn_mscale(factor, m):
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def yarn(freq, theta, scaling):
    """Frequencies and amplitude of YaRN (arXiv 2309.00071) with DeepSeek's amplitude."""
    pairs, factor = len(freq), scaling["factor"]
    original = scaling["original_max_position_embeddings"]

    def pair_of(rotations):
        return pairs * math.log(original / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = pair_of(scaling.get("beta_fast", 32)), pair_of(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(pairs) - low) / width, 0, 1)
    freq = freq / factor * ramp + freq * (1 - ramp)
    m, all_dim = scaling.get("mscale", 1), scaling.get("mscale_all_dim", 0)
    return freq, yarn_mscale(factor, m) / yarn_mscale(factor, all_dim)


def llama3(freq, scaling):
    """Pairs are kept or slowed by how often they turn within the original length."""
    turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * freq + (1 - kept) * freq / scaling["factor"]


def longrope(freq, scaling, longest):
    original = scaling["original_max_position_embeddings"]
    # An engine that serves all positions of the config must use one set for all of them.
    chosen = "long_factor" if longest > original else "short_factor"
    ratio = longest / original
    amplitude = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return freq / np.array(scaling[chosen]), amplitude


def rotary_frequencies(dim, theta, scaling, longest):
    """Frequency of each channel pair, and the amplitude of cos and sin."""
    freq = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "yarn":
        return yarn(freq, theta, scaling)
    if kind == "longrope":
        return longrope(freq, scaling, longest)
    if kind == "llama3":
        return llama3(freq, scaling), 1.0
    if kind == "linear":
        return freq / scaling["factor"], 1.0
    assert kind == "default", kind
    return freq, 1.0


def rotate(x, freq, amplitude, interleaved):
    """x [T, ..., R], row t at position t."""
    angle = np.arange(x.shape[0])[:, None] * freq
    angle = angle.reshape((x.shape[0],) + (1,) * (x.ndim - 2) + (-1,))
    cos, sin = amplitude * np.cos(angle), amplitude * np.sin(angle)
    half = x.shape[-1] // 2
    first = np.s_[..., 0::2] if interleaved else np.s_[..., :half]
    second = np.s_[..., 1::2] if interleaved else np.s_[..., half:]
    out = np.empty_like(x)
    out[first] = x[first] * cos - x[second] * sin
    out[second] = x[second] * cos + x[first] * sin
    return out


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
