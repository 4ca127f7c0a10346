#!/usr/bin/env bash
# Times and tests the CUDA backend in one call, on a machine with a GPU and cuBLASLt.
#   scripts/measure-cuda.sh <build folder> <folder for results> [seconds of fovea check]
# Timings come first and alone; then the tests run side by side. Exits with the number of failures.
set -uo pipefail
if [[ $# -lt 2 ]]; then
  sed -n '2,4p' "$0" >&2
  exit 2
fi
build=$1 out=$2 seconds=${3:-120}
mkdir -p "$out"
failures=0

# run <name> <command>...
run() {
  local name=$1 begin=$SECONDS state=passed
  shift
  "$@" >"$out/$name.log" 2>&1 || state="FAILED ($?)"
  printf '%-8s %s, %s s: %s\n' "$name" "$state" $((SECONDS - begin)) "$(tail -n 1 "$out/$name.log")"
  [[ $state == passed ]]
}

run bench "$build/tools/fovea/fovea" bench --backend cuda --suite cuda --json "$out/cuda.json" ||
  failures=$((failures + 1))
run backend "$build/tests/backend_cuda/fovea_backend_cuda_tests" --gtest_brief=1 &
run ops "$build/tests/ops/fovea_ops_tests" --gtest_filter='*cuda*' --gtest_brief=1 &
FOVEA_BACKEND=cuda run layers "$build/tests/layers/fovea_layers_tests" --gtest_brief=1 &
run linear "$build/tests/linear/fovea_linear_tests" --gtest_filter='*gpu*' --gtest_brief=1 &
run check "$build/tools/fovea/fovea" check --backend cuda --seconds "$seconds" &
for job in $(jobs -p); do
  wait "$job" || failures=$((failures + 1))
done
exit "$failures"
