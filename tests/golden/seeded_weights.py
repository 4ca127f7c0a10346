"""The weights of src/model/seeded_weights.cc, repeated bit for bit with numpy."""

import math

import numpy as np

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, splitmix64's step
MUL_1, MUL_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's mixer
TENSOR_DOMAIN, TOKEN_DOMAIN = 1, 2

(INPUT_LAYERNORM, Q_A_PROJ, Q_A_LAYERNORM, Q_B_PROJ, KV_A_PROJ, KV_A_LAYERNORM, KV_B_PROJ,
 O_PROJ, Q_A_BIAS, KV_A_BIAS, O_BIAS, Q_PROJ, K_PROJ, V_PROJ, Q_BIAS, K_BIAS, V_BIAS, Q_NORM,
 K_NORM, SINKS, POST_ATTENTION_LAYERNORM) = range(21)

# Sum of four 16-bit uniforms.
MEAN = 2 * 65535
STD = math.sqrt((65536.0 * 65536.0 - 1) / 3)

NORM_SPREAD = np.float32(0.25)
OUTLIER_PERIOD, OUTLIER_OFFSET, OUTLIER_GAIN = 64, 37, np.float32(6)
HEAD_PERIOD, PEAKED_HEAD, LOCAL_HEAD = 8, 3, 5
PEAKED_STD, PLAIN_STD, NORMED_STD, LOCAL_LOGIT = 4.0, 3.0, 1.5, 10.0
OUTPUT_STD, BIAS_STD = 0.5, 0.5


def mix(z):
    z = ((z ^ (z >> 30)) * MUL_1) & MASK
    z = ((z ^ (z >> 27)) * MUL_2) & MASK
    return z ^ (z >> 31)


def stream_key(domain, seed, major, minor):
    key = 0
    for word in (domain, seed, major, minor):
        key = mix(((key ^ word) + GOLDEN) & MASK)
    return key


