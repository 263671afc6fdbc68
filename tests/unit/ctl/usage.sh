#!/bin/sh
# What `remesh` says to wrong use: exit code 2 and a line that helps.
# usage.sh BIN_DIR
set -u
bin=$1
model=$(cd "$(dirname "$0")/../../../deploy/data/stories260k" && pwd) || exit 1
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
cd "$dir" || exit 1
export XDG_STATE_HOME="$dir/state"  # the runs of the user are not known here
failed=0

# expect CODE TEXT COMMAND...: exit code, and TEXT somewhere in the output.
expect() {
  code=$1 text=$2
  shift 2
  out=$(timeout 600 "$@" 2>&1)
  got=$?
  if [ $got -ne "$code" ]; then
    echo "FAIL: $*: exit code $got, not $code: $out"
    failed=1
  fi
  case $out in
  *"$text"*) ;;
  *)
    echo "FAIL: $*: does not say \"$text\": $out"
    failed=1
    ;;
  esac
}

# one_line TEXT ARGUMENT...: a usage error of `remesh` in one line with TEXT.
one_line() {
  text=$1
  shift
  expect 2 "$text" "$bin/remesh" "$@"
  [ "$(echo "$out" | wc -l)" -eq 1 ] || {
    echo "FAIL: remesh $*: more than one line: $out"
    failed=1
  }
}

# The verbs that `remesh ARGUMENTS --help` lists.
verbs() {
  "$bin/remesh" "$@" --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z]*\) .*/\1/p'
}
case $(verbs) in
*run*checkpoint*job*) ;;
*)
  echo "FAIL: --help does not list the verbs"
  failed=1
  ;;
esac
for verb in "" $(verbs); do
  expect 0 "xample" "$bin/remesh" $verb --help
done
for verb in checkpoint job; do
  for inner in $(verbs $verb); do
    expect 0 "xample" "$bin/remesh" $verb $inner --help
  done
done
# Every verb prints its result as JSON, too. A group of verbs has no result, but
# `plan` is a verb as well.
for verb in $(verbs); do
  inner=$(verbs $verb)
  [ -n "$inner" ] && [ $verb != plan ] ||
    expect 0 " --json " "$bin/remesh" $verb --help
  for name in $inner; do
    expect 0 " --json " "$bin/remesh" $verb $name --help
  done
done
one_line "--json requires --detach" run job.toml --json
one_line "--json requires --detach" resume --json
expect 0 "checkpoint save" "$bin/remesh" checkpoint --help
expect 0 "xample" "$bin/remesh" data prepare --help
expect 0 "SIGTERM" "$bin/remesh-coordinator" --help
expect 2 "did you mean status" "$bin/remesh" statsu
expect 2 "did you mean --local" "$bin/remesh" run j.toml --lokal 2
expect 2 "JOB is required" "$bin/remesh" run
expect 2 "WORKER is required" "$bin/remesh" drain
expect 2 "LAYOUT is required" "$bin/remesh" mesh
expect 2 "garbage" "$bin/remesh" mesh garbage
expect 5 "no run in" "$bin/remesh" mesh dp2,tp2
expect 5 "no such job file" "$bin/remesh" run none.toml
for value in none -2 2x 5000; do
  one_line "remesh run: --local: '$value' is not an integer from 0 to 4096;" \
    run none.toml --local $value
done
one_line "remesh run: --local: needs a value (Number of workers" run j.toml --local
one_line "remesh run: --local: needs a value (Number of workers" run j.toml \
  --local=
for more in "--local=3" "--local 3 --run-dir=x"; do
  one_line "remesh run: --local: At Most 1 required but received 2" \
    run j.toml --local 2 $more
done
one_line "remesh drain: WORKER is required (Its name" drain
one_line "remesh: expected one of: run, resume"
case $out in
*"did you mean"*)
  echo "FAIL: remesh guesses what nobody has typed: $out"
  failed=1
  ;;
esac
one_line "remesh key: expected one of: new, allow" key
one_line "unknown" status -q
one_line "remesh trace: --bad: unknown; expected one of: --help, --output" \
  trace run -o out.json --bad
# Programs behind verbs say the same.
one_line "remesh data: expected one of: prepare, mix" data
one_line "remesh data inspect: --lenght: unknown; expected one of: --help" \
  data inspect books --lenght 3
