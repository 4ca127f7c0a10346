#!/usr/bin/env bash
# Compiles the CUDA sources and fails on a register spill. Without nvcc there is nothing to compile.
# The results, build/cuda/*_bench, check and time the kernels on a machine with a GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v nvcc >/dev/null; then
  echo "nvcc not found: the CUDA sources are not compiled"
  exit 0
fi
out=build/cuda
mkdir -p "$out"
cublaslt=$(bash scripts/cublaslt-include.sh)
flags=(-std=c++20 -O3 -lineinfo --cudart static --expt-relaxed-constexpr -Iinclude -Isrc -Itests
  -I"$cublaslt" -Xptxas -v)
# wgmma and setmaxnreg need the sm_90a target; plain kernels run on any GPU from 8.0 on.
sm90=(-gencode "arch=compute_90a,code=sm_90a")
sm80=(-gencode "arch=compute_80,code=sm_80")

# compile <source> <flag>...
compile() {
  local source=$1 object
  object="$out/$(echo "${source%.*}" | tr / _).o"
  shift
  nvcc "${flags[@]}" "$@" -c "$source" -o "$object" 2>"$object.log" || {
    cat "$object.log" >&2
    exit 1
  }
  if grep -E '[1-9][0-9]* bytes spill' "$object.log"; then
    echo "$source spills registers; see $object.log" >&2
    exit 1
  fi
  echo "$object"
}

sources=0
for source in src/backends/cuda/plain/*.cu src/backends/cuda/*.cu src/backends/cuda/*.cc \
  src/linear/cublaslt*.cc; do
  compile "$source" "${sm80[@]}" >/dev/null
  sources=$((sources + 1))
done
for source in src/linear/*.cu; do
  compile "$source" "${sm80[@]}" -gencode arch=compute_90,code=sm_90 >/dev/null
  sources=$((sources + 1))
done
for source in src/backends/cuda/sm90/*.cu; do
  compile "$source" "${sm90[@]}" >/dev/null
  sources=$((sources + 1))
done
for kernel in src/backends/cuda/sm90/*/op.cc; do
  kernel=$(dirname "$kernel")
  bench=$(basename "$kernel")_bench
  objects=()
  for source in "$kernel"/*.cu "$kernel"/*.cc "tests/cuda/$bench.cu"; do
    object=$(compile "$source" "${sm90[@]}")
    [[ $source == *.cc ]] || objects+=("$object")
    sources=$((sources + 1))
  done
  nvcc "${sm90[@]}" --cudart static -o "$out/$bench" "${objects[@]}"
done
echo "compiled $sources CUDA sources without spills"
