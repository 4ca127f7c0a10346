#!/usr/bin/env bash
# Compiles the CUDA sources and fails on a register spill. Without nvcc there is nothing to compile.
# The result, build/cuda/mla_decode_bench, checks and times the kernels on a machine with a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v nvcc >/dev/null; then
  echo "nvcc not found: the CUDA sources are not compiled"
  exit 0
fi
out=build/cuda
mkdir -p "$out"
# wgmma and setmaxnreg need the sm_90a target.
flags=(-gencode "arch=compute_90a,code=sm_90a" -std=c++20 -O3 -lineinfo --cudart static
  -Isrc -Itests -Xptxas -v)
objects=()
for source in src/backends/cuda/sm90/mla_decode/mla_decode.cu \
  src/backends/cuda/sm90/mla_decode/quantized.cu src/backends/cuda/plain/mla_decode.cu \
  tests/cuda/mla_decode_bench.cu; do
  object="$out/$(echo "${source%.cu}" | tr / _).o"
  nvcc "${flags[@]}" -c "$source" -o "$object" 2>"$object.log" || {
    cat "$object.log" >&2
    exit 1
  }
  if grep -E '[1-9][0-9]* bytes spill' "$object.log"; then
    echo "$source spills registers; see $object.log" >&2
    exit 1
  fi
  objects+=("$object")
done
nvcc "${flags[@]}" -o "$out/mla_decode_bench" "${objects[@]}" 2>/dev/null
echo "compiled ${#objects[@]} CUDA sources without spills"
