"""Writes kv_formats.txt: rows of values and their stored bytes in every KV format with scales.

An encoder of its own, from the formats' descriptions, with numpy's float32 arithmetic and a table
of every code's value. Run by hand: python3 make_kv_formats.py > kv_formats.txt
"""

import struct

import numpy as np


def e4m3_values():
    """Value of each code; NaN at 0x7f and 0xff."""
    values = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, fraction = (code >> 3) & 15, code & 7
        if exponent == 15 and fraction == 7:
            values.append(float("nan"))
        elif exponent == 0:
            values.append(sign * fraction * 2.0**-9)
        else:
            values.append(sign * (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return np.array(values)


def e5m2_values():
    """Value of each code: the upper byte of a binary16."""
    return np.array([np.frombuffer(bytes([0, c]), dtype="<f2")[0] for c in range(256)], dtype=float)


def nearest_code(values, x):
    """Code of the finite value nearest to x; of two, the even code. Saturates."""
    finite = [c for c in range(256) if np.isfinite(values[c])]
    x = np.clip(x, -max(values[finite]), max(values[finite]))
    same_sign = [c for c in finite if (c < 128) == (not np.signbit(x))]
    return min(same_sign, key=lambda c: (abs(values[c] - float(x)), c & 1))


def quotients(x, scale):
    with np.errstate(over="ignore"):
        return (x / np.float32(scale)).astype(np.float32)


def encode_floats(table, x, scale):
    return bytes(nearest_code(table, q) for q in quotients(x, scale))


def encode_ints(x, scale, bits):
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return [int(c) for c in np.clip(np.rint(quotients(x, scale)), low, high)]


def pack_nibbles(codes):
    pairs = zip(codes[0::2], codes[1::2])
    return bytes((low & 15) | (high & 15) << 4 for low, high in pairs)


def group_scale(x, largest):
    amax = np.max(np.abs(x)) if len(x) else np.float32(0)
    smallest = np.finfo(np.float32).tiny
    return max(np.float32(amax) / np.float32(largest), smallest)


E4M3, E5M2 = e4m3_values(), e5m2_values()


def per_tensor(x, table, scale):
    return encode_floats(table, x, scale)


def per_token(x, kind, heads, first_group):
    row = b""
    for head in np.split(x, heads):
        groups = [head[:first_group], head[first_group:]]
        largest = {"int8": 127, "fp8": 448, "int4": 7}[kind]
        scales = [group_scale(g, largest) for g in groups]
        if kind == "fp8":
            row += b"".join(encode_floats(E4M3, g, s) for g, s in zip(groups, scales))
        elif kind == "int8":
            codes = sum((encode_ints(g, s, 8) for g, s in zip(groups, scales)), [])
            row += bytes(c & 255 for c in codes)
        else:
            row += b"".join(pack_nibbles(encode_ints(g, s, 4)) for g, s in zip(groups, scales))
        row += struct.pack("<2f", *scales)
    return row


def ds_mla(x, power_of_two):
    row, scales = b"", []
    for group in np.split(x[:512], 4):
        scale = group_scale(group, 448)
        if power_of_two:
            scale = np.float32(2.0 ** np.ceil(np.log2(np.float64(scale))))
        scales.append(scale)
        row += encode_floats(E4M3, group, scale)
    bits = x[512:].view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return row + struct.pack("<4f", *scales) + rounded.astype("<u2").tobytes()


def rows(count, random):
    """A plain row, zeros, denormals, huge values, one outlier."""
    x = random.standard_normal(count)
    outlier = x.copy()
    outlier[count // 3] = 1000
    for row in (x, np.zeros(count), x * 1e-40, x * 5e37, outlier):
        yield row.astype(np.float32)


def write(name, heads, first_group, scale, power_of_two, x, row):
    fields = (name, heads, first_group, float(scale), int(power_of_two))
    print(*fields, x.tobytes().hex(), row.hex())


def main():
    random = np.random.default_rng(7)
    for x in rows(48, random):
        write("fp8_e4m3", 1, 0, 0.25, False, x, per_tensor(x, E4M3, 0.25))
        write("fp8_e5m2", 1, 0, 1.5, False, x, per_tensor(x, E5M2, 1.5))
    for kind in ("int8", "fp8", "int4"):
        for heads, first_group in ((1, 32), (2, 10)):
            for x in rows(40, random):
                row = per_token(x, kind, heads, min(first_group, 40 // heads))
                write(kind + "_per_token", heads, first_group, 1.0, False, x, row)
    for power_of_two in (False, True):
        for x in rows(576, random):
            write("fp8_ds_mla", 1, 0, 1.0, power_of_two, x, ds_mla(x, power_of_two))


main()
