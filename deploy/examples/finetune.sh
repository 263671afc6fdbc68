#!/usr/bin/env bash
# From a model of another program to one: trains a Hugging Face model further on
# a text, kills a worker in the middle, exports the result, and lets both continue
# a sentence. Needs jq.
#
#   finetune.sh MODEL TEXT OUT [OPTION...]    options of `remesh run`
#   e.g. finetune.sh deploy/data/stories260k deploy/data/books.txt.xz runs/tuned
set -euo pipefail
job=$(dirname "$0")/finetune.toml model=$1 text=$2 out=$3
mkdir -p "$out"
remesh data prepare --input "$text" --tokenizer "$model/tokenizer.json" \
  --out "$out/data"
remesh run "$job" --local 2 --run-dir "$out/run" --detach \
  --set "model.init_from=$model" --set "data.path=$out/data" "${@:4}" > "$out/log"
remesh wait "$out/run" --step 30 >> "$out/log"
kill -9 "$(remesh status "$out/run" --json | jq '.workers[0].pid')"
remesh wait "$out/run" >> "$out/log"
remesh model export "$out/run" --out "$out/model" --like "$model"
for m in "$model" "$out/model"; do
  printf '\n%s:\n' "$m"
  remesh sample "$m" --prompt "He said " --tokens 60 --dtype fp32
done
