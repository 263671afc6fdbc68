#!/bin/bash
# What the units of systemd promise: a daemon that may be started again is,
# however often; nothing that ended a job is; many workers can connect; files are
# for the user alone.
# units.sh DEPLOY_DIR
set -u
failed=0
# The last value of a key in a unit.
value() { sed -n "s/^$2=//p" "$1" | tail -n 1; }
check() { # TEXT CONDITION...
  local text=$1
  shift
  "$@" || { echo "FAIL: $text" && failed=1; }
}
for unit in "$1"/systemd/*.service; do
  name=$(basename "$unit")
  ended=" $(value "$unit" RestartPreventExitStatus) "
  check "$name: starts are limited" [ "$(value "$unit" StartLimitIntervalSec)" = 0 ]
  check "$name: too few files" [ "$(value "$unit" LimitNOFILE)" -ge 65536 ]
  check "$name: files are for others" [ "$(value "$unit" UMask)" = 0077 ]
  for code in 2 3 4; do # as in proto/base/exit_code.h
    check "$name: $code is restarted" [ "${ended/ $code /}" != "$ended" ]
  done
  for code in 75 137; do
    check "$name: $code is not restarted" [ "${ended/ $code /}" = "$ended" ]
  done
done
check "no units" [ -n "${name:-}" ]

# The arguments of the coordinator, by its ExecStart.
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
arguments() {
  local line
  line=$(sed -n '/^ExecStart=/,/[^\\]$/{s/^ExecStart=//;s/\\$//;p}' \
    "$1/systemd/remesh-coordinator@.service" | tr '\n' ' ')
  line=${line//\$\$/\$}
  line=${line//%i/job}
  line=${line//\/usr\/local\/bin\/remesh-coordinator/echo}
  REMESH_BIND=tcp://h:1 REMESH_RUN_DIR=$dir bash -c "$line"
}
rest="--bind tcp://h:1 --run-dir $dir"
check "a new run has no job file: $(arguments "$1")" \
  [ "$(arguments "$1")" = "/etc/remesh/job.toml $rest" ]
touch "$dir/job.toml"
check "a run does not keep its settings: $(arguments "$1")" \
  [ "$(arguments "$1")" = "$rest" ]
exit "$failed"
