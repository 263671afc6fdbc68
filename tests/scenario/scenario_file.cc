#include "tests/scenario/scenario_file.h"

#include <fmt/format.h>

#include <cstdlib>
#include <sstream>

namespace remesh::scenario {
namespace {

// Splits at blanks outside quotes, and takes the quotes away.
std::vector<std::string> split_words(const std::string& line) {
  std::vector<std::string> words;
  std::string word;
  bool quoted = false;
  bool any = false;
  for (const char c : line) {
    if (c == '"') {
      quoted = !quoted;
      any = true;
    } else if (c == ' ' && !quoted) {
      if (any) words.push_back(word);
      word.clear();
      any = false;
    } else {
      word += c;
      any = true;
    }
  }
  if (any) words.push_back(word);
  return words;
}

Command parse_command(const std::string& line, int number) {
  Command c{.line = number};
  for (const std::string& word : split_words(line)) {
    const size_t equals = word.find('=');
    if (c.name.empty())
      c.name = word;
    else if (equals == std::string::npos)
      c.words.push_back(word);
    else
      c.named[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return c;
}

}  // namespace

std::string Command::text(const std::string& key,
                          const std::string& other) const {
  const auto it = named.find(key);
  return it == named.end() ? other : it->second;
}

int64_t Command::number(const std::string& key, int64_t other) const {
  const auto it = named.find(key);
  return it == named.end() ? other
                           : std::strtoll(it->second.c_str(), nullptr, 10);
}

double Command::real(const std::string& key, double other) const {
  const auto it = named.find(key);
  return it == named.end() ? other : std::strtod(it->second.c_str(), nullptr);
}

Result<std::vector<Block>> parse_scenario(const std::string& text) {
  std::vector<Block> blocks;
  std::istringstream in(text);
  std::string line;
  Block block;
  bool output = false;
  int number = 0;
  const auto close = [&] {
    if (output) blocks.push_back(std::move(block));
    block = {};
    output = false;
  };
  while (std::getline(in, line)) {
    ++number;
    if (output && line.empty()) {
      close();
    } else if (output) {
      block.expected += line + "\n";
    } else if (line == "----") {
      if (block.commands.empty())
        return invalid_argument(
            fmt::format("line {}: '----' without a command above", number));
      output = true;
    } else {
      if (block.line == 0) block.line = number;
      block.header += line + "\n";
      if (!line.empty() && line[0] != '#')
        block.commands.push_back(parse_command(line, number));
    }
  }
  if (!output && !block.commands.empty())
    return invalid_argument(fmt::format(
        "line {}: the last commands have no '----'", block.commands[0].line));
  const std::string rest = output ? "" : block.header;
  close();
  if (!rest.empty())
    return invalid_argument("the file ends in a comment: put it at a command");
  return blocks;
}

std::string rewrite_scenario(const std::vector<Block>& blocks,
                             const std::vector<std::string>& outputs) {
  std::string text;
  for (size_t i = 0; i < blocks.size(); ++i)
    text += (i == 0 ? "" : "\n") + blocks[i].header + "----\n" + outputs.at(i);
  return text;
}

}  // namespace remesh::scenario
