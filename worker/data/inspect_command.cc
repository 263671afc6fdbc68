// `remesh data inspect`: what a data set has, and sequences of it as training
// sees them.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "proto/base/text.h"
#include "proto/data/index.h"
#include "worker/data/commands.h"
#include "worker/data/dataset.h"
#include "worker/data/sampler.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::data {
namespace {

struct Options {
  std::string dir, tokenizer;
  int64_t seq_len = 256;
  int64_t samples = 2;
  uint64_t seed = 1;
  bool color = false;
};

// How long the documents of a split are, and what the loss counts.
struct Counts {
  int64_t tokens = 0, targets = 0;
  std::vector<int64_t> lengths;  // of the documents, as far as they are read
};

Result<Counts> count(const Split& split) {
  constexpr int64_t kLength = 1024;
  Counts out;
  const int64_t windows = num_windows(split.num_tokens(), kLength);
  std::vector<int32_t> input(kLength), target(kLength);
  std::vector<int64_t> starts;
  int64_t began = 0;
  const auto end_at = [&](int64_t token) {
    if (token > began) out.lengths.push_back(token - began);
    began = token;
  };
  for (int64_t w = 0; w < windows; ++w) {
    RETURN_IF_ERROR(split.read_window(w, kLength, input, target, &starts));
    for (const int64_t start : starts) end_at(w * kLength + start);
    out.tokens += kLength;
    out.targets += kLength - std::count(target.begin(), target.end(), -1);
  }
  end_at(windows * kLength);
  std::sort(out.lengths.begin(), out.lengths.end());
  return out;
}

Status print_member(const Member& member, bool named) {
  ASSIGN_OR_RETURN(const Counts c, count(member.train));
  if (c.lengths.empty()) return ok_status();
  if (named)
    fmt::print("  {} (weight {}): {} training and {} validation tokens\n",
               member.name, member.weight, member.train.num_tokens(),
               member.val.num_tokens());
  const auto at = [&](double share) {
    return c.lengths[static_cast<size_t>(
        share * static_cast<double>(c.lengths.size() - 1))];
  };
  fmt::print(
      "  tokens of a training document: median {}, 90 % at most {}, longest "
      "{}\n  the loss counts {:.1f} % of the training tokens\n",
      at(0.5), at(0.9), c.lengths.back(),
      100 * static_cast<double>(c.targets) / static_cast<double>(c.tokens));
  return ok_status();
}

Status print_statistics(const Index& index, const Dataset& set) {
  fmt::print("{}: {}, {} of text, tokenizer {}, vocabulary {}\n", set.dir(),
             plural(index.documents, "document"),
             format_bytes(index.text_bytes), set.tokenizer(), set.vocab_size());
  const int64_t all = index.train_tokens() + index.val_tokens();
  fmt::print("  {} training and {} validation tokens, {:.2f} bytes a token\n",
             index.train_tokens(), index.val_tokens(),
             static_cast<double>(index.text_bytes) / static_cast<double>(all));
  for (const Member& member : set.members())
    RETURN_IF_ERROR(print_member(member, set.is_mixture()));
  return ok_status();
}

// A sequence as text, in which a document begins on a line of its own and what
// the loss does not count is dim or, without colors, between marks.
Status print_sequence(const Options& o, const tokenizer::Tokenizer& tokenizer,
                      std::span<const int32_t> target,
                      const std::vector<int64_t>& starts,
                      std::span<const int32_t> input) {
  const auto [dim, plain] =
      o.color ? std::pair{"\033[2m", "\033[0m"} : std::pair{"\u27e6", "\u27e7"};
  std::string out;
  tokenizer::TextStream text(tokenizer);
  bool counted = true;
  size_t next = 0;
  for (size_t i = 0; i < input.size(); ++i) {
    // What predicts the token is the position before; nothing is known of the
    // first one's.
    const bool counts = i == 0 ? target[0] >= 0 : target[i - 1] >= 0;
    const bool begins =
        next < starts.size() && starts[next] == static_cast<int64_t>(i);
    if (counts != counted || begins) {
      text.finish(out);
      if (counts != counted) out += counts ? plain : dim;
      counted = counts;
    }
    if (begins) {
      if (!out.ends_with('\n')) out += '\n';
      out += "--- document ---\n";
      ++next;
    }
    RETURN_IF_ERROR(text.add(input[i], out));
  }
  text.finish(out);
  if (!counted) out += plain;
  fmt::print("{}\n", out);
  return ok_status();
}

Status inspect(const Options& o) {
  ASSIGN_OR_RETURN(const Dataset set, Dataset::open(o.dir));
  ASSIGN_OR_RETURN(const Index index, read_index(o.dir));
  RETURN_IF_ERROR(print_statistics(index, set));
  ASSIGN_OR_RETURN(const auto tokenizer,
                   tokenizer::open_tokenizer(
                       o.tokenizer.empty() ? set.tokenizer() : o.tokenizer));
  if (tokenizer->id() != set.tokenizer())
    return invalid_argument(fmt::format(
        "{}: the tokens are those of '{}', not of --tokenizer {} ('{}')", o.dir,
        set.tokenizer(), o.tokenizer, tokenizer->id()));
  std::vector<Sampler::Source> sources;
  for (const Member& m : set.members())
    sources.push_back({m.train.num_tokens(), m.weight});
  ASSIGN_OR_RETURN(const Sampler sampler,
                   Sampler::make(o.seed, sources, o.seq_len,
                                 /*global_batch=*/1));
  const auto length = static_cast<size_t>(o.seq_len);
  std::vector<int32_t> input(length), target(length);
  std::vector<int64_t> starts;
  for (int64_t i = 0; i < o.samples; ++i) {
    const Sampler::Sequence s = sampler.at(i, 0);
    const Member& member = set.members()[s.source];
    RETURN_IF_ERROR(
        member.train.read_window(s.window, o.seq_len, input, target, &starts));
    fmt::print("\n=== sequence {} of train.seed {}: tokens {} to {}{} ===\n", i,
               o.seed, s.window * o.seq_len, (s.window + 1) * o.seq_len - 1,
               set.is_mixture() ? " of " + member.name : "");
    RETURN_IF_ERROR(print_sequence(o, *tokenizer, target, starts, input));
  }
  return ok_status();
}

}  // namespace

void add_inspect(CLI::App& app, int* code) {
  auto o = std::make_shared<Options>();
  CLI::App* c = app.add_subcommand(
      "inspect", "Print statistics, and sequences as training sees them");
  c->add_option("DIR", o->dir, "Folder of the data set")->required();
  c->add_option(
      "--tokenizer", o->tokenizer,
      "The one that the data set was made with; not needed for bytes");
  c->add_option("--seq-len", o->seq_len, "Tokens per sequence")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  c->add_option("--samples", o->samples, "Sequences, the first of training")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  c->add_option("--seed", o->seed, "train.seed")->capture_default_str();
  c->footer(
      "\nExample:\n  remesh data inspect data/chats --tokenizer "
      "tokenizer.json\n\nText that the loss does not count is dim, or between "
      "\u27e6 and \u27e7.");
  c->callback([&app, o, code] {
    o->color = ::isatty(STDOUT_FILENO) == 1 && getenv("NO_COLOR") == nullptr;
    const Status status = inspect(*o);
    *code = status.ok() ? 0 : fail(app, status);
  });
}

}  // namespace remesh::data
