#!/usr/bin/env bash
# From a fresh Debian 12 to a trained model: installs the packages, builds,
# prepares the shipped corpus, and trains a small Llama on two workers. During
# the training a third worker joins and one worker is killed: the mesh changes
# and the loss keeps falling. In the end the model continues a text.
# Idempotent; takes a few minutes.
#
#   deploy/quickstart.sh [--set section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
step() { printf '\n== %s\n' "$*"; }

step "1/4 packages"
deploy/install_packages.sh

step "2/4 build (build/bin)"
cmake --preset release >/dev/null
cmake --build build -j "$(deploy/cores.sh)" --target remesh remesh-coordinator \
  remesh-worker remesh-trainer remesh-data remesh-measure remesh-sample
PATH=$PWD/build/bin:$PATH

step "3/4 data: deploy/data/books.txt.xz -> runs/quickstart-data"
mkdir -p runs
remesh data prepare --input deploy/data/books.txt.xz --tokenizer bytes \
  --out runs/quickstart-data

step "4/4 train: two workers; a third joins, then one is killed"
run=runs/quickstart-$(date +%Y%m%d-%H%M%S)
job=deploy/examples/quickstart.toml
echo "remesh run $job --local 2 --run-dir $run $*"

# Simulates a cluster of machines that come and go: after a third of the steps a
# worker joins, after two thirds one is killed with SIGKILL.
steps_done() { [ -f "$run/metrics.jsonl" ] && wc -l < "$run/metrics.jsonl" || echo 0; }
wait_for_step() { while [ "$(steps_done)" -lt "$1" ]; do sleep 0.2; done; }
membership_changes() {
  trap 'kill $(jobs -p) 2>/dev/null; exit 0' TERM
  while [ ! -f "$run/job.toml" ]; do sleep 0.2; done
  steps=$(sed -n '/^\[train\]/,/^\[/s/^steps *= *//p' "$run/job.toml")
  wait_for_step $((steps / 3))
  echo ">>> a third worker joins: remesh-worker --connect $run --name late"
  remesh-worker --connect "$run" --slots 1 --name late \
    --scratch-name "late-$$" --log "$run/logs/late.out" &
  wait_for_step $((steps * 2 / 3))
  victim=$(remesh status "$run" --json |
    python3 -c 'import json, sys
workers = json.load(sys.stdin)["workers"]
print(next(w["pid"] for w in workers if w["name"] != "late"))')
  echo ">>> kill -9 $victim: one of the first two workers dies"
  kill -9 "$victim"
  wait
}
membership_changes &
changes_pid=$!
trap 'kill $changes_pid 2>/dev/null || true; wait $changes_pid 2>/dev/null || true' EXIT

code=0
remesh run "$job" --local 2 --run-dir "$run" "$@" || code=$?
if [ $code -eq 0 ]; then
  wait $changes_pid || true
  echo
  echo "remesh sample $run --prompt 'It was ' --tokens 200"
  remesh sample "$run" --prompt 'It was ' --tokens 200
fi
exit $code
