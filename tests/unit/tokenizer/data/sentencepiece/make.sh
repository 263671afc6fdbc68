#!/usr/bin/env bash
# Makes the models and the tokens of lines.txt in this folder with the programs of
# SentencePiece (Debian package `sentencepiece`, 0.1.97), from a text.
#   make.sh TEXT
set -euo pipefail
text=$(mktemp)
trap 'rm -f "$text"' EXIT
fold -s -w 200 "$1" > "$text"
cd "$(dirname "$0")"
train() {  # NAME OPTION...
  spm_train --input="$text" --model_prefix="$1" --model_type=bpe \
    --vocab_size=480 --byte_fallback=true --normalization_rule_name=identity \
    --split_digits=true --allow_whitespace_only_pieces=true "${@:2}"
  spm_encode --model="$1.model" --output_format=id < lines.txt > "$1.ids"
  rm "$1.vocab"
}
train as_llama --remove_extra_whitespaces=false
train as_gemma --remove_extra_whitespaces=false --add_dummy_prefix=false \
  --user_defined_symbols='▁▁,▁▁▁,<table>,0,1,2'
train removes_spaces --control_symbols='<|user|>'
