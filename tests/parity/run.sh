#!/usr/bin/env bash
# Compares the layers with transformers, live, and tests the Python package beside torch, NumPy and
# JAX: run.sh BUILD_FOLDER. Makes a virtual environment under
# build/ (PyPI; the CPU torch where its index answers), or takes the one that FOVEA_PARITY_VENV names.
set -euo pipefail

build=$(realpath "${1:?usage: run.sh BUILD_FOLDER}")
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
recordings=$root/build/parity
venv=${FOVEA_PARITY_VENV:-$root/build/parity-venv}

if [ -z "${FOVEA_PARITY_VENV:-}" ] && ! cmp -s "$here/requirements.txt" "$venv/requirements.txt"; then
  echo "Making a Python environment with torch and transformers in $venv"
  rm -rf "$venv"
  python3 -m venv "$venv"
  # PyPI's torch for x86 brings CUDA along; this index has the CPU build.
  torch_index=https://download.pytorch.org/whl/cpu
  index=()
  if "$venv/bin/python" -c "import urllib.request as r; r.urlopen('$torch_index/', timeout=10)" \
    2>/dev/null; then
    index=(--extra-index-url "$torch_index")
  fi
  "$venv/bin/pip" install --quiet "${index[@]}" -r "$here/requirements.txt"
  cp "$here/requirements.txt" "$venv/requirements.txt" # Complete: reused until they change.
fi

rm -rf "$recordings"
mkdir -p "$recordings"
"$venv/bin/python" "$here/record.py" "$recordings"
"$build/tests/parity/fovea_parity" "$recordings"

"$venv/bin/pip" install --quiet "$root"
FOVEA_CALL_TIME=$build/tests/python/fovea_call_time "$venv/bin/python" -m pytest -q "$root/tests/python"
