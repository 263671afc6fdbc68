#!/usr/bin/env bash
# Checks the include graph: the one module that may include each third-party
# header, the folders that each folder may include, and that no include points
# upward. Prints every offence; exits with 1 if there is one.
# Usage: tests/layering.sh [ROOT]
set -uo pipefail
cd "${1:-$(dirname "$0")/..}" || exit 2
bad=0
offence() { echo "$1"; bad=1; }
production=(proto parallel checkpoint worker coordinator)
includes() {  # PATTERN FOLDER...: the matching lines as FILE:LINE:TEXT
  local pattern=$1
  shift
  grep -rnE "#include *[<\"]$pattern" --include=*.cc --include=*.h "$@"
}

# header (pattern) | the files (pattern) that may include it
while read -r header files; do
  [ -n "$header" ] || continue
  while IFS=: read -r file line _; do
    [[ "$file" =~ ^($files) ]] ||
      offence "$file:$line: only ${files//|/ or } may include <$header>"
  done < <(includes "$header" "${production[@]}")
done <<'RULES'
mpi\.h parallel/comm/mpi_comm\.cc
hdf5\.h checkpoint/store/[a-z0-9_]*\.cc
zmq proto/wire/[a-z_]*\.cc
pmix worker/agent/shell/pmix_([a-z_]*\.cc|call\.h)
dnnl worker/kernels/cpu/onednn_[a-z_]*\.cc
toml[+][+] parallel/jobfile/[a-z_]*\.cc
archive worker/data/text_reader\.cc
sodium\.h proto/base/keyed_hash\.cc|worker/agent/shell/wireguard\.cc|worker/tokenizer/tiktoken\.cc
pcre2\.h worker/tokenizer/regex\.cc
utf8proc\.h worker/tokenizer/unicode\.cc
RULES

# folder (prefix) | the folders (pattern) that it may include
rules=$(cat <<'RULES'
proto/base proto/base
proto/rundir proto/base|proto/[a-z]*\.pb\.h
proto/limits proto/base|proto/[a-z]*\.pb\.h
proto/wire proto/base|proto/rundir/paths|proto/[a-z]*\.pb\.h
proto/data proto/base
parallel/geometry proto/base
parallel/comm proto/base|parallel/geometry
parallel/jobfile proto/(base|limits)|proto/[a-z]*\.pb\.h|parallel/geometry
parallel/planner proto/base|proto/[a-z]*\.pb\.h|parallel/geometry
parallel/tune proto/base|parallel/(geometry|planner)
checkpoint/manifest proto/base|proto/[a-z]*\.pb\.h|parallel/geometry|checkpoint/memory
checkpoint/store proto/base|proto/[a-z]*\.pb\.h|parallel/geometry|checkpoint/(manifest|memory)
checkpoint/memory proto/base|proto/[a-z]*\.pb\.h|parallel/geometry
checkpoint/huggingface proto/base|proto/[a-z]*\.pb\.h|parallel/geometry|checkpoint/(manifest|store)
checkpoint/exchange proto/base|parallel/(geometry|comm)|checkpoint/memory
worker/kernels proto/base
worker/model proto/base|parallel/geometry|parallel/comm|worker/kernels
worker/engine proto/base|parallel/geometry|parallel/comm|worker/(kernels|model|board|trace)
worker/measure proto/base|proto/[a-z]*\.pb\.h|parallel/(comm|jobfile)|worker/kernels
worker/tokenizer proto/base|proto/[a-z]*\.pb\.h
worker/data proto/(base|data)|worker/tokenizer
worker/sample proto/(base|data|rundir)|proto/[a-z]*\.pb\.h|parallel/(geometry|jobfile)|checkpoint/(huggingface|manifest|memory)|worker/(data|kernels|model|tokenizer)
worker/board proto/base|proto/[a-z]*\.pb\.h
worker/trace proto/(base|rundir)|parallel/comm|worker/board
worker/train proto|parallel/(geometry|comm|jobfile)|checkpoint|worker/(trace|engine|kernels|model|data|board)
worker/agent/core proto/(base|limits)|proto/[a-z]*\.pb\.h
worker/agent/shell proto|worker/(agent|board|trace)|checkpoint/(memory|manifest)
coordinator/core proto/(base|rundir|limits)|proto/wire/protocol\.h|proto/[a-z]*\.pb\.h|parallel/(planner|geometry|jobfile)|checkpoint/(memory|manifest)
coordinator proto|parallel/(planner|geometry|jobfile|tune)|checkpoint/(huggingface|manifest|store|memory)
RULES
)
while read -r from to; do
  while IFS=: read -r file line text; do
    [[ "$text" =~ \"([^\"]+)\" ]]
    path=${BASH_REMATCH[1]}
    [[ "$path" =~ ^($from|$to) ]] ||
      offence "$file:$line: $from may not include $path"
  done < <(includes '(proto|parallel|checkpoint|worker|coordinator|tests|bench)/' \
             "$from")
done <<<"$rules"

# The rules above leave out no folder, the top folders include only those
# listed before them (worker and coordinator not each other), and the folders
# form no cycle.
edges=$(includes '(proto|parallel|checkpoint|worker|coordinator)/' \
          "${production[@]}" |
        sed -E 's,^(.*)/[^/]+:[0-9]+:#include "(.*)/[^/]+".*,\1 \2,' |
        awk '$1 != $2' | sort -u)
for folder in $(find "${production[@]}" -name '*.cc' -printf '%h\n' | sort -u)
do
  for rule in $(cut -d' ' -f1 <<<"$rules"); do
    [[ "$folder" == "$rule"* ]] && continue 2
  done
  offence "$folder: tests/layering.sh has no rule for it"
done
while read -r from to; do
  offence "$from includes $to: that is upward"
done < <(awk '
  BEGIN { level["proto"] = 1; level["parallel"] = 2; level["checkpoint"] = 3
          level["worker"] = 4; level["coordinator"] = 4 }
  { split($1, a, "/"); split($2, b, "/") }
  a[1] != b[1] && level[b[1]] >= level[a[1]]' <<<"$edges")
cycle=$(tsort <<<"$edges" 2>&1 >/dev/null) || offence "cycle of folders: $cycle"

[ $bad -eq 0 ] && echo "layering: clean"
exit $bad
