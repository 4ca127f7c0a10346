#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that the build needs and that are missing, after saying
# which. Further package names may be given as arguments.
set -euo pipefail

packages=(g++ cmake ninja-build ccache python3
  libdnnl-dev libfmt-dev libcli11-dev nlohmann-json3-dev libgtest-dev "$@")

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
  [ "$status" = "install ok installed" ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
  echo "install-deps: missing ${missing[*]}; this script knows apt only, please install them" >&2
  exit 1
fi
sudo=()
[ "$(id -u)" -eq 0 ] || sudo=(sudo)
echo "Installing with apt: ${missing[*]}"
"${sudo[@]}" apt-get update -qq
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
  "${missing[@]}"
