#include "tests/scenario/scenario_file.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <cstdlib>
#include <regex>
#include <sstream>
#include <string_view>

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

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Patterns of fnmatch(3) for lines that follow each other, once or, if they
// are about one worker, once for each worker.
using Lines = std::vector<std::string>;

const std::vector<Lines>& waiting_lines() {
  static const std::vector<Lines> kLines = {
      {"journal waiting g0"},
      {"event coordinator_started g0"},
      {"event waiting g0 (too few slots: 0 offered (no workers), needs "
       "1 (elastic.min_slots))"},
      {"* is IDLE g0", "event worker_joined g0 worker=* (*)",
       "tell * IDLE g0"}};
  return kLines;
}

// The number of lines, all of one time, that match; 0 if one is missing.
size_t count_matching(std::span<const std::string> lines,
                      const std::vector<Lines>& patterns) {
  if (lines.empty()) return 0;
  const std::string time =
      lines[0].substr(0, lines[0].find_first_not_of(' ', lines[0].find(' ')));
  size_t n = 0;
  for (const Lines& group : patterns) {
    const size_t first = n;
    for (; n < lines.size(); ++n) {
      const std::string pattern = time + group[(n - first) % group.size()];
      if (fnmatch(pattern.c_str(), lines[n].c_str(), 0) != 0) break;
    }
    if (n == first || (n - first) % group.size() != 0) return 0;
  }
  return n;
}

// A line about one worker in three parts: "500    tell ", "a", " RUN g1". A
// line about anything else has an empty name.
struct WorkerLine {
  std::string before;
  std::string name;
  std::string after;
};

WorkerLine worker_line(const std::string& line) {
  constexpr std::string_view kTell = "tell ";
  size_t name = line.find_first_not_of(' ', line.find(' '));
  if (name == std::string::npos) return {};
  const bool told = line.compare(name, kTell.size(), kTell) == 0;
  if (told) name += kTell.size();
  const size_t end = line.find(' ', name);
  if (end == std::string::npos) return {};
  const std::string after = line.substr(end);
  const bool tells = after.starts_with(" is ") || after.starts_with(" asks ") ||
                     after.starts_with(" kills ") ||
                     after.starts_with(" logs ") ||
                     after.starts_with(" exits ");
  if (!told && !tells) return {};
  return {line.substr(0, name), line.substr(name, end - name), after};
}

// One line for neighbors that differ only in the worker: "500    tell a, b
// RUN g1".
std::string merge_workers(std::span<const std::string> lines) {
  std::string text;
  WorkerLine last;
  for (const std::string& line : lines) {
    const WorkerLine next = worker_line(line);
    if (!next.name.empty() && next.before == last.before &&
        next.after == last.after) {
      text.insert(text.size() - last.after.size() - 1, ", " + next.name);
    } else {
      text += line + "\n";
      last = next;
    }
  }
  return text;
}

// The metrics of consecutive steps, of one time or 10 ms apart as `step` lets
// them pass, with the entry of the journal that the first one may cause.
Fold finished_steps(std::span<const std::string> lines) {
  static const std::regex kMetrics(R"((\d+) +metrics step (\d+) (g\d+))");
  std::smatch m;
  const bool journaled =
      lines.size() > 1 && std::regex_match(lines[1], m, kMetrics) &&
      lines[0] == fmt::format("{:<6} journal running {}", m.str(1), m.str(3));
  if (!journaled && !std::regex_match(lines[0], m, kMetrics)) return {};
  const auto metrics = lines.subspan(journaled ? 1 : 0);
  const int64_t time = std::stoll(m[1]);
  const int64_t step = std::stoll(m[2]);
  const auto text = [&](const std::string& steps, const std::string& until) {
    return fmt::format("{:<6} metrics {} {}{}{}", time, steps, m.str(3), until,
                       journaled ? ", journaled" : "");
  };
  for (const int64_t apart : {0, 10}) {
    int64_t n = 0;
    while (n < std::ssize(metrics) &&
           metrics[n] == fmt::format("{:<6} metrics step {} {}",
                                     time + n * apart, step + n, m.str(3)))
      ++n;
    if (n < 2) continue;
    return {
        .text = {text(
            fmt::format("steps {} to {}", step, step + n - 1),
            apart > 0 ? fmt::format(" until {}", time + (n - 1) * apart) : "")},
        .lines = static_cast<size_t>(n) + (journaled ? 1 : 0)};
  }
  if (!journaled) return {};
  return {.text = {text(fmt::format("step {}", step), "")}, .lines = 2};
}

// A worker starts its ranks and says so.
Fold ranks_started(std::span<const std::string> lines) {
  static const std::regex kStarts(R"((\d+ +\S+) starts (ranks .*) of (g\d+))");
  std::smatch m;
  if (lines.size() < 2 || !std::regex_match(lines[0], m, kStarts) ||
      lines[1] != m.str(1) + " is RUNNING " + m.str(3))
    return {};
  return {.text = {m.str(1) + " runs " + m.str(2) + " of " + m.str(3)},
          .lines = 2};
}

bool begin_with(std::span<const std::string> lines,
                const std::vector<std::string>& expected) {
  return lines.size() >= expected.size() &&
         std::equal(expected.begin(), expected.end(), lines.begin());
}

