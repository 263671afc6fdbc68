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
script scontrol <<<'echo node1; echo node2'
script sleep <<<'exit 0'
script srun <<'END'
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
END
script remesh-worker <<END
echo "\$*" >>$dir/worker
[ ! -e $dir/unanswered ] || exec /usr/bin/sleep 590
END
# Exits with the codes in the file, one each time.
script remesh-coordinator <<END
echo "\$*" >>$dir/coordinator
code=\$(head -n 1 $dir/codes)
sed -i 1d $dir/codes
exit "\$code"
END
seq 2000 >"$dir/text"
"$1/remesh" data prepare --input "$dir/text" --tokenizer bytes \
  --out "$dir/data" >/dev/null || exit 1
printf '[job]\nname = "mine"\n[data]\npath = "%s"\n' "$dir/data" >"$dir/job.toml"

# run CODE...: the coordinator exits with these; sets `got`.
run() {
  printf '%s\n' "$@" >"$dir/codes"
  rm -f "$dir/worker" "$dir/coordinator"
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
for code in 0 2 4 5; do
  run "$code" 0
  check "exit code $got, not $code" [ "$got" -eq "$code" ]
  check "code $code ends the job" [ "$(wc -l <"$dir/coordinator")" -eq 1 ]
done
touch "$dir/unanswered"
run 2
check "workers that no coordinator answers are ended: $got" [ "$got" -eq 2 ]
exit $failed
