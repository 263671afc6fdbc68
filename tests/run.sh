#!/usr/bin/env bash
# Installs missing packages, builds, and runs every test. Idempotent.
#
#   tests/run.sh                  release build in build/
#   tests/run.sh asan | tsan      under AddressSanitizer+UBSan | ThreadSanitizer
#   tests/run.sh asan-e2e         the end-to-end tests under AddressSanitizer+UBSan
#   tests/run.sh release -R sim   further arguments go to ctest
set -euo pipefail
umask 022  # folders that others may write to are refused
cd "$(dirname "$0")/.."
unset REMESH_KEY  # the tests have keys of their own
preset=${1:-release}
[ $# -gt 0 ] && shift
case "$preset" in
  release) build=build ;;
  asan|tsan) build=build-$preset ;;
  asan-e2e) build=build-asan ;;
  *) echo "usage: tests/run.sh [release|asan|asan-e2e|tsan] [ctest arguments]" >&2
     exit 2 ;;
esac
step() { printf '\n== %s\n' "$*"; }

step "packages"
deploy/install_packages.sh
step "configure ($preset)"
cmake --preset "${preset%-e2e}" -DREMESH_TESTS=ON -DREMESH_BENCH=ON
# ThreadSanitizer cannot see the barriers of the OpenMP runtime, so under it only
# the tests with threads of our own are built and run, with one OpenMP thread for
# each: what OpenMP threads share among themselves is not checked.
threaded=(wire_test board_test local_comm_test store_test server_test
          train_test agent_shell_test model_test engine_test exchange_test
          base_test checkpoint_blocks_test measure_test rundir_test trace_test)
targets=(all)
select=()
if [ "$preset" = tsan ]; then
  targets=("${threaded[@]}" remesh-coordinator)
  select=(-R "^($(IFS='|'; echo "${threaded[*]}"))\$")
  export OMP_NUM_THREADS=1
  export TSAN_OPTIONS=suppressions=$PWD/tests/tsan.supp:die_after_fork=0
  # This test forks a process with threads, which ThreadSanitizer cannot follow.
  export GTEST_FILTER=-Channel.KilledPeerIsLostBeforeAnyHeartbeat
elif [ "$preset" = asan ]; then
  select=(-LE 'no_asan|lint')
  export LSAN_OPTIONS=suppressions=$PWD/tests/lsan.supp:print_suppressions=0
  export UBSAN_OPTIONS=print_stacktrace=1
elif [ "$preset" = asan-e2e ]; then
  # Most of these processes end by SIGKILL, and MPI keeps memory until its
  # process ends, so leaks are left to the tests above. A job recovers from a rank
  # that a sanitizer ends: the reports decide, not only the tests.
  targets=(e2e_tests)
  select=(-R '^e2e_')
  reports=$PWD/$build/sanitizer
  rm -rf "$reports" && mkdir -p "$reports"
  options=log_path=$reports/report:detect_leaks=0:verify_asan_link_order=0
  export ASAN_OPTIONS=$options UBSAN_OPTIONS=print_stacktrace=1:$options
fi
step "build"
cores=$(deploy/cores.sh)
echo "with $cores jobs at a time"
cmake --build "$build" -j "$cores" --target "${targets[@]}"
step "test"
code=0
rm -rf "$build/test_results"
# Tests of daemons wait most of the time.
jobs=$((cores < 8 ? 2 * cores : 16))
ctest --test-dir "$build" --output-on-failure -j "$jobs" \
  --timeout 1200 --output-junit "$PWD/$build/test_results/ctest.junit" \
  "${select[@]}" "$@" ||
  code=$?
step "skipped"
python3 tests/skips.py "$build/test_results" || code=1
if [ -n "${reports:-}" ] && [ -n "$(ls -A "$reports")" ]; then
  head -n 40 "$reports"/*
  echo "sanitizer reports: $(ls "$reports" | wc -l) in $reports" >&2
  code=1
fi
exit "$code"
