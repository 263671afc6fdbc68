// A scenario: commands with the output they must have, as text.
//
//   # A comment belongs to the block below it.
//   worker a slots=2
//   time 500
//   ----
//   500  event mesh ...
//
// A block is its commands, "----" and the expected output up to an empty line
// or the end of the file. Words are separated by blanks; "key=value" gives a
// named argument, and quotes keep blanks together: error="out of memory".
// An ordinary start of a job in one block is one line of its output, and so are
// neighboring lines that differ only in the worker:
//
//   500  g1 runs dp=2 ranks 0:a 1:b
//   700  tell a, b ABORT g1
//
// Written from scratch in the manner of etcd-raft's testdata.
//
// Values, no I/O. Errors name the line.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::scenario {

struct Command {
  int line = 0;  // in the file, from 1
  std::string name;
  std::vector<std::string> words;  // without the name and the named ones
  std::map<std::string, std::string> named;

  bool has(const std::string& w) const;
  std::string word(size_t i) const;  // "" when there are fewer
  // Named arguments; the default when absent.
  std::string text(const std::string& key, const std::string& other) const;
  int64_t number(const std::string& key, int64_t other) const;
  double real(const std::string& key, double other) const;
};

struct Block {
  int line = 0;
  std::string header;  // comments and command lines, as written
  std::vector<Command> commands;
  std::string expected;  // lines, each ending in '\n'
};

Result<std::vector<Block>> parse_scenario(const std::string& text);
// The file with these outputs in place of the expected ones.
std::string rewrite_scenario(const std::vector<Block>& blocks,
                             const std::vector<std::string>& outputs);
// A block's output, with neighboring lines about several workers in one, and an
// ordinary start at its beginning in one. A start is ordinary if all slots are
// there at time 0 and are used.
std::string shortened(const std::string& output);

}  // namespace remesh::scenario
