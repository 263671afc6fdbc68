#!/bin/bash
# What deploy/slurm/remesh.sbatch does, with Slurm's commands and the daemons
# replaced by scripts that note how they were called.
# sbatch.sh BIN_DIR SBATCH
set -u
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
mkdir "$dir/bin" "$dir/data"
script() { # NAME: from standard input
  { echo '#!/bin/bash' && cat; } >"$dir/bin/$1"
  chmod +x "$dir/bin/$1"
}
script scontrol <<END
echo "\$*" >>$dir/scontrol
echo node1
echo node2
END
script remesh <<END
[ "\$1" != stop ] || exec touch $dir/stopped
exec "$(realpath "$1")/remesh" "\$@"
END
script sleep <<<'exit 0'
script srun <<'END'
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
END
script remesh-worker <<END
echo "\$*" >>$dir/worker
[ ! -e $dir/unanswered ] || exec /usr/bin/sleep 3600
END
# Exits with the codes in the file, one each time: `listened CODE` after it has
# listened, `warned CODE` after Slurm's warning and the stop that follows.
script remesh-coordinator <<END
echo "\$*" >>$dir/coordinator
read -r code then <$dir/codes
sed -i 1d $dir/codes
case \$code in
  listened) touch -d '1 minute' $dir/runs/slurm-7/coordinator.addr ;;
  warned)
    kill -USR1 "\$(cut -d ' ' -f 4 "/proc/\$PPID/stat")"
    while [ -e $dir/codes -a ! -e $dir/stopped ]; do /usr/bin/sleep 0.1; done
    ;;
esac
exit "\${then:-\$code}"
END
seq 2000 >"$dir/text"
"$1/remesh" data prepare --input "$dir/text" --tokenizer bytes \
  --out "$dir/data" >/dev/null || exit 1
printf '[job]\nname = "mine"\n[data]\npath = "%s"\n' "$dir/data" >"$dir/job.toml"

# run CODE...: the coordinator exits with these; sets `got`.
run() {
  printf '%s\n' "$@" >"$dir/codes"
  rm -rf "$dir/worker" "$dir/coordinator" "$dir/scontrol" "$dir/stopped"
  (cd "$dir" && PATH=$dir/bin:$bin:$PATH SLURM_JOB_ID=7 \
    SLURM_JOB_NODELIST="node[1-2]" timeout 600 bash "$sbatch" job.toml 4) \
    >"$dir/out" 2>&1
  got=$?
}
bin=$(realpath "$1") sbatch=$(realpath "$2") failed=0
check() { # TEXT CONDITION...
  local text=$1
  shift
  "$@" || {
    echo "FAIL: $text"
    cat "$dir/out" "$dir/worker" "$dir/coordinator"
    failed=1
  }
}

run 75 137 3
check "exit code $got, not 3" [ "$got" -eq 3 ]
check "a coordinator that may be tried again is" \
  [ "$(wc -l <"$dir/coordinator")" -eq 3 ]
check "workers name their job" grep -q -e '--job mine$' "$dir/worker"
check "workers know the coordinator's key" \
  grep -q -e '--server-key .*/keys/coordinator.pub ' "$dir/worker"
check "a job that failed is not requeued" [ "$(grep -c requeue "$dir/scontrol")" -eq 0 ]
for code in 0 2 4 5; do
  run "$code" 0
  check "exit code $got, not $code" [ "$got" -eq "$code" ]
  check "code $code ends the job" [ "$(wc -l <"$dir/coordinator")" -eq 1 ]
done
keys=$dir/runs/slurm-7/keys
mv "$keys/batch.key" "$dir"
"$bin/remesh" key revoke batch "$dir/runs/slurm-7" >/dev/null
mv "$dir/batch.key" "$keys"
# What other keys say does not count.
"$bin/remesh" key new worker other "$dir/runs/slurm-7" --workers batch \
  --days 1 >/dev/null
run 0
check "a secret that was never allowed is made again" \
  grep -q 'name = "batch"' "$keys/allowed.toml"
cp "$keys/batch.key" "$dir"
run 0
check "one that is allowed is kept" cmp "$keys/batch.key" "$dir/batch.key"
run "warned 5"
check "exit code $got, not 0, after a warning" [ "$got" -eq 0 ]
check "a warning requeues" [ "$(grep -cx 'requeue 7' "$dir/scontrol")" -eq 1 ]

# A job that was requeued: its run exists, and the file has changed since.
mkdir -p "$dir/runs/slurm-7/logs"
sed 's/mine/first/' "$dir/job.toml" >"$dir/runs/slurm-7/job.toml"
run 75 137 "listened 137" 0
check "workers name the run's job" grep -q -e '--job first$' "$dir/worker"
check "the changed file is not read" \
  [ "$(grep -c -e 'job.toml' "$dir/coordinator")" -eq 0 ]
check "it resumes until it has listened" \
  [ "$(cut -d ' ' -f 7 "$dir/coordinator" | tr '\n' ,)" = \
  "--resume,--resume,--resume,," ]
touch "$dir/unanswered"
run 2
check "workers that no coordinator answers are ended: $got" [ "$got" -eq 2 ]
exit $failed
