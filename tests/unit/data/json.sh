#!/bin/sh
# `remesh data` and `remesh tokenizer` with --json: one object on the standard
# output, with the values that the text has; what fails fails as without it.
# json.sh BIN_DIR
set -eu
bin=$1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
python3 - "$bin/remesh" <<'END'
import json
import os
import re
import subprocess
import sys


def run(*command, code=0):
    done = subprocess.run([sys.argv[1], *map(str, command)],
                          stdin=subprocess.DEVNULL, capture_output=True)
    assert done.returncode == code, (command, done)
    return done


def text_of(*command):
    return run(*command).stdout.decode(errors="replace")


def json_of(*command):
    done = run(*command, "--json")
    assert done.stderr == b"", (command, done.stderr)
    out = json.loads(done.stdout)
    assert list(out)[0] == "schema" and out["schema"] == 1, out
    return out


def expect(pattern, text, *values):
    """The groups of the pattern are these values."""
    found = re.search(pattern, text)
    assert found, (pattern, text)
    assert found.groups() == tuple(map(str, values)), (found.groups(), values)


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def prepare(name, *options):
    """The data set made twice; the text is that of the first time."""
    command = ["data", "prepare", "--out", name, *options]
    text = text_of(*command)
    out = json_of(*command)
    assert out["path"] == name and out["up_to_date"], out
    expect(r": (\d+) documents, ", text, out["documents"])
    expect(r"training +(\d+) tokens in (\d+) shard", text,
           out["train_tokens"], out["train_shards"])
    expect(r"validation +(\d+) tokens in (\d+) shard", text,
           out["val_tokens"], out["val_shards"])
    expect(r"tokenizer (\S+), vocabulary (\d+), data_id (\w+)", text,
           out["tokenizer"], out["vocab_size"], out["data_id"])
    return out