one_line "remesh data prepare: --input is required (Files, folders" data prepare
prepare="data prepare a.jsonl --out x"
one_line "--chat-template requires --chat" $prepare --chat-template c.jinja
one_line "--field excludes --chat" $prepare --chat --field body
one_line "did you mean encode" tokenizer encod
expect 5 "no run in $dir/runs" "$bin/remesh" status
expect 5 "$dir/none: no such run" "$bin/remesh" stop none
expect 5 "no such run" "$bin/remesh" checkpoint list none
expect 5 "/nowhere: no such file or folder" "$bin/remesh" model import \
  /nowhere --out imported
expect 5 "/nowhere: no such file or folder" "$bin/remesh" model export none \
  --out exported --like /nowhere
expect 2 "type: remesh checkpoint list none --json" "$bin/remesh" ckpt list \
  none --json
expect 2 "type: remesh checkpoint save runs/latest" "$bin/remesh" checkpoint \
  runs/latest
expect 2 "expected one of: save, list, inspect, verify" "$bin/remesh" checkpoint
expect 2 "did you mean verify" "$bin/remesh" checkpoint verfy
expect 75 "no answer from tcp://127.0.0.1:9" "$bin/remesh" status \
  tcp://127.0.0.1:9 --no-auth
expect 2 "remesh key new operator" "$bin/remesh" status tcp://127.0.0.1:9
# The key of a run that can be seen comes before that of the environment, which
# may be for another run.
expect 0 "" "$bin/remesh" key new coordinator head keyed
printf 'tcp://192.0.2.1:9\nhost=elsewhere\nhost_id=1\n' >keyed/coordinator.addr
expect 75 "no answer from tcp://192.0.2.1:9" \
  env REMESH_KEY=/nowhere/env "$bin/remesh" status keyed
rm -r keyed/keys
expect 2 "/nowhere/env" env REMESH_KEY=/nowhere/env "$bin/remesh" status keyed
# Its coordinator ran before the host was restarted, or in another container.
mkdir dead
printf 'tcp://127.0.0.1:9\npid=1\nhost=before\nhost_id=1\n' \
  >dead/coordinator.addr
expect 4 "not running since" "$bin/remesh" status dead
expect 4 "not running since" "$bin/remesh" stop dead
# What is typed comes before the environment.
expect 2 "/nowhere/typed" env REMESH_KEY=/nowhere/env "$bin/remesh" status \
  tcp://127.0.0.1:9 --key /nowhere/typed
expect 2 "/nowhere/env" env REMESH_KEY=/nowhere/env "$bin/remesh" stop \
  tcp://127.0.0.1:9
expect 2 "--days" "$bin/remesh" key new operator anna run --days 9999999
expect 2 "--days" "$bin/remesh" key new operator anna run --days nan
expect 0 "RUN --workers 'gpu*' --days 2" "$bin/remesh" key new join batch \
  --out batch.key --days 2 --workers 'gpu*'
# An error that nobody can read is an error all the same.
"$bin/remesh" status /nowhere >/dev/full 2>/dev/full
[ $? -eq 5 ] || {
  echo "FAIL: with full output, status of no run does not exit with 5"
  failed=1
}

mkdir run
cat >job.toml <<'END'
[data]
path = "data"
END
expect 5 "remesh data prepare" "$bin/remesh" job check job.toml
seq 20000 >text.txt
expect 0 "" "$bin/remesh" data prepare --input text.txt --out data
expect 0 "vocab_size = 257" "$bin/remesh" job check job.toml
expect 0 "steps = 7" "$bin/remesh" job check job.toml --set train.steps=7
expect 0 "mesh dp3: 3 of 3 slots" "$bin/remesh" plan job.toml --slots 3
expect 2 "allowed: 1, 2, 4" "$bin/remesh" plan job.toml --layout tp3
expect 3 "too few slots: 1 offered" "$bin/remesh" plan job.toml --layout dp2
expect 3 "the standard output cannot be written" sh -c \
  "'$bin/remesh' plan job.toml --slots 3 >/dev/full"
expect 3 "the standard output cannot be written" sh -c \
  "'$bin/remesh' data inspect data --json >/dev/full"
expect 2 "at most 1048576 slots in all" "$bin/remesh" plan job.toml \
  --slots 65536 --hosts 65536
expect 2 "either a job file or --model" "$bin/remesh" plan
for option in "plan job.toml --layout" "plan job.toml --cluster" \
  "plan --model" "plan study torchtitan --html" "plan measure --out" \
  "plan project --model" "tune job.toml --out"; do
  one_line ": --${option##* --}: must not be empty" $option ""
done
# Not the run that trains, or the newest one.
for verb in stop "stop --discard" "checkpoint prune" resume fork run \
  "run job.toml --run-dir"; do
  one_line ": must not be empty" $verb ""
