#!/usr/bin/env bash
# Runs the randomized tests with new seeds. The suite takes the same seeds each
# time (tests/testing/seed.h).
#
#   tests/fresh.sh [ROUNDS]     default 1; needs a tree built by tests/run.sh
#
# A failure is printed with the command that repeats it. Exit code 1 if any.
set -uo pipefail
cd "$(dirname "$0")/.."
failures=()
run() {  # notes the command if it fails
  "$@" || failures+=("$(printf '%q ' "$@")")
}
for round in $(seq "${1:-1}"); do
  seed=$((RANDOM << 15 | RANDOM))
  printf '\n== round %s, seed %s\n' "$round" "$seed"
  run env REMESH_TEST_SEED=$seed ctest --test-dir build -L 'unit|fuzz' \
    --output-on-failure --progress
  run build/bin/cluster_sim --first $((seed * 10000)) --seeds 10000
  run build/bin/soak --faults 30 --seed $seed
done
printf '\n'
if [ ${#failures[@]} -gt 0 ]; then
  printf 'failed: %s\n' "${failures[@]}"
  exit 1
fi
echo "all rounds passed"
