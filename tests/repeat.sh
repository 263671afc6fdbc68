#!/usr/bin/env bash
# Runs the suite again and again in a built tree, under conditions that must not
# change its result, and prints a table.
#
#   tests/repeat.sh [RUNS [FIRST]]   default: runs 1 to 20, one each of a list of
#                                    20 conditions; needs root and tests/run.sh
#
# Exit code 1 if a run fails. The logs are in build/repeat/.
#
# plain   nothing else
# busy    beside four busy loops
# guest   as another user, who has a run that stopped, in a checkout behind a
#         symbolic link with a space in its path, built once
# avx2    with DNNL_MAX_CPU_ISA=AVX2: no bf16
# shm     with 64 MiB of /dev/shm
# beside  while another suite (that of the guest) and a quick start run
set -uo pipefail
cd "$(dirname "$0")/.."
conditions=(plain busy guest avx2 shm beside busy guest avx2 plain
            plain busy guest avx2 shm beside busy guest avx2 plain)
runs=${1:-20} first=${2:-1}
[ "$(id -u)" -eq 0 ] || { echo "tests/repeat.sh needs root" >&2; exit 2; }
[ -x build/bin/remesh ] || { echo "build with tests/run.sh first" >&2; exit 2; }
logs=$PWD/build/repeat
home=$(mktemp -d /tmp/remesh-repeat.XXXXXX)
guest=(setpriv --reuid=65534 --regid=65534 --clear-groups
       env HOME="$home" TMPDIR="$home/tmp" REMESH_SCRATCH="$home/scratch"
       PATH=/usr/local/bin:/usr/bin:/bin)
checkout="$home/a link/remesh"
others=()
stop_others() {
  for pid in "${others[@]}"; do kill -TERM -- "-$pid"; wait "$pid"; done 2>/dev/null
  others=()
}
trap 'stop_others; rm -rf "$home"' EXIT
mkdir -p "$logs" "$home/tmp" "$home/real" "$home/run" \
  "$home/.local/state/remesh"
build/bin/remesh job defaults > "$home/run/job.toml"
touch "$home/run/journal"
echo "$home/run" > "$home/.local/state/remesh/runs"
ln -s "$home/real" "$home/a link"
git clone -q . "$home/real/remesh"
chown -R 65534:65534 "$home"
chmod 755 "$home"

in_background() {  # a command in a process group of its own
  setsid "$@" > "$logs/other-${#others[@]}.log" 2>&1 < /dev/null &
  others+=($!)
}
suite() { tests/run.sh; }
as_guest() { (cd "$checkout" && exec "${guest[@]}" tests/run.sh); }
build_guest() {
  [ -x "$checkout/build/bin/remesh" ] && return
  (cd "$checkout" && exec "${guest[@]}" tests/run.sh release -N) > \
    "$logs/guest-build.log" 2>&1
}

failed=0
printf '%-4s %-8s %-6s %8s %7s %7s\n' run under result minutes tests skipped
for ((run = first; run < first + runs; ++run)); do
  under=${conditions[(run - 1) % ${#conditions[@]}]}
  log=$logs/$run-$under.log
  case $under in guest|beside) build_guest ;; esac
  began=$SECONDS
  case $under in
    busy)
      for _ in 1 2 3 4; do in_background sh -c 'while :; do :; done'; done
      suite ;;
    guest) as_guest ;;
    avx2) DNNL_MAX_CPU_ISA=AVX2 suite ;;
    shm) unshare -m sh -c 'mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm &&
                           exec tests/run.sh' ;;
    beside)
      in_background sh -c 'cd "$1" && shift && exec "$@"' sh "$checkout" \
        "${guest[@]}" tests/run.sh
      # Not while the suite configures the same build.
      in_background sh -c 'sleep 30; cd "$1" && shift && exec "$@"' sh \
        "$checkout" "${guest[@]}" deploy/quickstart.sh
      suite ;;
    *) suite ;;
  esac > "$log" 2>&1 && result=passed || { result=FAILED; failed=1; }
  minutes=$(((SECONDS - began) * 10 / 60))
  stop_others
  printf '%-4s %-8s %-6s %8s %7s %7s\n' "$run" "$under" "$result" \
    "$((minutes / 10)).$((minutes % 10))" \
    "$(sed -n 's/.* tests failed out of \([0-9]*\)$/\1/p' "$log")" \
    "$(sed -n 's/^skipped: \([0-9]*\).*/\1/p' "$log")"
done
exit $failed
