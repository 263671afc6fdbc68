#!/bin/bash
# The verbs that a user needs after a run, and settings that show in its files.
# verbs.sh BIN_DIR
set -u
bin=$(realpath "$1")
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
cd "$dir" || exit 1
export XDG_STATE_HOME="$dir/state" REMESH_SCRATCH="$dir/scratch" PATH="$bin:$PATH"
failed=0

# expect CODE TEXT COMMAND...: exit code, and TEXT somewhere in the output.
expect() {
  local code=$1 text=$2 got
  shift 2
  out=$(timeout 600 "$@" 2>&1 </dev/null)
  got=$?
  [ $got -eq "$code" ] && [[ $out == *"$text"* ]] && return
  echo "FAIL: $*: exit code $got, not $code, or no \"$text\" in: $out"
  failed=1
}
# same WHAT EXPECTED ACTUAL
same() {
  [ "$2" = "$3" ] || { echo "FAIL: $1: $3, not $2" && failed=1; }
}
steps() { (cd "$1/checkpoints" && echo step-*) | sed 's/step-0*//g'; }
losses() { sed -E 's/.*"loss":([^,]*),.*/\1/' "$1/metrics.jsonl"; }

seq 4000 >text
expect 0 "" remesh data prepare --input text --tokenizer bytes --out data
cat >job.toml <<'END'
[job]
name = "verbs"
[data]
path = "data"
[model]
flavor = "tiny"
[train]
steps = 2
seq_len = 32
global_batch_size = 4
local_batch_size = 2
z_loss = 1e-2
[checkpoint]
interval = 0
keep_latest_k = 2
keep_every_n = 4
[parallel]
zero_stage = 2
zero_shard_group = 1
[profile]
enable = true
first_step = 1
num_steps = 2
END
expect 0 "" remesh job check job.toml --here --local 2
expect 0 "" remesh run job.toml --local 2 --run-dir run
for n in 4 6 8; do
  expect 0 "" remesh resume run --local 2 --set train.steps=$n
done
same "checkpoints: two newest and each fourth" "4 6 8" "$(steps run)"

expect 0 "" remesh trace run --output trace.json --json
python3 - trace.json <<'END' || failed=1
import json, sys
events = json.load(open(sys.argv[1]))["traceEvents"]
spans = [e for e in events if e.get("ph") == "X"]
assert len({e["pid"] for e in spans}) == 2, "two ranks"
assert len(spans) > 20, len(spans)
END

expect 0 '"step": 6' remesh checkpoint inspect run --step 6 --json
expect 2 "is one checkpoint, not a run" remesh checkpoint inspect \
  run/checkpoints/step-00000006 --step 4
expect 2 "--step: Value -3 not in range" remesh checkpoint keep run --step -3
expect 2 "without control characters" remesh checkpoint keep run --step 6 \
  --name $'best\nof all'
expect 0 "" remesh checkpoint keep run --step 6 --name best
expect 0 best remesh checkpoint list run
expect 0 "nothing to remove" remesh checkpoint prune run --keep 1
expect 0 "" remesh checkpoint keep run --step 6 --undo
expect 0 "would remove" remesh checkpoint prune run --keep 1 --dry-run
same "after --dry-run" "4 6 8" "$(steps run)"
expect 0 "removed" remesh checkpoint prune run --keep 1
same "after prune" "4 8" "$(steps run)"
mv run/logs run/old
touch run/logs
expect 3 "cannot create: " remesh checkpoint prune run
[[ $out != *"While it trains"* ]] || { echo "FAIL: $out" && failed=1; }
rm -f run/logs
mv run/old run/logs

expect 0 "" remesh fork run --out fork --set train.steps=9
cp -r run/checkpoints/step-00000004 fork/checkpoints
expect 0 "4  not usable: belongs to another run" remesh checkpoint list fork
mv fork/checkpoints/step-0000000{8,9}
expect 3 "NOT USABLE" remesh checkpoint verify fork
[[ $out == *" of 2 checkpoints can be used"* ]] ||
  { echo "FAIL: $out" && failed=1; }

expect 0 "" remesh model export run --out model --dtype fp32
expect 0 "" remesh model import model --out imported
expect 0 "" remesh model export imported --out again --dtype fp32 --like model
cmp model/*.safetensors again/*.safetensors || failed=1

expect 2 "NAME: must be 1 to 64 letters" remesh key new viewer ../anna run
expect 0 "" remesh key new viewer anna run
expect 0 anna remesh key list run
public=$(sed -n 's/^public *= *"\(.*\)"/\1/p' run/keys/anna.key)
expect 0 "" remesh key revoke anna run
expect 0 "" remesh key allow viewer anna "$public" run
expect 0 anna remesh key list run --json
# Whoever has stolen a key has it although another one replaces it.
expect 0 "" remesh key rotate anna run
expect 0 anna-old remesh key list run
expect 0 "" remesh key revoke anna run
same "keys of anna" "" "$(remesh key list run | grep anna)"
expect 2 "choose another" remesh key new viewer coordinator run --out c.key

remesh-coordinator job.toml --run-dir shared --make-keys --group "$(id -gn)" \
  >shared.out 2>&1 </dev/null &
for ((i = 0; i < 600; ++i)); do
  [ -e shared/coordinator.addr ] || ! kill -0 $! 2>/dev/null || sleep 0.1
done
expect 0 "" remesh status shared
kill $! || cat shared.out
wait $! 2>/dev/null

# On a terminal of 40 columns.
python3 - <<'END' || failed=1
import fcntl, os, pty, struct, sys, termios

def on_terminal(*command):
    pid, terminal = pty.fork()
    if pid == 0:
        size = struct.pack("HHHH", 24, 40, 0, 0)
        fcntl.ioctl(1, termios.TIOCSWINSZ, size)
        os.environ["TERM"] = "xterm"
        os.execvp(command[0], command)
    text = b""
    try:
        while part := os.read(terminal, 4096):
            text += part
    except OSError:  # the end
        pass
    os.waitpid(pid, 0)
    return text.decode()

for command, word in ("ls", "done"), ("plan job.toml", "predicted memory"):
    text = on_terminal("remesh", *command.split())
    if word not in text or max(map(len, text.splitlines())) > 40:
        sys.exit(f"FAIL: remesh {command} on 40 columns:\n{text}")
END

expect 0 "done at step 8" remesh status run
sed -i.written 's/^steps = 8$/steps = 800/' run/job.toml
expect 0 "step 8 of 8 (100%)" remesh status run
echo '[' >>run/job.toml
expect 0 "step 8 of 8 (100%)" remesh status run
mv run/job.toml.written run/job.toml
expect 0 "" remesh clean --dry-run

# Each of these settings changes the losses of the same data.
number=0
for set in train.z_loss=0 data.document_mask=false model.rope_scaling_factor=8; do
  number=$((number + 1))
  expect 0 "" remesh run job.toml --local 1 --run-dir "other-$number" \
    --set train.steps=3 --set profile.enable=false --set "$set"
  [ "$(losses run | head -n 3)" != "$(losses "other-$number")" ] || {
    echo "FAIL: $set changes nothing"
    failed=1
  }
done
exit $failed
