#!/usr/bin/env bash
# Installs missing packages, builds, and runs every test. Idempotent.
#
#   tests/run.sh                  release build in build/
#   tests/run.sh asan | tsan      under AddressSanitizer+UBSan | ThreadSanitizer
#   tests/run.sh release -R sim   further arguments go to ctest
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
# ThreadSanitizer cannot see the barriers of the OpenMP runtime, so under it only
# the tests with threads of our own are built and run, with one OpenMP thread for
# each: what OpenMP threads share among themselves is not checked.
threaded=(wire_test board_test local_comm_test store_test server_test
          train_test agent_shell_test model_test engine_test exchange_test)
targets=(all)
select=()
if [ "$preset" = tsan ]; then
  targets=("${threaded[@]}" remesh-coordinator)
  select=(-R "^($(IFS='|'; echo "${threaded[*]}"))\$")
  export OMP_NUM_THREADS=1
  export TSAN_OPTIONS=suppressions=$PWD/tests/tsan.supp
  # This test forks a process with threads, which ThreadSanitizer cannot follow.
  export GTEST_FILTER=-Channel.KilledPeerIsLostBeforeAnyHeartbeat
elif [ "$preset" = asan ]; then
  select=(-LE 'no_asan|lint')
  export LSAN_OPTIONS=suppressions=$PWD/tests/lsan.supp:print_suppressions=0
  export UBSAN_OPTIONS=print_stacktrace=1
fi
step "build"
cmake --build "$build" -j "$(nproc)" --target "${targets[@]}"
step "test"
ctest --test-dir "$build" --output-on-failure -j "$(nproc)" \
  "${select[@]}" "$@"