done
expect 0 "best: " "$bin/remesh" plan job.toml --cluster h100 --gpus 2
on="--cluster h100 --gpus"
expect 0 "stages wait" "$bin/remesh" plan --model llama3-8b $on 8 --explain dp8
expect 5 "did you mean llama3-8b?" "$bin/remesh" plan --model llama3-8c $on 8
expect 5 "known: a100-40, a100-80" "$bin/remesh" plan --model llama3-8b \
  --cluster k80 --gpus 8
expect 2 "--gpus: '0' is not an integer from 1 to" \
  "$bin/remesh" plan --model llama3-8b $on 0
expect 2 "requires --gpus" "$bin/remesh" plan --model llama3-8b --cluster h100
expect 2 "requires --cluster" "$bin/remesh" plan job.toml --gpus 8
expect 5 "no such file" "$bin/remesh" plan --model other.json $on 8
expect 2 "/: a folder; expected a description, a job or a Hugging Face config" \
  "$bin/remesh" plan --model / $on 8
expect 2 "/: a folder; expected a description" "$bin/remesh" plan \
  --model llama3-8b --cluster / --gpus 8
expect 2 "/: a folder; expected a study" "$bin/remesh" plan study /
expect 3 "fits into no mesh of 8" "$bin/remesh" plan --model llama3-405b $on 8
expect 2 "1f1b" "$bin/remesh" plan --model llama3-8b $on 8 --schedule fifo
expect 2 "not the standard input" "$bin/remesh" plan - $on 8
expect 0 "never" "$bin/remesh" plan project --model llama3-8b --cluster h100 \
  --gpus 4096 --tokens 1e12 --mtbf-hours 1
expect 2 "a micro-batch of 3 must divide the 512 sequences" "$bin/remesh" plan \
  --model llama3-70b --cluster h100 --gpus 64 --micro-batch 3
expect 2 "with one, 0 and 1" "$bin/remesh" plan --model llama3-70b \
  --cluster h100 --gpus 64 --zero 2 --explain dp4,pp2,tp8
expect 2 "tp 16: a node has 8 devices" "$bin/remesh" plan --model llama3-70b \
  --cluster h100 --gpus 64 --explain dp4,tp16
expect 2 "--set model.dim=8: changes a job file" "$bin/remesh" plan \
  --model llama3-8b $on 8 --set model.dim=8
# The example of the README, where "..." leaves lines out.
sed -n '/^\$ remesh plan --model/,/^```/p' "$model/../../../README.md" >example
expect 0 "best: " "$bin/remesh" $(sed -n '1s/^\$ remesh//p' example)
echo "$out" >plan
if grep -v '^\$\|^```\|^\.\.\.$' example | grep -vxF -f plan; then
  echo "FAIL: README.md: this is not what remesh plan says"
  failed=1
fi
echo '{"model_type": "llama"}' >config.json
expect 2 "hidden_size is missing" "$bin/remesh" plan --model config.json $on 8
mkdir hf
cat >hf/config.json <<'END'
{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
 "vocab_size": 50257, "n_positions": 1024}
END
expect 0 "124M parameters" "$bin/remesh" plan --model hf $on 8
printf '[model]\ndim = 64\n' >model.toml
head -c 500000 /dev/zero | tr '\0' '\n' >>model.toml
expect 2 "model.n_layers: is required" \
  "$bin/remesh" plan --model model.toml $on 8
expect 0 "claims hold" "$bin/remesh" plan study torchtitan --html page.html
expect 0 "</html>" tail -n 1 page.html
ln -s page.html link.html
expect 0 "claims hold" "$bin/remesh" plan study torchtitan --html link.html
expect 0 "" test -L link.html
expect 2 "/: a folder or a device; give a file" "$bin/remesh" plan measure --out /
expect 5 "known: frontier, scaling, torchtitan" "$bin/remesh" plan study chips
expect 5 "/nowhere.json: no such file" "$bin/remesh" plan study /nowhere.json
project="plan project --model llama3-8b $on 8"
expect 0 "checkpoint-restart" "$bin/remesh" $project --tokens 1e12
expect 0 "none, because all devices are in one node" \
  "$bin/remesh" $project --tokens 1e12
expect 0 " USD" "$bin/remesh" $project --tokens 1e12
expect 0 "price: 2.50 USD for a device-hour" \
  "$bin/remesh" $project --tokens 1e12 --price 2.5
expect 0 "cost: unknown" "$bin/remesh" plan project --model llama3-8b \
  --cluster frontier --gpus 8 --tokens 1e12
expect 0 "1 token in 1 step" "$bin/remesh" $project --tokens 1
expect 0 '"tokens": 1000000000000,' \
  "$bin/remesh" $project --tokens 1e12 --json
