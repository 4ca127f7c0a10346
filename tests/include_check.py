#!/usr/bin/env python3
"""Holds every direct #include to the table of docs/architecture.md: who may include whom."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Room -> rooms it may include, itself and core aside.
ALLOWED = {
    "core": set(),
    "quant": set(),
    "variants": set(),
    "kv": {"quant"},
    "plan": {"kv", "variants"},
    "ops": {"quant", "kv", "variants", "plan"},
    "backends/reference": {"ops", "plan", "kv", "quant", "variants"},
    "backends/cpu": {"ops", "plan", "kv", "quant", "variants"},
    "backends/cuda": {"ops", "plan", "kv", "quant", "variants"},
    "backends/cuda_stub": {"backends/cuda"},
    "oracle": set(),
    "linear": {"quant"},
    "layers": {"ops", "linear", "plan", "kv", "variants", "quant", "parallel"},
    "model": {"layers", "linear", "parallel"},
    "engine": {"layers", "model", "ops", "plan", "kv", "variants", "parallel", "oracle"},
    "api": {"ops", "backends/reference", "backends/cpu", "backends/cuda", "plan", "kv", "variants", "quant"},
}

# Public header -> the room whose types it declares.
HEADER_ROOM = {
    "error": "core",
    "dtype": "core",
    "tensor": "core",
    "memory": "core",
    "machine_peaks": "core",
    "thread_pool": "core",
    "workspace": "core",
    "quant": "quant",
    "attention_variant": "variants",
    "kv_format": "kv",
    "paged_kv_cache": "kv",
    "block_pool": "kv",
    "plan": "plan",
    "op_context": "ops",
    "device_graph": "ops",
    "ops": "ops",
    "runtime": "api",
    "fovea": "api",
    "machine": "api",
    "oracle": "oracle",
    "linear": "linear",
    "rotary": "layers",
    "attention_step": "layers",
    "attention": "layers",
    "mla": "layers",
    "model": "model",
    "engine": "engine",
}

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def room_of_path(path):
    """Room of a file under src/."""
    parts = path.relative_to(ROOT / "src").parts
    return "/".join(parts[:2]) if parts[0] == "backends" else parts[0]


def room_of_include(name):
    if name.startswith("fovea/"):
        return HEADER_ROOM.get(pathlib.PurePath(name).stem)
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "backends" else parts[0]


def check(path, room, errors):
    for name in INCLUDE.findall(path.read_text()):
        target = room_of_include(name)
        if target is None or target not in ALLOWED:
            errors.append(f"{path.relative_to(ROOT)}: {name} belongs to no room of the table")
        elif room == "oracle" and target != "oracle":
            errors.append(f"{path.relative_to(ROOT)}: the oracle may not include {name}")
        elif target not in ALLOWED[room] | {room, "core"}:
            errors.append(f"{path.relative_to(ROOT)}: {room} may not include {name} ({target})")


def main():
    errors = []
    checked = 0
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix in {".h", ".cc", ".cu", ".cuh"}:
            check(path, room_of_path(path), errors)
            checked += 1
    for path in sorted((ROOT / "include" / "fovea").glob("*.h")):
        room = HEADER_ROOM.get(path.stem)
        if room is None:
            errors.append(f"{path.relative_to(ROOT)}: add it to HEADER_ROOM")
            continue
        check(path, room, errors)
        checked += 1
    for folder in ("tools", "examples", "bench", "python"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".h", ".cc"}:
                own = [parent for parent in path.parents if ROOT in parent.parents]
                for name in INCLUDE.findall(path.read_text()):
                    if not name.startswith("fovea/") and not any((o / name).exists() for o in own):
                        errors.append(f"{path.relative_to(ROOT)}: only public headers, not {name}")
                checked += 1
    for error in errors:
        print(error)
    if checked == 0:
        print("nothing was checked")
    print(f"{checked} files, {len(errors)} errors")
    return 1 if errors or checked == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
