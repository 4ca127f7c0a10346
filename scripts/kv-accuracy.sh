#!/bin/sh
# Writes the accuracy table of docs/kv-formats.md anew: scripts/kv-accuracy.sh BUILD_FOLDER
set -eu
build=${1:?"usage: $0 BUILD_FOLDER"}
root=$(cd "$(dirname "$0")/.." && pwd)
page=$root/docs/kv-formats.md
cmake --build "$build" --target example_kv_accuracy
table=$("$build/examples/example_kv_accuracy")
kept=$(sed '/^<!-- Written by/q' "$page")
printf '%s\n%s\n' "$kept" "$table" > "$page"
