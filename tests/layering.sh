#!/usr/bin/env bash
# Layering: which folder may include which, and which one module each
# third-party header may stand in. Prints every offence; exit 1 if any.
# Usage: tests/layering.sh [ROOT]
set -uo pipefail
cd "${1:-$(dirname "$0")/..}" || exit 2
bad=0
offence() { echo "$1"; bad=1; }

# header pattern | the files (regex) that may include it
while read -r header files; do
  [ -n "$header" ] || continue
  while IFS=: read -r file line _; do
    [[ "$file" =~ ^($files) ]] ||
      offence "$file:$line: <$header> belongs in ${files//|/ or }"
  done < <(grep -rnE "#include *[<\"]$header" --include=*.cc --include=*.h \
             proto parallel checkpoint worker coordinator)
done <<'RULES'
mpi\.h parallel/comm/mpi_comm\.cc
hdf5\.h checkpoint/store/[a-z0-9_]*\.cc
zmq proto/wire/[a-z_]*\.cc
pmix worker/agent/shell/pmix_[a-z_]*\.cc
dnnl worker/kernels/onednn_[a-z_]*\.cc
sqlite3\.h coordinator/server/journal\.cc
toml[+][+] proto/jobfile/[a-z_]*\.cc
lzma\.h worker/data/[a-z_]*\.cc
RULES

# folder (prefix) | folders it may include from
while read -r from to; do
  [ -n "$from" ] || continue
  while IFS=: read -r file line text; do
    path=$(sed -E 's/.*#include "([^"]+)".*/\1/' <<<"$text")
    [[ "$path" =~ ^($from|$to) ]] ||
      offence "$file:$line: $from may not include $path"
  done < <(grep -rnE '#include "(proto|parallel|checkpoint|worker|coordinator|tests|bench)/' \
             --include=*.cc --include=*.h "$from")
done <<'RULES'
proto/base proto/base
proto/wire proto/base|proto/[a-z]*\.pb\.h
proto/jobfile proto/base|proto/[a-z]*\.pb\.h|parallel/geometry
parallel/geometry proto/base
parallel/comm proto/base|parallel/geometry
parallel/planner proto/base|parallel/geometry
checkpoint/manifest proto/base|proto/[a-z]*\.pb\.h|parallel/geometry
checkpoint/store proto/base|proto/[a-z]*\.pb\.h|parallel/geometry|checkpoint/(manifest|memory)
checkpoint/memory proto/base|parallel/geometry
checkpoint/exchange proto/base|parallel/(geometry|comm)|checkpoint/memory
worker/kernels proto/base
worker/model proto/base|parallel/geometry|parallel/comm|worker/kernels
worker/engine proto/base|parallel/geometry|parallel/comm|worker/(kernels|model|board|trace)
worker/data proto/base
worker/board proto/base
worker/trace proto/base|parallel/comm|worker/board
worker/train proto|parallel/geometry|parallel/comm|checkpoint|worker/(trace|engine|kernels|model|data|board)
worker/agent/core proto/base|proto/[a-z]*\.pb\.h
worker/agent/shell proto|worker/(agent|board|trace)|checkpoint/(memory|manifest)
coordinator/core proto/(base|jobfile)|proto/[a-z]*\.pb\.h|parallel/planner|parallel/geometry|checkpoint/(memory|manifest)
coordinator proto|parallel/(planner|geometry)|checkpoint/(manifest|store|memory)
RULES
[ $bad -eq 0 ] && echo "layering: clean"
exit $bad
