#!/usr/bin/env bash
# Installs the missing packages of deploy/packages.txt. Debian 12. Needs root or
# sudo only if a package is missing.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
missing=()
while read -r package; do
  case "$package" in ''|'#'*) continue ;; esac
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  [ "$status" = "install ok installed" ] || missing+=("$package")
done < "$here/packages.txt"
if [ ${#missing[@]} -eq 0 ]; then
  echo "packages: all installed"
  exit 0
fi
sudo=""
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || {
    echo "missing packages: ${missing[*]}" >&2
    echo "install them as root, or install sudo" >&2
    exit 1
  }
  sudo=sudo
fi
echo "packages: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -q
$sudo apt-get install -y -q --no-install-recommends "${missing[@]}"