# 80 documents of 1 to 20 lines.
write("a.txt", "<|endoftext|>\n".join(
    "".join(f"Der Größe nach {i}.{line}: äöü.\n" for line in range(i // 4 + 1))
    for i in range(80)))
write("chats.jsonl", "".join(
    json.dumps({"messages": [{"role": "user", "content": f"{i} + 1?"},
                             {"role": "assistant", "content": f"{i + 1}!"}]})
    + "\n" for i in range(300)))
write("chat.jinja", "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n"
      "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")

# ---------------------------------------------------------------- tokenizer
train = ["tokenizer", "train", "a.txt", "--vocab-size", 300, "--overwrite",
         "--out", "t.json"]
text, made = text_of(*train), json_of(*train)
expect(r"^(\S+): (\d+) tokens, (\S+)\n$", text, made["path"],
       made["vocab_size"], made["tokenizer"])
os.mkdir("texts")
os.link("a.txt", "texts/b.txt")
for inputs in ("texts", "texts/*"):
    train[2:3], train[-1] = [inputs], "folder.json"
    assert json_of(*train)["tokenizer"] == made["tokenizer"], inputs
words = "Größe nach ☃"
encode = ["tokenizer", "encode", "--tokenizer", "t.json", "--text", words]
ids = json_of(*encode)["ids"]
assert text_of(*encode).split() == [str(i) for i in ids], ids
# The last token ends within a character: JSON has U+FFFD in its place.
for some, want in ((ids, words), (ids[:-1], words[:-1] + "\ufffd")):
    decode = ["tokenizer", "decode", "--tokenizer", "t.json", "--text",
              " ".join(map(str, some))]
    assert text_of(*decode) == want, (some, text_of(*decode))
    assert json_of(*decode)["text"] == want, (some, json_of(*decode))
    assert json_of(*decode)["tokenizer"] == made["tokenizer"]

# --------------------------------------------------------------------- data
web = prepare("web", "a.txt", "--tokenizer", "t.json", "--val-fraction", 0.1)
assert web["vocab_size"] == made["vocab_size"], web
assert web["documents"] == 80 and web["val_tokens"] > 0, web
assert prepare("more", "a.txt", "--tokenizer", "t.json")["train_shards"] == 1
prepare("chats", "chats.jsonl", "--chat", "--chat-template", "chat.jinja",
        "--tokenizer", "t.json")
first = json_of("data", "prepare", "a.txt", "--tokenizer", "t.json",
                "--val-fraction", 0.1, "--out", "again")
assert not first["up_to_date"] and first["data_id"] == web["data_id"], first

mix = ["data", "mix", "web=3", "chats=1", "--out", "mix"]
text, mixed = text_of(*mix), json_of(*mix)
expect(r"mix: (\d+) data sets of (\d+) training", text, len(mixed["members"]),
       mixed["train_tokens"])
for m, share in zip(mixed["members"], (0.75, 0.25)):
    assert m["share"] == share, m
    expect(rf"(\S+) +{100 * share:.1f} % of the sequences, "
           rf"({m['train_tokens']}) training", text, m["name"],
           m["train_tokens"])

for name in ("web", "mix"):
    out = json_of("data", "verify", name)
    expect(r"(\S+): (\d+) training and (\d+) validation",
           text_of("data", "verify", name), out["path"], out["train_tokens"],
           out["val_tokens"])

show = ["data", "show", "web", "--tokenizer", "t.json", "--from", 7,
        "--tokens", 30]
out = json_of(*show)
assert out["first_token"] == 7 and len(out["ids"]) == 30, out
assert out["text"] == text_of(*show), out
assert json_of("tokenizer", "decode", "--tokenizer", "t.json", "--text",
               " ".join(map(str, out["ids"])))["text"] == out["text"]


def marked(parts):
    """The text form of a sequence."""
    out, counted = "", True
    for part in parts:
        if part["counted"] != counted:
            out += "\u27e7" if part["counted"] else "\u27e6"
        counted = part["counted"]
        if part["begins_document"]:
            out += ("" if out.endswith("\n") else "\n") + "--- document ---\n"
        out += part["text"]
    return out if counted else out + "\u27e7"


for name, members in (("web", [None]), ("chats", [None]),
                      ("mix", ["web", "chats"])):
    inspect = ["data", "inspect", name, "--tokenizer", "t.json", "--seq-len",
               64, "--samples", 6]
    text, out = text_of(*inspect), json_of(*inspect)
    expect(r"(\S+): (\d+) documents, .* tokenizer (\S+), vocabulary (\d+)\n",
           text, out["path"], out["documents"], out["tokenizer"],
           out["vocab_size"])
    expect(r"(\d+) training and (\d+) validation tokens, (\S+) bytes", text,
           out["train_tokens"], out["val_tokens"],
           f"{out['bytes_per_token']:.2f}")
    assert [m["name"] for m in out["members"]] == members, out["members"]
    lines = re.findall(r"median (\d+), 90 % at most (\d+), longest (\d+)\n.*"
                       r"counts (\S+) %", text)
    assert lines == [
        (*(str(m["document_tokens"][k]) for k in ("median", "p90", "longest")),
         f"{100 * m['counted_share']:.1f}") for m in out["members"]], text
    sequences = re.findall(r"=== sequence \d+ of train.seed 1: tokens (\d+) to "
                           r"(\d+)(?: of (\S+))? ===\n(.*?)\n(?=\n===|\Z)",
                           text, re.DOTALL)
    assert len(sequences) == len(out["sequences"]) == 6, text
    for got, s in zip(sequences, out["sequences"]):
        assert s["first_token"] == 64 * s["window"], s
        assert got == (str(s["first_token"]), str(s["last_token"]),
                       s["member"] or "", marked(s["parts"])), (got, s)
        assert name != "chats" or not all(p["counted"] for p in s["parts"]), s
    assert any(p["begins_document"] for s in out["sequences"]
               for p in s["parts"]), out

# ----------------------------------------------------------------- failures
with open("web/train-00000.tok", "r+b") as file:
    file.seek(1000)
    byte = file.read(1)
    file.seek(1000)
    file.write(bytes([byte[0] ^ 1]))
for code, command in ((3, ["data", "verify", "web"]),
                      (3, ["data", "verify", "mix"]),
                      (5, ["data", "inspect", "none"]),
                      (2, ["data", "show", "chats"]),
                      (2, ["data", "prepare", "chats.jsonl", "--chat",
                           "--chat-template", "chat.jinja",
                           "--out", "web"]),
                      (2, ["tokenizer", "train", "a.txt", "--out", "t.json"])):
    text, other = run(*command, code=code), run(*command, "--json", code=code)
    assert text.stderr and text.stderr == other.stderr, (text, other)
    assert other.stdout == b"", other
END
