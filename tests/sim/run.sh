#!/bin/sh
# run.sh [SEEDS=100000]: runs the simulated cluster, built if needed. Prints a
# summary; exit code 1 if an invariant is violated.
set -eu
cd "$(dirname "$0")/../.."
cmake --preset release -DREMESH_TESTS=ON > /dev/null
cmake --build build -j "$(deploy/cores.sh)" --target cluster_sim > /dev/null
exec build/bin/cluster_sim --seeds "${1:-100000}" --jobs "$(deploy/cores.sh)"
