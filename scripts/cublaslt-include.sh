#!/usr/bin/env bash
# Prints the folder of cublasLt.h: the toolkit's, else out of NVIDIA's wheel, which pip fetches once
# (444 MB, of which 540 KB stay). Nothing is linked against the library: see
# src/linear/cublaslt_library.h.
set -euo pipefail
cd "$(dirname "$0")/.."

toolkit=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")/include
kept=build/cublaslt
for folder in "$toolkit" /usr/local/cuda/include "$kept/nvidia/cu13/include"; do
  if [[ -e $folder/cublasLt.h ]]; then
    echo "$folder"
    exit 0
  fi
done
mkdir -p "$kept"
python3 -m venv "$kept/venv"
"$kept/venv/bin/pip" download --quiet --no-deps --dest "$kept" 'nvidia-cublas>=13,<14' >&2
python3 - "$kept" <<'PYTHON'
import pathlib
import sys
import zipfile

folder = pathlib.Path(sys.argv[1])
for wheel in folder.glob("nvidia_cublas-*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if "/include/" in name])
    wheel.unlink()
PYTHON
echo "$kept/nvidia/cu13/include"