expect 2 "--tokens" "$bin/remesh" $project
expect 2 "--mtbf-hours" "$bin/remesh" $project --tokens 1e12 --mtbf-hours 0
expect 2 "--tokens" "$bin/remesh" $project --tokens nan
expect 5 "run \`remesh plan measure\`" "$bin/remesh" plan job.toml \
  --cluster local --gpus 2
expect 0 "written to $dir/state/remesh/hosts/$(uname -n)" \
  "$bin/remesh" plan measure
measured=$(find state/remesh/hosts -name local.toml)
expect 0 "best: " "$bin/remesh" plan job.toml --cluster local --gpus 2
expect 0 "mesh dp3: 3 of 3 slots" "$bin/remesh" plan job.toml --slots 3
echo "[device]" >"$measured"
expect 2 "device.name: is required" "$bin/remesh" plan job.toml --slots 3
expect 0 "peak_fp32_tflops" "$bin/remesh-measure" --core  # replaces it
sed -i 's/^name = .*/name = "another processor"/' "$measured"
expect 0 "peak_fp32_tflops" "$bin/remesh-measure" --core  # and this
expect 1 "" grep "another processor" "$measured"
sed -i 's/^source = .*/source = "measured by remesh plan measure"/' "$measured"
expect 0 "peak_fp32_tflops" "$bin/remesh-measure" --core  # and an older one
expect 0 "a device is a core" grep "^source" "$measured"
expect 0 "best: " "$bin/remesh" plan job.toml --cluster local --gpus 2
rm -r state/remesh/hosts
expect 2 "network.gb_per_s" "$bin/remesh-measure" --core --network 1e-15
expect 1 "" test -e "$measured"  # nothing that cannot be read
XDG_STATE_HOME=/proc/none expect 0 "peak_fp32_tflops" \
  "$bin/remesh-measure" --core  # cannot be kept
expect 2 "'speed' is no knob; there are ranks, tp" \
  "$bin/remesh" tune job.toml --fix speed
expect 2 "--hosts requires --launch" "$bin/remesh" tune job.toml --hosts 2
expect 0 "remesh sample runs/latest" "$bin/remesh" sample --help
expect 2 "tokens" "$bin/remesh" sample --tokens 0
expect 2 "--top-p: must be numbers" "$bin/remesh" sample --temperature nan
expect 2 "--top-p: must be numbers" "$bin/remesh" sample --top-p nan
expect 5 "/nowhere: there is no such file" "$bin/remesh" sample /nowhere
expect 2 "give --text FILE or --choices FILE" "$bin/remesh" eval
expect 0 '{"schema":1,"prompt":"It was","text":' "$bin/remesh" sample "$model" \
  --prompt "It was" --tokens 4 --json
# No octal number.
expect 0 '"tokens":10,' "$bin/remesh" sample "$model" --prompt "It was" \
  --tokens 0010 --ignore-end --json
# Of the second prompt, the same, all but the last token is known.
echo 'Once upon a time there was a dog' >constant.jinja
printf 'a\nb\n' >turns
expect 0 '"prompt_tokens_read":1,' "$bin/remesh" sample "$model" --chat \
  --chat-template constant.jinja --tokens 1 --json <turns
expect 0 '  "schema": 1,
  "tokens": ' "$bin/remesh" eval "$model" --text job.toml --json
gzip -k job.toml
expect 0 "\"bytes\": $(wc -c <job.toml)," \
  "$bin/remesh" eval "$model" --text job.toml.gz --json
# The questions are read before the model.
echo '{"prompt": "It", "choices": ["was", "is"], "answer": 2}' >questions
expect 3 "questions:1: answer: must be from 0 to 1" \
  "$bin/remesh" eval /nowhere --choices questions
expect 0 '"prompt_tokens":1,' "$bin/remesh" sample "$model" --raw --special \
  --prompt "</s>" --tokens 1 --json
