#!/usr/bin/env bash
# Trains a job for some steps, then forks it with several learning rates for as
# many steps more, and prints the last loss of each. Needs jq.
#
#   sweep.sh JOB STEPS LR...     e.g. sweep.sh quickstart.toml 100 1e-3 3e-4
set -euo pipefail
job=$1 steps=$2 && shift 2
remesh run "$job" --local 2 --run-dir sweep/base --detach > sweep.log
remesh wait sweep/base --step "$steps" --json | jq -e ".step >= $steps" >> sweep.log
at=$(remesh checkpoint save sweep/base --json | jq -e .step) ||
  { echo "sweep/base was not saved, and trains on" >&2; exit 1; }
remesh stop sweep/base >> sweep.log
for lr in "$@"; do
  run=$(remesh fork sweep/base --at "$at" --out "sweep/lr-$lr" --json \
          --set "optimizer.lr=$lr" --set "train.steps=$((at + steps))" | jq -r .run_dir)
  code=0 && remesh resume "$run" --local 2 >> sweep.log || code=$?
  [ "$code" -eq 0 ] || { echo "$run ended with $code, see sweep.log" >&2; exit "$code"; }
  remesh status "$run" --json | jq -r '"\(.run_dir)  step \(.step)  loss \(.loss)"'
done
