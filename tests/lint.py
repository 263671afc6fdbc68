"""The checks behind tests/lint.sh; see there for how to run them."""

import concurrent.futures
import fnmatch
import hashlib
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

PRODUCTION = ("proto", "parallel", "checkpoint", "worker", "coordinator")
CHECKED = (*PRODUCTION, "tests", "bench")
TIDY = "clang-tidy-14"
MOST_CHANGED = 100


def sources(*folders):
    return sorted(p for folder in folders
                  for p in pathlib.Path(folder).rglob("*")
                  if p.suffix in (".cc", ".h"))


# ------------------------------------------------------------------- size

MAX_FUNCTION = 70
MAX_FILE = 500
# The reconciler decides nothing that a value could decide (coordinator.h).
MAX_CLASS = {("coordinator/core/coordinator.h",
              "coordinator/core/coordinator.cc",
              "coordinator/core/generation.cc"): 900}


def git(*words):
    """What git prints; "" if it fails."""
    run = subprocess.run(["git", *words], check=False, capture_output=True,
                         text=True)
    return run.stdout.strip() if run.returncode == 0 else ""


def main_base():
    """Where main was left; "" if that is not known."""
    return (git("merge-base", "HEAD", "origin/main") or
            git("merge-base", "HEAD", "main"))


def top_comment(lines):
    return "\n".join(lines[:next(
        (i for i, line in enumerate(lines) if not line.startswith("//")),
        len(lines))])


def comment_above(lines, start):
    i = start
    while i > 0 and lines[i - 1].lstrip().startswith("//"):
        i -= 1
    return "\n".join(lines[i:start])


def check_size():
    """A longer file or function gives its reason in the comment at its top:
    "Over 500 lines because ...", "Over 70 lines because ..."."""
    offences = []
    paths = sources(*PRODUCTION, "bench")
    text = {str(p): p.read_text().splitlines() for p in paths}
    for path, lines in text.items():
        if (len(lines) > MAX_FILE and
                f"Over {MAX_FILE} lines because" not in top_comment(lines)):
            offences.append(f"{path}: {len(lines)} lines")
    for files, limit in MAX_CLASS.items():
        count = sum(len(text[path]) for path in files)
        if count > limit:
            offences.append(f"{', '.join(files)}: {count} lines together, "
                            f"{limit} allowed")
    tags = subprocess.run(
        ["ctags", "--languages=C++", "--c++-kinds=f", "--fields=+ne",
         "-f", "-", *text], check=True, capture_output=True, text=True)
    for tag in tags.stdout.splitlines():
        name, path, *rest = tag.split("\t")
        field = dict(f.split(":", 1) for f in rest if ":" in f)
        if "end" not in field:
            continue
        start, end = int(field["line"]), int(field["end"])
        reason = comment_above(text[path], start - 1)
        if (end - start + 1 > MAX_FUNCTION and
                f"Over {MAX_FUNCTION} lines because" not in reason):
            offences.append(f"{path}:{start}: {name} has "
                            f"{end - start + 1} lines")
    return offences


# ----------------------------------------------------------------- copies

MIN_COPY = 8

# Pairs of files that may share blocks, and why.
STATED_COPIES = {
    ("worker/kernels/cpu/backend.cc", "worker/kernels/reference/backend.cc"):
        "the reference shares no code with what it judges",
}


def meaningful_lines(path):
    """(line number, text) without what repeats by nature: includes, blank
    lines, comments, lone brackets."""
    kept = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        line = line.strip()
        if (line and not line.startswith(("#", "//", "using "))
                and not re.fullmatch(r"[][{}();,]+", line)):
            kept.append((number, line))
    return kept


def check_copies():
    lines = {str(p): meaningful_lines(p) for p in sources(*PRODUCTION)}
    places = {}
    for path, kept in lines.items():
        for i in range(len(kept) - MIN_COPY + 1):
            block = tuple(line for _, line in kept[i:i + MIN_COPY])
            places.setdefault(block, []).append((path, i))
    offences, stated = [], set()
    for found in places.values():
        for (a, i), (b, j) in zip(found, found[1:]):
            if i and j and lines[a][i - 1][1] == lines[b][j - 1][1]:
                continue  # reported at the block's first line
            if tuple(sorted((a, b))) in STATED_COPIES:
                stated.add(tuple(sorted((a, b))))
                continue
            length = 0
            for (_, x), (_, y) in zip(lines[a][i:], lines[b][j:]):
                if x != y:
                    break
                length += 1
            offences.append(f"{b}:{lines[b][j][0]}: {length} lines as in "
                            f"{a}:{lines[a][i][0]}")
    for pair in STATED_COPIES.keys() - stated:
        offences.append(f"tests/lint.py: {' and '.join(pair)} share no block; "
                        "delete the exception")
    return offences


