#!/usr/bin/env python3
"""Removes guards from the cores, one at a time, and shows that tests notice.

Each mutant of mutants.txt is compiled from an edited copy of its files and
linked into a copy of the test program in front of the libraries of the build
folder, so a mutant costs one compilation. It runs in the simulated cluster, and
the table says which invariant it violated and at which seed, or, where no
invariant of a whole cluster depends on the guard, in the test program that `by`
names, and the table says which test failed.

Before, each test program is built and run in the same way without a mutation,
and must pass. A mutant counts as killed only if a test says so: a violated
invariant, a failed test, or a crash of a program that does not crash without it.

Exit code 0: every mutant was killed; 1: one survived; 2: mutants.txt does not
fit the sources (a mutant's text must occur exactly once in its file), or a
program fails without a mutation.
"""
import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIST = ROOT / "tests/sim/mutants.txt"
CONTROL_SEEDS = 1000


@dataclasses.dataclass
class Mutant:
    name: str
    guards: str
    by: str = "cluster_sim"
    quick: bool = False
    edits: list = dataclasses.field(default_factory=list)  # (file, old, new)


def fail(text):
    print(f"mutants.txt: {text}", file=sys.stderr)
    sys.exit(2)


def read_list():
    mutants = []
    path = old = ""
    for line in LIST.read_text().splitlines():
        word, _, rest = line.partition(" ")
        text = rest.replace("\\n", "\n")
        if not line or line.startswith("#"):
            continue
        if word == "mutant":
            head, _, guards = rest.partition(": ")
            name, *marks = head.split()
            mutants.append(Mutant(name, guards, quick="quick" in marks))
            if "by" in marks:
                mutants[-1].by = marks[marks.index("by") + 1]
        elif word == "file":
            path = rest
        elif word == "-":
            old = text
        elif word == "+":
            mutants[-1].edits.append((path, old, text))
        else:
            fail(f"unknown line '{line}'")
    return mutants


def sources(mutant, control=False):
    """path -> text, with all edits of the mutant, or without as a control."""
    texts = {}
    for path, old, new in mutant.edits:
        text = texts.get(path) or (ROOT / path).read_text()
        if text.count(old) != 1:
            fail(f"{mutant.name}: occurs {text.count(old)} times in {path}, "
                 f"expected once: {old}")
        texts[path] = text if control else text.replace(old, new)
    return texts


class Builder:
    def __init__(self, build):
        self.build = build
        commands = json.loads((build / "compile_commands.json").read_text())
        # The checkout may have been reached through a link.
        self.compile = {os.path.realpath(c["file"]): c["command"]
                        for c in commands}
        self.by_object = {first(r" -o (\S+)", c["command"]): c["command"]
                          for c in commands}
        self.links = {}

    def link_command(self, target):
        if target not in self.links:
            lines = subprocess.check_output(
                ["ninja", "-C", self.build, "-t", "commands", target],
                text=True).splitlines()
            self.links[target] = lines[-1]
        return self.links[target]

    def run(self, command):
        return subprocess.run(command, cwd=self.build, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True)

    def compile_in(self, folder, command, output, source=None):
        """Runs it with the files in `folder` before those of the project."""
        words = shlex.split(command)
        if words[0].endswith("ccache"):
            words = words[1:]
        words[words.index("-o") + 1] = output
        if source:
            words[words.index("-c") + 1] = str(source)
        words.insert(1, f"-I{folder}")
        # What a mutation leaves unused is no reason not to build it.
        return self.run([*words, "-O1", "-Wno-error"])

    def that_include(self, header, texts, link):
        """The files that include it, are in a library of the link command and
        not among `texts`."""
        paths = [os.path.relpath(f, ROOT) for f in self.compile]
        found = {p: (ROOT / p).read_text() for p in paths
                 if p not in texts and not p.startswith(("tests", "bench", ".."))
                 and p.endswith(".cc") and (ROOT / p).exists()}
        return {p: text for p, text in found.items()
                if f'#include "{header}"' in text
                and f" {self.library_folder(p)}/lib" in link}

    def library_folder(self, path):
        return first(r" -o (\S+)/CMakeFiles/", self.compile[str(ROOT / path)])

    def program_of(self, mutant, folder, control):
        """Path of the mutant's program, and what the compiler said if none."""
        texts = sources(mutant, control)
        link = self.link_command(mutant.by)
        for path in [p for p in texts if p.endswith(".h")]:
            texts.update(self.that_include(path, texts, link))
        for path, text in texts.items():
            source = folder / path
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text(text)
        program = folder / mutant.by
        objects = []
        for path in [p for p in texts if p.endswith(".cc")]:
            objects.append(str(folder / path) + ".o")
            done = self.compile_in(folder, self.compile[str(ROOT / path)],
                                   objects[-1], folder / path)
            if done.returncode != 0:
                return None, done.stderr
        if any(p.endswith(".h") for p in texts):  # the test's own copies of it
            for i, word in enumerate(set(link.split()) & set(self.by_object)):
                own = str(folder / f"{i}.o")
                done = self.compile_in(folder, self.by_object[word], own)
                if done.returncode != 0:
                    return None, done.stderr
                link = link.replace(f" {word} ", f" {own} ")
        link = link.replace(f"-o bin/{mutant.by}",
                            f"-o {program} {' '.join(objects)}")
        done = self.run(["sh", "-c", link])
        return ((program, "") if done.returncode == 0 else
                (None, done.stdout + done.stderr))


