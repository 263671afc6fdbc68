#!/usr/bin/env python3
"""Lists the tests that a run skipped, and what each needs.

usage: tests/skips.py BUILD/test_results

A test skips with the message "needs X" or "needs X: detail", where X is a key of
NEEDS. Exit code 1: a message says something else, or this machine has X, so that
the test could have run.
"""
import collections
import ctypes
import grp
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree


def instructions(*flags):
    """Whether the processor has one of them and oneDNN may use it."""
    allowed = os.environ.get("DNNL_MAX_CPU_ISA", "ALL").upper()
    if allowed not in ("ALL", "DEFAULT") and not re.search("BF16|AMX", allowed):
        return False
    with open("/proc/cpuinfo") as f:
        found = re.search(r"^flags\s*:(.*)$", f.read(), re.M)
    return bool(found and set(flags) & set(found.group(1).split()))


def succeeds(*commands):
    """Whether all commands can be run, each of them as one list of words."""
    return all(
        subprocess.run(c, shell=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL).returncode == 0
        for c in commands)


def can_mount():
    with tempfile.TemporaryDirectory() as folder:
        return succeeds(f"unshare -m mount -t tmpfs tmpfs '{folder}'")


def can_make_networks():
    name = f"remesh-probe-{os.getpid()}"
    try:
        return succeeds(f"ip netns add {name}", f"ip netns exec {name} true")
    finally:
        succeeds(f"ip netns del {name}")


def can_trace():
    child = os.fork()
    if child == 0:  # PTRACE_TRACEME
        os._exit(ctypes.CDLL(None).ptrace(0, 0, None, None) != 0)
    return os.waitpid(child, 0)[1] == 0


def has_named_group():
    """The group that tests/unit/base/sharing_test.cc gives files to."""
    try:
        return grp.getgrgid(os.getegid() + (os.geteuid() == 0))
    except KeyError:
        return False


NEEDS = {
    "amx": lambda: instructions("amx_bf16"),
    "bf16": lambda: instructions("avx512_bf16", "amx_bf16"),
    "mount": can_mount,
    "jq": lambda: succeeds("jq --version"),
    "named_group": has_named_group,
    "netns": can_make_networks,
    "ptrace": can_trace,
    "root": lambda: os.geteuid() == 0,
    # The folder of tests/unit/tokenizer/data/README.md, with all of its files.
    "tokenizers": lambda: False,
}


def skipped(folder):
    """(test, message) of each."""
    for file in sorted(folder.glob("*.xml")):  # of GoogleTest
        for case in ElementTree.parse(file).iter("testcase"):
            for skip in case.iter("skipped"):
                # The first line is the place in the source; a trace may follow.
                message = skip.get("message", "").split("\n", 1)[-1]
                message = message.partition("Google Test trace:")[0].strip()
                yield f"{case.get('classname')}.{case.get('name')}", message
    for case in ElementTree.parse(folder / "ctest.junit").iter("testcase"):
        if case.get("status") in ("notrun", "disabled"):
            lines = case.findtext("system-out", "").strip().split("\n")
            yield case.get("name"), lines[-1]


def main():
    tests = collections.defaultdict(list)
    for test, message in skipped(pathlib.Path(sys.argv[1])):
        tests[message].append(test)
    bad = False
    for message, names in sorted(tests.items()):
        need = re.match(r"needs (\w+)(?:: |$)", message)
        if not need or need.group(1) not in NEEDS:
            verdict, bad = f"; allowed: needs {', '.join(NEEDS)}", True
        elif NEEDS[need.group(1)]():
            verdict, bad = ", which this machine has", True
        else:
            verdict = ""
        print(f"{len(names)} tests: {message}{verdict}")
        print("".join(f"    {name}\n" for name in names), end="")
    print(f"skipped: {sum(map(len, tests.values()))}"
          + (", some of which could have run" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