// A worker starts, becomes a member, and learns of the generation.
Fold joined(std::span<const std::string> lines) {
  static const std::regex kJoined(
      R"((\d+ +)event worker_joined (g\d+) worker=(\S+) (\(.*\)))");
  std::smatch m;
  if (lines.size() < 2 || !std::regex_match(lines[1], m, kJoined)) return {};
  const std::string time = m[1];
  const std::string g = m[2];
  const std::string w = m[3];
  std::vector<std::string> expected = {time + w + " is IDLE g0", lines[1],
                                       time + "tell " + w + " IDLE " + g};
  if (g != "g0") expected.push_back(time + w + " is IDLE " + g);
  if (!begin_with(lines, expected)) return {};
  return {.text = {time + w + " joins " + g + " " + m.str(4)},
          .lines = expected.size()};
}

}  // namespace

bool Command::has(const std::string& w) const {
  return std::find(words.begin(), words.end(), w) != words.end();
}

std::string Command::word(size_t i) const {
  return i < words.size() ? words[i] : "";
}

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

// Workers prepare at one time, as the journal and their last reports let
// expect, and are told to run. What follows is shown unless their ranks start
// and connect at that time.
Fold Shortener::start(std::span<const std::string> lines) const {
  static const std::regex kPreparing(
      R"((\d+ +)journal preparing (g\d+)( .*? ranks (.*?) from step \d+)"
      R"((?: in memory)?)(.*))");
  std::smatch m;
  if (lines.size() < 2 || !std::regex_match(lines[0], m, kPreparing)) return {};
  const std::string time = m[1];
  const std::string g = m[2];
  if (!lines[1].starts_with(time + "event mesh ")) return {};
  std::map<std::string, std::string> ranks;  // of each worker, none of spares
  std::istringstream places(m.str(4));
  for (std::string p; places >> p;)
    ranks[p.substr(p.find(':') + 1)] += " " + p.substr(0, p.find(':'));
  const auto rest = lines.subspan(2);
  for (const std::string& line : rest) {
    const WorkerLine w = worker_line(line);
    if (w.before != time + "tell " || w.after != " PREPARE " + g) break;
    ranks.try_emplace(w.name);
  }
  std::string prepare, idle, prepared, run, started, spares;
  for (const auto& [w, numbers] : ranks) {
    if (!reports_.contains(w)) return {};
    const std::string& last = reports_.at(w);  // " is QUIESCED g1 holds g1:2"
    const std::string of = last.substr(last.find(" g"));
    const std::string holds = of.substr(std::min(of.size(), of.find(' ', 1)));
    prepare += fmt::format("{}tell {} PREPARE {}\n", time, w, g);
    if (!last.starts_with(" is IDLE"))
      idle += fmt::format("{}{} is IDLE{}\n", time, w, of);
    prepared += fmt::format("{}{} is PREPARED {}{}\n", time, w, g, holds);
    run += fmt::format("{}tell {} RUN {}\n", time, w, g);
    if (numbers.empty()) spares += " spare=" + w;
    started +=
        numbers.empty()
            ? fmt::format("{}{} is QUIESCED {}{}\n", time, w, g, holds)
            : fmt::format(
                  "{0}{1} starts ranks{2} of {3}\n{0}{1} is RUNNING {3}\n",
                  time, w, numbers, g);
  }
  const std::vector<std::string> told =
      split_lines(fmt::format("{}{}{}{}journal running {}{}\n{}", prepare, idle,
                              prepared, time, g, m.str(5), run));
  if (!begin_with(rest, told)) return {};
  const std::vector<std::string> connected = split_lines(
      fmt::format("{}{}ranks of {} are connected\n", started, time, g));
  const bool runs = begin_with(rest.subspan(told.size()), connected);
  return {.text = {time + g + (runs ? " runs" : " starts") + m.str(3) +
                       m.str(5) + spares,
                   lines[1]},
          .lines = 2 + told.size() + (runs ? connected.size() : 0)};
}

// The start of a job that has all its slots at time 0 and uses all of them.
Fold Shortener::first_start(std::span<const std::string> lines) {
  const size_t waiting = count_matching(lines, waiting_lines());
  for (const std::string& line : lines.first(waiting)) remember(line);
  const auto rest = lines.subspan(waiting);
  const Fold fold = waiting > 0 ? start(rest) : Fold();
  const std::string from = " from step 0";
  // No match if it ends in "spares (REASON); start of the job)".
  const char* mesh =
      "* event mesh g1 source=\"initial weights\" (*[!)]; start of the job)";
  if (fold.lines == 0 || !fold.text[0].ends_with(from) ||
      fnmatch(mesh, fold.text[1].c_str(), 0) != 0)
    return {};
  return {.text = {fold.text[0].substr(0, fold.text[0].size() - from.size())},
          .lines = waiting + fold.lines};
}

void Shortener::remember(const std::string& line) {
  const WorkerLine w = worker_line(line);
  if (w.after.starts_with(" is ")) reports_[w.name] = w.after;
}

std::string Shortener::shortened(const std::string& output) {
  const std::vector<std::string> lines = split_lines(output);
  std::vector<std::string> text;
  for (auto rest = std::span(lines); !rest.empty();) {
    Fold fold = text.empty() ? first_start(rest) : Fold();
    if (fold.lines == 0) fold = start(rest);
    if (fold.lines == 0) fold = joined(rest);
    if (fold.lines == 0) fold = ranks_started(rest);
    if (fold.lines == 0) fold = finished_steps(rest);
    if (fold.lines == 0) fold = {.text = {rest[0]}, .lines = 1};
    text.insert(text.end(), fold.text.begin(), fold.text.end());
    for (const std::string& line : rest.first(fold.lines)) remember(line);
    rest = rest.subspan(fold.lines);
  }
  return merge_workers(text);
}

}  // namespace remesh::scenario