def centred_sums(key, count):
    """Elements 0 to count - 1 of a stream before their scale: small integers, in float32."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(MUL_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(MUL_2)
        z = z ^ (z >> np.uint64(31))
    m = np.uint64(0xFFFF)
    total = (z & m) + ((z >> np.uint64(16)) & m) + ((z >> np.uint64(32)) & m) + (z >> np.uint64(48))
    return (total.astype(np.int64) - MEAN).astype(np.float32)


def matrix(seed, layer, tensor, rows, columns, stds):
    """stds: one for all rows, or one per row."""
    key = stream_key(TENSOR_DOMAIN, seed, layer, tensor)
    scale = (np.broadcast_to(np.asarray(stds, np.float64), (rows,)) / STD).astype(np.float32)
    return centred_sums(key, rows * columns).reshape(rows, columns) * scale[:, None]


def norm_weight(seed, layer, tensor, size, centre=1.0):
    weight = np.float32(1) + matrix(seed, layer, tensor, 1, size, 1.0)[0] * NORM_SPREAD
    return weight * np.float32(centre)


def seeded_gqa_layer(config, seed, layer):
    """As seeded_layer, of a layer with grouped-query attention. Norm weights are w, never w - 1."""
    H, N, K, D = (config[k] for k in ("hidden_size", "num_heads", "num_kv_heads", "head_dim"))
    normed = bool(config.get("qk_norm"))
    scale = float(np.float32(config["sm_scale"]))
    amplitude = config.get("rope_amplitude", 1.0)
    from_hidden = 1 / math.sqrt(H * (1 + float(NORM_SPREAD) ** 2))
    # Entries of q that give unit-variance keys logits of standard deviation 1.
    unit = 1 / (scale * math.sqrt(D) * amplitude * amplitude)
    plain = 1.0 if normed else PLAIN_STD * unit
    peaked = 1.0 if normed else PEAKED_STD * unit
    share = LOCAL_LOGIT / ((NORMED_STD if normed else PLAIN_STD) * math.sqrt(D))
    if normed:
        cosine = min(share, 0.8)
        share = cosine / math.sqrt(1 - cosine * cosine)

    w = {"input_layernorm": norm_weight(seed, layer, INPUT_LAYERNORM, H)}
    if config.get("post_attention_norm"):
        w["post_attention_layernorm"] = norm_weight(seed, layer, POST_ATTENTION_LAYERNORM, H)
    stds = []
    for head in range(N):
        std = peaked if head % HEAD_PERIOD == PEAKED_HEAD else plain
        stds += [std * from_hidden] * D
    w["q_proj"] = matrix(seed, layer, Q_PROJ, N * D, H, stds)
    w["k_proj"] = matrix(seed, layer, K_PROJ, K * D, H, from_hidden)
    for head in range(LOCAL_HEAD, N, HEAD_PERIOD):
        key = head // (N // K)
        w["q_proj"][head * D:(head + 1) * D] += (w["k_proj"][key * D:(key + 1) * D]
                                                 * np.float32(share * plain))
    w["v_proj"] = matrix(seed, layer, V_PROJ, K * D, H, from_hidden)
    w["o_proj"] = matrix(seed, layer, O_PROJ, H, N * D, OUTPUT_STD * (1 / math.sqrt(N * D)))
    if config.get("attention_bias"):
        for name, tensor, size in (("q_bias", Q_BIAS, N * D), ("k_bias", K_BIAS, K * D),
                                   ("v_bias", V_BIAS, K * D)):
            w[name] = matrix(seed, layer, tensor, 1, size, BIAS_STD)[0]
    if config.get("o_bias"):
        w["o_bias"] = matrix(seed, layer, O_BIAS, 1, H, BIAS_STD)[0]
    if normed:
        w["q_norm"] = norm_weight(seed, layer, Q_NORM, D, NORMED_STD * unit)
        w["k_norm"] = norm_weight(seed, layer, K_NORM, D)
    if config.get("sinks"):
        w["sinks"] = matrix(seed, layer, SINKS, 1, N, 1.0)[0]
    return w


def seeded_layer(config, seed, layer):
    """Tensors of one layer with latent attention by their checkpoint names, float32."""
    H, N, Lq, L = (config[k] for k in ("hidden_size", "num_heads", "q_lora_rank", "kv_lora_rank"))
    P, R, V = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    q_in = Lq or H
    spread2 = 1 + float(NORM_SPREAD) ** 2
    outliers = len([l for l in range(L) if l % OUTLIER_PERIOD == OUTLIER_OFFSET])
    latent2 = spread2 * (1 + outliers * (float(OUTLIER_GAIN) ** 2 - 1) / L)
    scale = float(np.float32(config["sm_scale"]))

    w = {"input_layernorm": norm_weight(seed, layer, INPUT_LAYERNORM, H)}
    # Entries of q that give unit-variance keys logits of a wanted standard deviation.
    unit = 1 / (scale * math.sqrt(P + R)) / math.sqrt(q_in * spread2)
    stds = []
    for head in range(N):
        std = PEAKED_STD if head % HEAD_PERIOD == PEAKED_HEAD else PLAIN_STD
        stds += [std * unit] * (P + R)
    q_b = matrix(seed, layer, Q_B_PROJ, N * (P + R), q_in, stds)
    kv_a = matrix(seed, layer, KV_A_PROJ, L + R, H, 1 / math.sqrt(H * spread2))
    local = np.float32(LOCAL_LOGIT / (scale * R))
    if Lq:
        w["q_a_proj"] = matrix(seed, layer, Q_A_PROJ, Lq, H, 1 / math.sqrt(H * spread2))
        w["q_a_layernorm"] = norm_weight(seed, layer, Q_A_LAYERNORM, Lq)
        shared = min(R, Lq)
        w["q_a_proj"][:shared] = kv_a[L:L + shared]
    for head in range(LOCAL_HEAD, N, HEAD_PERIOD):
        row = head * (P + R) + P
        if Lq:
            for r in range(shared):
                q_b[row + r, r] += local
        else:
            q_b[row:row + R] += kv_a[L:] * local
    w["q_b_proj" if Lq else "q_proj"] = q_b
    w["kv_a_proj_with_mqa"] = kv_a
    kv_norm = norm_weight(seed, layer, KV_A_LAYERNORM, L)
    kv_norm[OUTLIER_OFFSET::OUTLIER_PERIOD] *= OUTLIER_GAIN
    w["kv_a_layernorm"] = kv_norm
    w["kv_b_proj"] = matrix(seed, layer, KV_B_PROJ, N * (P + V), L, 1 / math.sqrt(L * latent2))
    w["o_proj"] = matrix(seed, layer, O_PROJ, H, N * V, OUTPUT_STD * (1 / math.sqrt(N * V)))
    if config.get("attention_bias"):
        if Lq:
            w["q_a_bias"] = matrix(seed, layer, Q_A_BIAS, 1, Lq, BIAS_STD)[0]
        w["kv_a_bias"] = matrix(seed, layer, KV_A_BIAS, 1, L + R, BIAS_STD)[0]
        w["o_bias"] = matrix(seed, layer, O_BIAS, 1, H, BIAS_STD)[0]
    return w


def token_hidden_state(seed, token_id, hidden_size):
    key = stream_key(TOKEN_DOMAIN, seed, token_id, 0)
    return centred_sums(key, hidden_size) * np.float32(1 / STD)