# ------------------------------------------------------------------- docs

MENTIONED = re.compile(
    r"(?<![\w./-])(?:" + "|".join(CHECKED + ("deploy",)) +
    r")/[\w./@-]*[\w/]")
# "state_choice.h", "core/cause.h": the end of a path.
NAMED = re.compile(r"(?<![\w./-])(?:[\w-]+/)*\w{3,}\.(?:h|cc|py|proto)\b")
FOREIGN = {"hdf5.h", "ioprio.h", "mpi.h", "omp.h", "sentencepiece_model.proto",
           "zmq.h"}
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
PROTOCOL = pathlib.Path("proto/PROTOCOL.md")
STRINGS = r'((?:"[^"]*"\s*)+)'
EVENT = re.compile(r'^EVENT\(\s*k\w+,\s*"(\w+)",\s*k\w+,\s*' + STRINGS +
                   r",\s*" + STRINGS + r"\)$", re.M)
MESSAGE = re.compile(r"((?:^    // .*\n)+)^    (\w+) \w+ = \d+", re.M)
EXIT_CODE = re.compile(r"^  kExit\w+ = (\d+),((?:\s*//.*)*)", re.M)


def event_table():
    table = pathlib.Path("proto/rundir/events.inc").read_text()
    rows = ["| event | further fields | meaning |", "|---|---|---|"]
    for name, *texts in EVENT.findall(table):
        fields, meaning = ("".join(re.findall(r'"([^"]*)"', t)) for t in texts)
        names = ",".join(f" `{f}`" for f in fields.split(", ") if f)
        rows.append(f"| `{name}` |{names} | {meaning} |")
    return rows


def exit_code_table():
    header = pathlib.Path("proto/base/exit_code.h").read_text()
    rows = ["| exit code of a rank | meaning, and what follows |", "|---|---|"]
    for code, comment in EXIT_CODE.findall(header):
        text = " ".join(re.sub(r"\s*//\s*", " ", comment).split())
        general, is_rank, rank = text.partition("rank: ")
        if is_rank:
            rank = rank.replace("the same;", general.rstrip("; ") + ";")
            rows.append(f"| {code} | {rank} |")
    return rows


def message_table():
    proto = pathlib.Path("proto/control.proto").read_text()
    rows = ["| message | from | to | content |", "|---|---|---|---|"]
    for comment, name in MESSAGE.findall(proto.partition("oneof body {")[2]):
        text = " ".join(comment.replace("//", " ").split())
        ends, _, content = text.partition(": ")
        rows.append(f"| `{name}` | {ends.replace(' -> ', ' | ')} | {content} |")
    return rows


TABLES = {"proto/control.proto": message_table,
          "proto/rundir/events.inc": event_table,
          "proto/base/exit_code.h": exit_code_table}


def with_tables(page):
    """The page with each table between a line "<!-- from FILE -->" and the next
    blank line made from FILE."""
    for source, table in TABLES.items():
        mark = f"<!-- from {source} -->\n"
        before, found, after = page.partition(mark)
        if not found:
            sys.exit(f"{PROTOCOL}: no line {mark}")
        after = after[after.index("\n\n"):]
        page = before + mark + "\n".join(table()) + after
    return page


# A row of the table of timeouts ends with its files, each followed by the
# constants of the row: | `FILE`: `kName`, `kName`, `FILE` |
CONSTANTS = re.compile(r"`([\w/]+\.\w+)`((?:(?:: |, )`\w+`)*)")
DURATION = re.compile(r"(\d+) (ms|s|min|h)\b")
MS = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000}
RUN_PATH = re.compile(r"^//   RUN/([\w.]+/?)", re.M)