expect 0 '  "schema": 1,
  "states": [' "$bin/remesh" clean --dry-run --json
expect 5 "/nowhere: no such folder" "$bin/remesh" clean --state-folder /nowhere
mkdir -p prefix/bin prefix/share
ln "$bin/remesh" prefix/bin/ 2>/dev/null || cp "$bin/remesh" prefix/bin/
expect 5 "share/remesh/clusters" prefix/bin/remesh plan --model llama3-8b $on 8
cp -r "$bin/../share/remesh/." prefix/share/remesh
expect 0 "best: " prefix/bin/remesh plan --model llama3-8b $on 8
expect 5 "data.path: $dir/job.toml is a file, no data set" \
  "$bin/remesh" job check job.toml --set data.path=job.toml
expect 2 "did you mean train.steps" "$bin/remesh" job check job.toml \
  --set train.stpes=7
expect 5 "nothing to resume" "$bin/remesh" run job.toml --resume
expect 5 "not a run directory" "$bin/remesh" run job.toml --resume \
  --run-dir run
expect 5 "to start a run of it: remesh run $dir/job.toml" \
  "$bin/remesh" status .
expect 2 "tcp://HOST:PORT" "$bin/remesh-coordinator" job.toml --bind 5710
expect 5 "no such run" "$bin/remesh" resume none
mkdir lost lost/metrics.jsonl
expect 5 "remesh run JOB --resume --run-dir lost" "$bin/remesh" status lost
expect 2 "--connect is required; see remesh-worker --help" "$bin/remesh-worker"
expect 3 "Is a directory (expected a file; move the folder away)" \
  "$bin/remesh" run job.toml --resume --run-dir lost --local 1 \
  --set elastic.keep_state=false  # whatever room /dev/shm has
expect 2 "give a job file" "$bin/remesh-coordinator"
# A start that fails leaves no run behind.
expect 2 "tcp://HOST:PORT" "$bin/remesh" run job.toml --bind 5710
expect 3 "not a folder; set REMESH_SCRATCH" \
  env REMESH_SCRATCH="$PWD/job.toml" "$bin/remesh" run job.toml --local 1
expect 5 "no run in" "$bin/remesh" status
[ -z "$(ls runs 2>/dev/null)" ] || {
  echo "FAIL: a failed start leaves $(ls runs)"
  failed=1
}
expect 0 "" "$bin/remesh" tokenizer encode --tokenizer bytes --text ""
[ "$out" = "" ] || {
  echo "FAIL: an empty text has tokens: $out"
  failed=1
}
# Where no threads are allowed, this one encodes.
as=""
[ "$(id -u)" -ne 0 ] || as="setpriv --reuid 65534 --clear-groups"
if $as test -x "$bin/remesh-data"; then
  expect 0 "97 98 99" $as prlimit --nproc=1 "$bin/remesh-data" tokenizer \
    encode --tokenizer bytes --text abc
fi
expect 0 "195 169 10" sh -c \
  "printf '\303\251\n' | '$bin/remesh' tokenizer encode --tokenizer bytes"
# What has come is printed before the rest comes.
mkfifo numbers
"$bin/remesh" tokenizer decode --tokenizer bytes < numbers > text &
exec 3> numbers
printf '72 105,3' >&3
tries=0
until [ "$(cat text)" = Hi ] || [ $tries -ge 600 ]; do
  sleep 0.1
  tries=$((tries + 1))
done
[ "$(cat text)" = Hi ] || {
  echo "FAIL: tokenizer decode waits for the end of its input: $(cat text)"
  failed=1
}
printf '3' >&3
exec 3>&-
wait $! || failed=1
[ "$(cat text)" = 'Hi!' ] || {
  echo "FAIL: a number that comes in two parts: $(cat text)"
  failed=1
}
expect 2 "'1e3' is not a token" "$bin/remesh" tokenizer decode \
  --tokenizer bytes --text "1e3 4"
expect 5 "none/t.json: there is no folder none" "$bin/remesh" tokenizer \
  train job.toml --out none/t.json
expect 2 "$dir: is a folder" "$bin/remesh" tokenizer train job.toml \
  --out "$dir" --overwrite
# The text of JSON lines, not their syntax.
for i in 1 2 3 4 5 6 7 8 9; do
  echo '{"zzzz": "qqqq", "text": "to be or not to be"}'
done >lines.jsonl
expect 0 " tokens" "$bin/remesh" tokenizer train lines.jsonl --out t.json \
  --vocab-size 260
if grep -q 'zzzz\|qqqq' t.json; then
  echo "FAIL: the tokenizer has learnt the fields of the JSON lines"
  failed=1
fi
# The example script ends where the job cannot be saved.
if command -v jq >/dev/null; then
  mkdir stub
  cat >stub/remesh <<'END'
#!/bin/sh
case "$1 $2" in
wait*) echo '{"step": 5}' ;;
"checkpoint save") exit 3 ;;
esac
END
  chmod +x stub/remesh
  expect 1 "sweep/base was not saved" env PATH="$PWD/stub:$PATH" \
    "$model/../../examples/sweep.sh" job.toml 5 1e-3
fi
expect 0 "# " "$bin/remesh" job defaults
expect 0 '"steps": 1000' "$bin/remesh" job defaults --json
exit $failed
