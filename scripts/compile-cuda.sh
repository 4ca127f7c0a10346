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

object_of() {
  echo "$out/$(echo "${1%.*}" | tr / _).o"
}

# compile <source> <flag>...
compile() {
  local source=$1 object
  object=$(object_of "$source")
  shift
  nvcc "${flags[@]}" "$@" -c "$source" -o "$object" 2>"$object.log" || {
    cat "$object.log" >&2
    exit 1
  }
  if grep -E '[1-9][0-9]* bytes spill' "$object.log"; then
    echo "$source spills registers; see $object.log" >&2
    exit 1
  fi
}

# start <source> <flag>...: compiles beside others, as many as there are processors.
compilers=()
start() {
  while (($(jobs -rp | wc -l) >= $(nproc))); do sleep 0.1; done
  compile "$@" &
  compilers+=($!)
}

# The large ones first, lest the last one run alone.
for source in src/backends/cuda/sm90/*/*.cu tests/cuda/*.cu src/backends/cuda/sm90/*/*.cc \
  src/backends/cuda/sm90/*.cu; do
  start "$source" "${sm90[@]}"
done
for source in src/linear/*.cu; do
  start "$source" "${sm80[@]}" -gencode arch=compute_90,code=sm_90
done
for source in src/backends/cuda/plain/*.cu src/backends/cuda/*.cu src/backends/cuda/*.cc \
  src/linear/cublaslt*.cc; do
  start "$source" "${sm80[@]}"
done
for compiler in "${compilers[@]}"; do wait "$compiler"; done

for kernel in src/backends/cuda/sm90/*/op.cc; do
  kernel=$(dirname "$kernel")
  bench=$(basename "$kernel")_bench
  objects=()
  for source in "$kernel"/*.cu "tests/cuda/$bench.cu"; do objects+=("$(object_of "$source")"); done
  nvcc "${sm90[@]}" --cudart static -o "$out/$bench" "${objects[@]}"
done
echo "compiled ${#compilers[@]} CUDA sources without spills"
