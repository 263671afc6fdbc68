#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test. Idempotent.
#
#   tests/run.sh                  release build in build/
#   tests/run.sh asan | tsan      under AddressSanitizer+UBSan | ThreadSanitizer
#   tests/run.sh release -R sim   further words go to ctest
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-release}
[ $# -gt 0 ] && shift
case "$preset" in
  release) build=build ;;
  asan|tsan) build=build-$preset ;;
  *) echo "usage: tests/run.sh [release|asan|tsan] [ctest arguments]" >&2
     exit 2 ;;
esac
step() { printf '\n== %s\n' "$*"; }

step "packages"
deploy/install_packages.sh
step "configure ($preset)"
cmake --preset "$preset" -DREMESH_TESTS=ON -DREMESH_BENCH=ON
step "build"
cmake --build "$build" -j "$(nproc)"
step "test"
# Sanitizers: threads of the OpenMP runtime are invisible to ThreadSanitizer,
# so there only what has threads of ours is run.
select=()
[ "$preset" = tsan ] && select=(-L threads)
[ "$preset" = asan ] && select=(-LE no_asan)
ctest --test-dir "$build" --output-on-failure -j "$(nproc)" \
  "${select[@]}" "$@"
