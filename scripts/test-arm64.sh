#!/usr/bin/env bash
# Builds fovea::ops for arm64 and runs its tests under qemu-user, into build/arm64.
# Debian: apt-get install g++-aarch64-linux-gnu qemu-user googletest libfmt-dev nlohmann-json3-dev
set -euo pipefail
cd "$(dirname "$0")/.."

toolchain=$PWD/cmake/aarch64-linux-gnu.cmake
host=/usr/lib/$(gcc -print-multiarch)/cmake

# The tests' library comes as source; the others are headers, which the host's packages have.
cmake -S /usr/src/googletest -B build/arm64/googletest -G Ninja --toolchain "$toolchain" \
  -DCMAKE_BUILD_TYPE=Release -DBUILD_GMOCK=OFF -DCMAKE_INSTALL_PREFIX="$PWD/build/arm64/prefix"
cmake --build build/arm64/googletest --target install
cmake -B build/arm64/ops -G Ninja --toolchain "$toolchain" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CXX_FLAGS_RELEASE=-O2 -DFOVEA_OPS_ONLY=ON -DFOVEA_INSTALL=OFF -DFOVEA_WERROR=ON \
  -DCMAKE_PREFIX_PATH="$PWD/build/arm64/prefix" -Dfmt_DIR="$host/fmt"
cmake --build build/arm64/ops --target fovea_backend_cpu_tests fovea_ops_tests

# One process each: the reference's and the scalar set's ops are the same code as on x86-64.
emulate=(qemu-aarch64 -L /usr/aarch64-linux-gnu)
"${emulate[@]}" build/arm64/ops/tests/backend_cpu/fovea_backend_cpu_tests --gtest_brief=1
"${emulate[@]}" build/arm64/ops/tests/ops/fovea_ops_tests --gtest_brief=1 --gtest_filter='*/neon_*'
ctest --test-dir build/arm64/ops --output-on-failure -R isa_units