def constant(path, name):
    """(value, whether it is a duration, then in milliseconds); None if the
    file does not define it."""
    found = re.search(
        rf"\b{name}(?: = \d+ \[default = |(?: = |\()(?:std::chrono::(\w+)\()?)"
        r"([\d.'* ]+)", pathlib.Path(path).read_text())
    if not found:
        return None
    value = math.prod(float(f) for f in found[2].replace("'", "").split("*"))
    if found[1] == "seconds" or name.endswith("S"):
        return value * 1000, True
    return value, name.lower().endswith("ms")


def check_timeouts(page):
    """Each row has the values of its constants, and no other durations."""
    offences = []
    table = page.partition("| watched by |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        text, _, where = row.removesuffix(" |").rpartition(" | ")
        found = {f"{path}: {name}": constant(path, name)
                 for path, names in CONSTANTS.findall(where)
                 for name in re.findall(r"\w+", names)}
        limits = {int(n) * MS[unit] for n, unit in DURATION.findall(text)}
        factors = {int(n) for n in re.findall(r"\b(\d+) x\b", text)}
        wrong = [what for what, value in found.items() if value is None
                 or value[0] not in (limits if value[1] else factors)]
        known = {value[0] for value in found.values() if value and value[1]}
        if wrong or limits - known:
            offences.append(f"{PROTOCOL}: timeouts: {row[:60]}...: "
                            f"{', '.join(wrong) or 'a limit has no constant'}")
    return offences


def check_run_paths(page):
    """The lists of a run directory's files have those of paths.h."""
    paths = set(RUN_PATH.findall(
        pathlib.Path("proto/rundir/paths.h").read_text()))
    table = page.partition("## Run directory")[2]
    readme = pathlib.Path("README.md").read_text()
    lists = {PROTOCOL: re.findall(r"`([\w.]+/?)(?:[\w-]+/)?`",
                                  "\n".join(re.findall(r"^\| (`.*?) \|", table,
                                                       re.M))),
             "README.md": re.findall(
                 r"(?:^|  )(\w+/|\w+\.[\w*]+|journal)(?=  )",
                 readme.partition("A run directory contains:")[2]
                 .split("```")[1], re.M)}
    return [f"{page}: run directory: {', '.join(sorted(differing))}"
            for page, names in lists.items()
            if (differing := {n for n in names
                              if not fnmatch.filter(paths, n)} |
                {p for p in paths
                 if not any(fnmatch.fnmatch(p, n) for n in names)})]


def check_exit_help():
    """The help has each exit code but those of ranks."""
    header = pathlib.Path("proto/base/exit_code.h").read_text()
    codes = {code for code, comment in EXIT_CODE.findall(header)
             if not comment.strip().startswith("// rank:")}
    text = header.partition("kExitCodesHelp =")[2].partition('";')[0]
    differing = codes ^ set(re.findall(r"[:;]\s*(?:\\n)?(\d+) ",
                                       re.sub(r'"\s*"', "", text)))
    return [f"proto/base/exit_code.h: kExitCodesHelp: {code}"
            for code in sorted(differing)]


def comments():
    """(path, text) of each comment line."""
    marks = {".cc": "//", ".h": "//", ".inc": "//", ".proto": "//",
             ".py": "#", ".txt": "#"}
    for folder in CHECKED:
        for path in sorted(pathlib.Path(folder).rglob("*")):
            if path.suffix in marks:
                for line in path.read_text().splitlines():
                    yield path, line.partition(marks[path.suffix])[2]


def check_docs():
    """Pages and comments mention files that exist; the tables of PROTOCOL.md
    are made from their sources or agree with them."""
    offences = []
    tracked = subprocess.run(["git", "ls-files", "*.md"], check=False,
                             capture_output=True, text=True).stdout.split()
    pages = [p for p in map(pathlib.Path, tracked) if p.exists()] or [
        *pathlib.Path(".").glob("*.md"),
        *(p for folder in (*CHECKED, "deploy")
          for p in pathlib.Path(folder).rglob("*.md"))]
    for page in pages:
        text = page.read_text()
        names = [(name, pathlib.Path(name)) for name in MENTIONED.findall(text)]
        names += [(name, page.parent / name) for name in LINK.findall(text)]
        offences += [f"{page}: {name} does not exist"
                     for name, path in names if not path.exists()]
    ends = {"/".join(path.parts[i:]) for folder in CHECKED
            for path in pathlib.Path(folder).rglob("*.*")
            for i in range(len(path.parts))} | FOREIGN
    for path, comment in comments():
        offences += [f"{path}: {name} does not exist"
                     for name in MENTIONED.findall(comment)
                     if not mentions_file(name)]
        offences += [f"{path}: there is no {name}"
                     for name in NAMED.findall(comment) if name not in ends]
    page = PROTOCOL.read_text()
    offences += check_timeouts(page) + check_run_paths(page)
    offences += check_exit_help()
    if page != with_tables(page):
        offences.append(f"{PROTOCOL}: a table differs from its source; run "
                        "tests/lint.sh docs --write")
    return offences


def mentions_file(name):
    """Of a comment, where a library may be named without its suffix."""
    path = pathlib.Path(name)
    return path.exists() or path.stem == "NAME" or any(
        path.with_suffix(s).exists() for s in (".h", ".cc", ".py"))


# ---------------------------------------------------------------- commits

MAX_SUBJECT = 72


def check_commits():
    """The subjects of the commits since main."""
    base = main_base()
    subjects = git("log", "--format=%s", f"{base}..HEAD") if base else ""
    return [f"{len(s)} characters, {MAX_SUBJECT} allowed: {s}"
            for s in subjects.splitlines()
            if len(s) > MAX_SUBJECT]


# ------------------------------------------------------------------- tidy

INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)


