#!/usr/bin/env bash
# Checks of form that the compiler does not make. Each is a test of CTest.
#
#   tests/lint.sh format           clang-format accepts every source file
#   tests/lint.sh size             functions <= 70 lines, files <= 500,
#                                  the class Coordinator <= 900
#   tests/lint.sh copies           no block of 8 lines occurs twice
#   tests/lint.sh docs [--write]   pages and comments mention only files that
#                                  exist; tables agree with sources, or are
#                                  written
#   tests/lint.sh commits          subjects since main have <= 72 characters
#   tests/lint.sh tidy BUILD [--all]   clang-tidy accepts the files that are
#                                  not as on main or, on main or far ahead of
#                                  it, as in the commit before; or all files
#
# BUILD is a build tree: clang-tidy reads its compile_commands.json and the
# headers generated from proto/.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
  format)
    find proto parallel checkpoint worker coordinator bench tests \
      \( -name '*.cc' -o -name '*.h' -o -name '*.inc' \) -print0 |
      xargs -0 clang-format-14 --dry-run -Werror ;;
  size|copies|docs|commits|tidy) exec python3 tests/lint.py "$@" ;;
  *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2 ;;
esac
