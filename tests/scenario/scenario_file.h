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
// What follows from the rest is left out of the output: an ordinary start of a
// generation is its line of the journal and the event, that of a job one line,
// and so are the join of a worker, its start of ranks with its report,
// consecutive steps with an entry of the journal before them, and neighboring
// lines that differ only in the worker. "starts" in place of "runs" is as far
// as the directives to run:
//
//   500    g1 runs dp=2 ranks 0:a 1:b
//   500    c joins g1 (1 slot on host-c)
//   510    metrics steps 1 to 3 g1 until 530, journaled
//   700    tell a, b ABORT g1
//   700    g2 runs dp=1 ranks 0:a from step 0 cordoned=host-b spare=b
//   700    event mesh g2 ...
//
// Written from scratch in the manner of etcd-raft's testdata.
//
// Values, no I/O. Errors name the line.
#pragma once

#include <cstdint>
#include <map>
#include <span>
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

// Lines of an output that are shown as others.
struct Fold {
  std::vector<std::string> text;
  size_t lines = 0;  // 0: none
};

// Shortens the blocks' outputs, in the order of the file. Two outputs that
// differ still do when they are shortened, unless they differ only in how the
// workers joined that a job starts with, or in the event of its first mesh.
class Shortener {
 public:
  std::string shortened(const std::string& output);

 private:
  Fold first_start(std::span<const std::string> lines);
  Fold start(std::span<const std::string> lines) const;
  void remember(const std::string& line);

  std::map<std::string, std::string> reports_;  // the last of each worker
};

}  // namespace remesh::scenario
