#!/bin/sh
# mutate.sh [NAME...]: builds the test programs and runs all mutants, or those
# named. Prints "killed N of M"; see mutate.py for options and exit codes.
set -eu
cd "$(dirname "$0")/../.."
cmake --preset release -DREMESH_TESTS=ON > /dev/null
cmake --build build -j "$(deploy/cores.sh)" --target cluster_sim core_test scenario_test \
  server_test wire_test store_test agent_core_test > /dev/null
exec tests/sim/mutate.py "$@"
