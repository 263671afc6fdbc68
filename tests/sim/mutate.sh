#!/bin/bash
# mutate.sh [NAME...]: takes the guards away, one at a time, and shows that the
# tests notice. Each mutant of mutants.txt (or those named) is applied to a copy
# of the tree, built and run: in the simulated cluster, and the table says which
# invariant it violated and at which seed; or, where no invariant of a whole
# cluster depends on the guard, in the test program that `by` names, and the
# table says which test failed. Exit code 1 when a mutant survives.
#   SEEDS=20000  seeds a mutant gets       LIMIT=600  seconds a mutant gets
#   JOBS=2       threads and compilers     KEEP=DIR   copy and build folder
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
seeds=${SEEDS:-20000}
limit=${LIMIT:-600}
jobs=${JOBS:-2}
work=${KEEP:-$(mktemp -d)}
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
export CCACHE_BASEDIR="$work" CCACHE_NOHASHDIR=1
export CCACHE_SLOPPINESS=pch_defines,time_macros

tree="$work/tree"
folders="proto coordinator/core worker/agent/core parallel/geometry
  parallel/jobfile parallel/planner checkpoint/manifest checkpoint/memory
  tests/sim tests/scenario tests/unit/core"
for f in $folders; do
  mkdir -p "$tree/$f"
  cp -rp "$root/$f/." "$tree/$f/"
done
mkdir -p "$tree/tests/testing"
cp -p "$root/tests/testing/pieces.h" "$tree/tests/testing/"
touch "$tree"/*/core/*.cc "$tree"/*/*/core/*.cc  # a kept copy may be mutated
cp "$root/CMakeLists.txt" "$tree/"
for f in checkpoint worker worker/agent coordinator parallel tests tests/unit; do
  mkdir -p "$tree/$f"
  if [ -f "$root/$f/CMakeLists.txt" ]; then
    cp "$root/$f/CMakeLists.txt" "$tree/$f/"
  fi
done

build() {  # build TARGET...
  cmake --build "$work/build" --target "$@" -j "$jobs" \
    > "$work/build.log" 2>&1 < /dev/null
}
cmake -S "$tree" -B "$work/build" -G Ninja -DREMESH_BENCH=OFF \
  -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O1 > "$work/build.log" 2>&1 ||
  { cat "$work/build.log"; exit 2; }
build cluster_sim core_test scenario_test || { tail -40 "$work/build.log"; exit 2; }

# replace FILE FROM TO: exact text, which must be there once.
replace() {
  local file="$tree/$1" text rest
  text=$(cat "$file"; echo x)
  rest=${text#*"$2"}
  if [ "$rest" = "$text" ] || [ "${rest#*"$2"}" != "$rest" ]; then
    echo "mutants.txt: not exactly once in $1: $2" >&2
    exit 2
  fi
  text=${text%%"$2"*}$3$rest
  printf '%s' "${text%x}" > "$file"
}

survivors=0
mutants=0
edits=()
name="" guards="" by=cluster_sim

# Sets rc, and violation and seed if the mutant was noticed.
run_in() {
  rc=0
  if [ "$by" = cluster_sim ]; then
    timeout "$limit" "$work/build/bin/cluster_sim" --seeds "$seeds" \
      --jobs "$jobs" --stop-at 1 > "$work/out" 2> "$work/err" || rc=$?
    violation=$(sed -n 's/^VIOLATED seed [0-9]*, t=[0-9]* ms: //p' \
      "$work/out" | head -1 | cut -c1-76)
    seed=$(sed -n 's/^VIOLATED seed \([0-9]*\).*/\1/p' "$work/out" | head -1)
  else
    timeout "$limit" "$work/build/bin/$by" > "$work/out" 2> "$work/err" || rc=$?
    violation=$(sed -n 's/^\[  FAILED  \] \([^ ]*\) (.*/\1/p' "$work/out" |
      head -1)
  fi
}

run_mutant() {
  [ -n "$name" ] || return 0
  local i violation seed="" rc=0
  for ((i = 0; i < ${#edits[@]}; i += 3)); do
    replace "${edits[i]}" "${edits[i + 1]}" "${edits[i + 2]}"
  done
  mutants=$((mutants + 1))
  if build "$by"; then
    run_in
    if [ "$rc" = 0 ]; then
      violation="SURVIVED $by; guards: $guards"
      survivors=$((survivors + 1))
    elif [ "$rc" = 124 ]; then
      violation="(did not end in $limit s)"
      survivors=$((survivors + 1))
    elif [ "$rc" != 1 ]; then
      violation="(aborted: $(grep -m1 -i check "$work/err" | cut -c1-60))"
    fi
  else
    violation="DOES NOT BUILD: $(grep -m1 error: "$work/build.log")"
    survivors=$((survivors + 1))
  fi
  printf '%-28s %7s  %s\n' "$name" "${seed:--}" "$violation"
  for ((i = 0; i < ${#edits[@]}; i += 3)); do
    cp "$root/${edits[i]}" "$tree/${edits[i]}"
  done
}

wanted() {
  local w
  [ ${#only[@]} = 0 ] && return 0
  for w in "${only[@]}"; do [ "$w" = "$1" ] && return 0; done
  return 1
}

only=("$@")
printf '%-28s %7s  %s\n' "mutant" "seed" "violated"
skip=1 file="" from=""
while IFS= read -r line || [ -n "$line" ]; do
  case "$line" in
    '' | '#'*) continue ;;
    'mutant '*)
      run_mutant
      name=${line#mutant } edits=() guards="" by=cluster_sim
      skip=0
      wanted "$name" || { skip=1; name=""; }
      ;;
    'guards '*) guards=${line#guards } ;;
    'by '*) by=${line#by } ;;
    'file '*) file=${line#file } ;;
    '- '*) from=$(printf '%b' "${line#- }") ;;
    '+ '* | '+')
      line=${line#+}
      if [ $skip = 0 ]; then
        edits+=("$file" "$from" "$(printf '%b' "${line# }")")
      fi
      ;;
    *) echo "mutants.txt: what is '$line'?" >&2; exit 2 ;;
  esac
done < "$here/mutants.txt"
run_mutant
echo "killed $((mutants - survivors)) of $mutants"
[ "$survivors" = 0 ]
