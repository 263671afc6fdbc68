#!/bin/sh
# `remesh data mix` and `inspect`: sequences of every member, each under its
# name, and a damaged member is named.
# mixture.sh BIN_DIR
set -eu
bin=$1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
for letter in a b; do
  i=0
  while [ $i -lt 4000 ]; do
    printf '%s' "$letter"
    i=$((i + 1))
  done > $letter.txt
  "$bin/remesh" data prepare --input $letter.txt \
    --val-fraction 0 --out set-$letter > log
done
# The tokens of a member are not replaced by the mixture.
if "$bin/remesh" data mix set-a=1 set-b=2 --out set-a --overwrite > log 2>&1 ||
  ! grep -q 'set-a: is the member set-a' log || ! [ -s set-a/train-00000.tok ]
then
  echo "FAIL: a mixture in the folder of a member:"
  cat log
  exit 1
fi
"$bin/remesh" data mix set-a=1 set-b=2 --out mix > log
"$bin/remesh" data inspect mix --samples 12 --seq-len 64 > log
for letter in a b; do
  # The line after the heading of each of its sequences is its text.
  texts=$(sed -n "/^=== .* of set-$letter ===\$/{n;p;}" log | sort -u)
  case $texts in
  *[!$letter]* | "")
    echo "FAIL: sequences of set-$letter are not its text: '$texts'"
    cat log
    exit 1
    ;;
  esac
done
# set-a has no held-out text.
cat a.txt b.txt > c.txt
"$bin/remesh" data prepare c.txt --val-fraction 0.1 --out set-c > log
"$bin/remesh" data mix set-a=1 set-c=1 --out half > log
printf '[data]\npath = "half"\n[train]\nseq_len = 64\n' > half.toml
"$bin/remesh" job check half.toml --here > log 2>&1 || true
if ! grep -q 'note: *the validation loss leaves out set-a, whose held-out' log
then
  echo "FAIL: nothing says that set-a is not validated:"
  cat log
  exit 1
fi
# All of it is held out.
"$bin/remesh" data prepare c.txt --val-fraction 1 --out set-d > log
"$bin/remesh" data mix set-a=1 set-d=0 --out validated > log
grep -q 'set-d  *for validation only, [0-9]* tokens' log
"$bin/remesh" data inspect validated > log
grep -q 'set-d (weight 0): 0 training and' log
"$bin/remesh" data inspect set-d > log
sed s/half/validated/ half.toml > validated.toml
"$bin/remesh" job check validated.toml > log
sed s/half/set-d/ half.toml > set-d.toml
if "$bin/remesh" job check set-d.toml > log 2>&1 ||
  ! grep -q 'has text for validation only; mix it' log
then
  echo "FAIL: a job that would train on nothing:"
  cat log
  exit 1
fi
# The index could not name it.
name=$(printf 'set-\377')
cp -r set-a "$name"
if "$bin/remesh" data mix "$name=1" --out unnamed > log 2>&1 ||
  ! grep -aq 'the name of the folder must be UTF-8' log || [ -e unnamed ]
then
  echo "FAIL: a mixture of a folder whose name is not UTF-8:"
  cat log
  exit 1
fi
rm set-b/train-00000.tok
printf '[data]\npath = "mix"\n[train]\nsteps = 5\n' > job.toml
if "$bin/remesh" job check job.toml > log 2>&1 ||
  ! grep -q 'set-b/train-00000.tok.* restore that data set, of which mix ' log
then
  echo "FAIL: a mixture without a file of a member:"
  cat log
  exit 1
fi