def fingerprint(path):
    """Changes with the code and with .clang-tidy, not with // comments."""
    code = re.sub(
        r'("(?:\\.|[^"\\\n])*")|//(?![^\n]*NOLINT)[^\n]*',
        lambda m: m[1] or "", path.read_text())
    return hashlib.sha256(
        "\n".join([TIDY, pathlib.Path(".clang-tidy").read_text(),
                   " ".join(code.split())]).encode()).hexdigest()[:16]


def compiled_files(source):
    """The file itself, or those of a unity build."""
    if "/Unity/unity_" not in source:
        return [source]
    return INCLUDE.findall(pathlib.Path(source).read_text())


def unit_of(header, includes):
    """The .cc file by which a header is checked: its own, or else the first
    that includes it, directly or through other headers."""
    own = header[:-2] + ".cc"
    if own in includes:
        return own
    users = {header}
    while True:
        more = {p for p, names in includes.items() if users & names} - users
        units = sorted(p for p in more if p.endswith(".cc"))
        if units:
            return units[0]
        if not more:
            return None
        users |= more


class Tidy:
    """Runs clang-tidy. Several .cc files are checked as one translation unit
    that includes them all: most of the time goes into library headers."""

    FILES_PER_RUN = 8

    def __init__(self, build):
        self.root = pathlib.Path.cwd()
        gcc_headers = subprocess.run(
            ["g++", "-print-file-name=include"], check=True,
            capture_output=True, text=True).stdout.strip()
        self.common = ["-Wno-unknown-warning-option",
                       f"-idirafter{gcc_headers}"]  # for omp.h
        self.paths, self.flags = {}, {}
        database = pathlib.Path(build, "compile_commands.json").read_text()
        entries = [(file, entry["command"]) for entry in json.loads(database)
                   for file in compiled_files(entry["file"])]
        for file, command in entries:
            unit = os.path.relpath(os.path.realpath(file), self.root)
            words = shlex.split(command)
            self.paths[unit] = [w for w in words if w.startswith("-D")]
            for before, word in zip(words, words[1:]):
                if word.startswith("-I"):
                    self.paths[unit] += ["-I" + os.path.realpath(word[2:])]
                if before == "-isystem":
                    self.paths[unit] += [before, word]
            self.flags[unit] = tuple(w for w in words if re.match(
                "-m|-std|-fopenmp", w))

    def groups(self, units):
        """Files with the same flags, a few together; main() alone."""
        groups = {}
        for unit in sorted(units):
            alone = "\nint main(" in (self.root / unit).read_text()
            groups.setdefault((self.flags[unit], alone and unit),
                              []).append(unit)
        return [units[i:i + self.FILES_PER_RUN]
                for units in groups.values()
                for i in range(0, len(units), self.FILES_PER_RUN)]

    def run(self, units):
        """Returns the findings, each beginning with "FILE:LINE:"."""
        with tempfile.NamedTemporaryFile("w", suffix=".cc") as source:
            for unit in units:
                source.write(f'#include "{self.root}/{unit}"\n')
            source.flush()
            paths = dict.fromkeys(
                tuple(words) for unit in units
                for words in pairs_of(self.paths[unit]))
            run = subprocess.run(
                [TIDY, "--quiet", "--checks=-bugprone-suspicious-include",
                 f"--config-file={self.root}/.clang-tidy",
                 f"--header-filter=^{self.root}/({'|'.join(CHECKED)})/",
                 source.name, "--",
                 *(word for words in paths for word in words),
                 *self.flags[units[0]], *self.common],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if run.returncode == 0:
            return []
        if "clang-diagnostic-error" in run.stdout and len(units) > 1:
            # Names may collide in one translation unit.
            half = len(units) // 2
            return self.run(units[:half]) + self.run(units[half:])
        findings = re.findall(
            rf"^{re.escape(str(self.root))}/(\S+:\d+:\d+: error: (?:.*\n)"
            r"(?:(?!/).*\n)*)", run.stdout, re.M)
        return findings or [f"{unit}:0: {TIDY} fails" for unit in units]


def pairs_of(words):
    """The words, "-isystem" together with its argument."""
    i = 0
    while i < len(words):
        n = 2 if words[i] == "-isystem" else 1
        yield words[i:i + n]
        i += n


def changed_files():
    """Files that are not as on main, and those that are not as in the commit
    before; None where git knows no history."""
    def files(*words):
        return set(git(*words).split())
    head, base = git("rev-parse", "HEAD"), main_base()
    if not base:
        return None
    new = files("ls-files", "--others", "--exclude-standard")
    before = git("rev-parse", "-q", "--verify", "HEAD~1") or head
    recent = files("diff", "--name-only", before) | new
    return (recent if base == head
            else files("diff", "--name-only", base) | new), recent


def check_tidy(build, everything=False):
    """Files that passed are not checked again in the same build tree, which
    keeps their fingerprints."""
    passed = pathlib.Path(build, "lint_tidy.txt")
    paths = {str(p): p for p in sources(*CHECKED)}
    includes = {p: set(INCLUDE.findall(path.read_text()))
                for p, path in paths.items()}
    prints = {p: fingerprint(path) for p, path in paths.items()}
    clean = set()
    if passed.exists():
        clean = {line.split()[0] for line in passed.read_text().splitlines()}
    accepted = {p for p in prints if prints[p] in clean}
    changed = changed_files()
    if everything:
        wanted = prints.keys() - accepted
    elif changed is None:
        print("tidy: no history to compare with; --all checks every file")
        wanted = set()
    else:
        wanted, recent = [(prints.keys() & c) - accepted for c in changed]
        if len(wanted) > MOST_CHANGED:  # an hour of work
            print(f"tidy: {len(wanted)} files differ from main, which seems to "
                  "be old: only the last commit is checked")
            wanted = recent
    findings, covered = set(), {}
    cores = int(subprocess.check_output("deploy/cores.sh"))
    for p in wanted:
        unit = p if p.endswith(".cc") else unit_of(p, includes)
        if unit is None:
            findings.add(f"{p}:0: no .cc file includes it")
        else:
            covered.setdefault(unit, set()).add(p)
    tidy = Tidy(build) if covered else None
    groups = tidy.groups(covered) if covered else []
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        for group, found in zip(groups, pool.map(tidy and tidy.run, groups)):
            # Every unit that includes a header reports its findings.
            findings.update(found)
            accepted.update(p for unit in group for p in covered[unit])
            accepted -= {finding.split(":")[0] for finding in findings}
            passed.write_text("".join(
                f"{prints[p]} {p}\n" for p in sorted(accepted)))
    print(f"tidy: {len(covered)} of {sum(p.endswith('.cc') for p in prints)} "
          "units checked")
    return sorted(findings)


def main():
    name, *rest = sys.argv[1:]
    if name == "tidy":
        options = [a for a in rest if a.startswith("--")]
        build, = [a for a in rest if not a.startswith("--")]
        offences = check_tidy(build, "--all" in options)
    elif name == "docs" and rest == ["--write"]:
        PROTOCOL.write_text(with_tables(PROTOCOL.read_text()))
        offences = check_docs()
    else:
        offences = {"size": check_size, "copies": check_copies,
                    "docs": check_docs, "commits": check_commits}[name]()
    print("\n".join(offences or [f"{name}: clean"]))
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