def first(pattern, text):
    found = re.search(pattern, text, re.MULTILINE)
    return found.group(1) if found else ""


def run_mutant(builder, mutant, seeds, limit, control=False):
    """(killed, seed, what happened). A control is killed by any failure."""
    with tempfile.TemporaryDirectory() as folder:
        program, error = builder.program_of(mutant, pathlib.Path(folder),
                                            control)
        if program is None:
            return control, "-", "DOES NOT BUILD: " + first("error: (.*)", error)
        words = [program]
        if mutant.by == "cluster_sim":
            words += ["--known", "tests/sim/known_seeds.txt",
                      "--seeds", str(seeds), "--jobs", "1", "--stop-at", "1"]
        try:
            done = subprocess.run(words, cwd=ROOT, text=True, timeout=limit,
                                  stdin=subprocess.DEVNULL,
                                  capture_output=True, check=False)
        except subprocess.TimeoutExpired:
            return control, "-", f"DID NOT END in {limit} s"
    if done.returncode == 0:
        return False, "-", f"SURVIVED {mutant.by}; guards: {mutant.guards}"
    seed = first(r"^VIOLATED seed (\d+)", done.stdout)
    what = (first(r"^VIOLATED seed \d+, t=\d+ ms: (.*)", done.stdout)
            or first(r"^\[  FAILED  \] (\S+) \(", done.stdout))
    if done.returncode == 1 and what:
        return True, seed or "-", what
    if done.returncode in (-signal.SIGABRT, -signal.SIGSEGV):
        last = first(r"(.*(?:[Cc]heck|Assertion).*)", done.stderr)
        return True, "-", f"(crashed: {last})"
    return control, "-", f"DID NOT RUN: exit code {done.returncode}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", help="mutants to run; default all")
    parser.add_argument("--quick", action="store_true",
                        help="run only those marked quick")
    parser.add_argument("--build", default=ROOT / "build", type=pathlib.Path,
                        help="build folder with the test programs")
    parser.add_argument("--seeds", type=int, default=60000, help="per mutant")
    parser.add_argument("--limit", type=int, default=600,
                        help="seconds per mutant")
    cores = subprocess.check_output([ROOT / "deploy/cores.sh"])
    parser.add_argument("--jobs", type=int, default=int(cores))
    args = parser.parse_args()

    mutants = read_list()
    for mutant in mutants:
        sources(mutant)  # all must apply, also those that do not run
    unknown = set(args.names) - {m.name for m in mutants}
    if unknown:
        fail(f"no mutant '{unknown.pop()}'")
    wanted = [m for m in mutants
              if (not args.names or m.name in args.names)
              and (not args.quick or m.quick)]
    builder = Builder(args.build.resolve())
    controls = {m.by: m for m in reversed(wanted)}
    for program, mutant in controls.items():
        fails, _, what = run_mutant(builder, mutant, CONTROL_SEEDS, args.limit,
                                    control=True)
        if fails:
            fail(f"without a mutation {program} fails: {what}")
    print(f"without a mutation {', '.join(controls)} pass")
    print(f"{'mutant':<28} {'seed':>7}  violated")
    killed = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(run_mutant, builder, m, args.seeds, args.limit)
                   for m in wanted]
        for mutant, future in zip(wanted, futures):
            dead, seed, what = future.result()
            killed += dead
            print(f"{mutant.name:<28} {seed:>7}  {what[:76]}", flush=True)
    print(f"killed {killed} of {len(wanted)}")
    return 0 if killed == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
