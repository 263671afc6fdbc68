// `remesh data inspect`: what a data set has, and sequences of it as training
// sees them.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "proto/base/progress_bar.h"
#include "proto/base/text.h"
#include "proto/data/index.h"
#include "worker/data/commands.h"
#include "worker/data/dataset.h"
#include "worker/data/sampler.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::data {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string dir, tokenizer;
  int64_t seq_len = 256;
  int64_t samples = 2;
  uint64_t seed = 1;
  bool color = false;
  bool json = false;
};

// How long the documents of a split are, and what the loss counts.
struct Counts {
  int64_t tokens = 0, targets = 0;
  std::vector<int64_t> lengths;  // of the documents, as far as they are read

  // The length that this share of the documents has at most.
  int64_t length_at(double share) const {
    return lengths[static_cast<size_t>(
        share * static_cast<double>(lengths.size() - 1))];
  }
  double counted_share() const {
    return static_cast<double>(targets) / static_cast<double>(tokens);
  }
};

// `tick`: tokens so far.
Result<Counts> count(const Split& split,
                     const std::function<void(int64_t)>& tick) {
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
    ASSIGN_OR_RETURN(const bool begins, split.begins_document(w * kLength));
    if (begins) end_at(w * kLength);
    for (const int64_t start : starts) end_at(w * kLength + start);
    out.tokens += kLength;
    out.targets += kLength - std::count(target.begin(), target.end(), -1);
    tick(out.tokens);
  }
  end_at(windows * kLength);
  std::sort(out.lengths.begin(), out.lengths.end());
  return out;
}

Result<std::vector<Counts>> count_members(const Dataset& set) {
  int64_t done = 0, all = 0;
  for (const Member& m : set.members()) all += m.train.num_tokens();
  ProgressBar bar("counting", "token");
  std::vector<Counts> out;
  for (const Member& m : set.members()) {
    ASSIGN_OR_RETURN(Counts c, count(m.train, [&](int64_t tokens) {
                       bar.show(static_cast<uint64_t>(done + tokens),
                                static_cast<uint64_t>(all));
                     }));
    out.push_back(std::move(c));
    done += m.train.num_tokens();
  }
  return out;
}

Json member_json(const Member& member, const Counts& c) {
  Json out{{"name", or_null(!member.name.empty(), member.name)},
           {"weight", member.weight},
           {"train_tokens", member.train.num_tokens()},
           {"val_tokens", member.val.num_tokens()},
           {"document_tokens", nullptr},
           {"counted_share", nullptr}};
  if (c.lengths.empty()) return out;
  out["document_tokens"] = {{"median", c.length_at(0.5)},
                            {"p90", c.length_at(0.9)},
                            {"longest", c.lengths.back()}};
  out["counted_share"] = c.counted_share();
  return out;
}

void print_member(const Member& member, const Counts& c, bool named) {
  if (named)
    fmt::print("  {} (weight {}): {} training and {} validation tokens\n",
               member.name, member.weight, member.train.num_tokens(),
               member.val.num_tokens());
  if (c.lengths.empty()) return;
  fmt::print(
      "  tokens of a training document: median {}, 90 % at most {}, longest "
      "{}\n  the loss counts {:.1f} % of the training tokens\n",
      c.length_at(0.5), c.length_at(0.9), c.lengths.back(),
      100 * c.counted_share());
}

double bytes_per_token(const Index& index) {
  return static_cast<double>(index.text_bytes) /
         static_cast<double>(index.train_tokens() + index.val_tokens());
}

Json statistics_json(const Index& index, const Dataset& set,
                     const std::vector<Counts>& counts) {
  Json members = Json::array();
  for (size_t i = 0; i < counts.size(); ++i)
    members.push_back(member_json(set.members()[i], counts[i]));
  return {{"path", set.dir()},
          {"data_id", set.data_id()},
          {"documents", index.documents},
          {"text_bytes", index.text_bytes},
          {"tokenizer", set.tokenizer()},
          {"vocab_size", set.vocab_size()},
          {"train_tokens", index.train_tokens()},
          {"val_tokens", index.val_tokens()},
          {"bytes_per_token", bytes_per_token(index)},
          {"members", std::move(members)}};
}

void print_statistics(const Index& index, const Dataset& set,
                      const std::vector<Counts>& counts) {
  fmt::print("{}: {}, {} of text, tokenizer {}, vocabulary {}\n", set.dir(),
             plural(index.documents, "document"),
             format_bytes(index.text_bytes), set.tokenizer(), set.vocab_size());
  fmt::print("  {} training and {} validation tokens, {:.2f} bytes a token\n",
             index.train_tokens(), index.val_tokens(), bytes_per_token(index));
  for (size_t i = 0; i < counts.size(); ++i)
    print_member(set.members()[i], counts[i], set.is_mixture());
}

// Neighbouring tokens of a sequence that are treated alike.
struct Part {
  bool begins_document = false;
  bool counted = true;  // the loss counts how well they are predicted
  std::string text;
};

Result<std::vector<Part>> parts_of(const tokenizer::Tokenizer& tokenizer,
                                   std::span<const int32_t> input,
                                   std::span<const int32_t> target,
                                   const std::vector<int64_t>& starts) {
  std::vector<Part> out;
  tokenizer::TextStream text(tokenizer);
  size_t next = 0;
  for (size_t i = 0; i < input.size(); ++i) {
    // What predicts the token is the position before; nothing is known of the
    // first one's.
    const bool counted = i == 0 ? target[0] >= 0 : target[i - 1] >= 0;
    const bool begins =
        next < starts.size() && starts[next] == static_cast<int64_t>(i);
    if (begins) ++next;
    if (out.empty() || begins || counted != out.back().counted) {
      if (!out.empty()) text.finish(out.back().text);
      out.push_back({.begins_document = begins, .counted = counted});
    }
    RETURN_IF_ERROR(text.add(input[i], out.back().text));
  }
  text.finish(out.back().text);
  return out;
}

Json parts_json(const std::vector<Part>& parts) {
  Json out = Json::array();
  for (const Part& p : parts)
    out.push_back({{"begins_document", p.begins_document},
                   {"counted", p.counted},
                   {"text", p.text}});
  return out;
}

// A sequence as text, in which a document begins on a line of its own and what
// the loss does not count is dim or, without colors, between marks.
std::string marked_text(const std::vector<Part>& parts, bool color) {
  const auto [dim, plain] =
      color ? std::pair{"\033[2m", "\033[0m"} : std::pair{"\u27e6", "\u27e7"};
  std::string out;
  bool counted = true;
  for (const Part& p : parts) {
    if (p.counted != counted) out += p.counted ? plain : dim;
    counted = p.counted;
    if (p.begins_document) {
      if (!out.ends_with('\n')) out += '\n';
      out += "--- document ---\n";
    }
    out += p.text;
  }
  return counted ? out : out + plain;
}

// The first sequences of training, which are printed or, as JSON, returned.
Result<Json> show_sequences(const Options& o, const Dataset& set,
                            const tokenizer::Tokenizer& tokenizer) {
  std::vector<Sampler::MixtureMember> mixture;
  for (const Member& m : set.members())
    mixture.push_back({m.train.num_tokens(), m.weight});
  ASSIGN_OR_RETURN(const Sampler sampler,
                   Sampler::make(o.seed, mixture, o.seq_len,
                                 /*global_batch=*/1));
  const auto length = static_cast<size_t>(o.seq_len);
  std::vector<int32_t> input(length), target(length);
  std::vector<int64_t> starts;
  Json sequences = Json::array();
  for (int64_t i = 0; i < o.samples; ++i) {
    const Sampler::Sequence s = sampler.at(i, 0);
    const Member& member = set.members()[s.member];
    RETURN_IF_ERROR(
        member.train.read_window(s.window, o.seq_len, input, target, &starts));
    ASSIGN_OR_RETURN(const std::vector<Part> parts,
                     parts_of(tokenizer, input, target, starts));
    const int64_t first = s.window * o.seq_len, last = first + o.seq_len - 1;
    if (o.json)
      sequences.push_back(
          {{"member", or_null(!member.name.empty(), member.name)},
           {"window", s.window},
           {"first_token", first},
           {"last_token", last},
           {"parts", parts_json(parts)}});
    else
      fmt::print(
          "\n=== sequence {} of train.seed {}: tokens {} to {}{} ===\n{}\n", i,
          o.seed, first, last, set.is_mixture() ? " of " + member.name : "",
          marked_text(parts, o.color));
  }
  return sequences;
}

Status inspect(const Options& o) {
  ASSIGN_OR_RETURN(const Dataset set, Dataset::open(o.dir));
  ASSIGN_OR_RETURN(const Index index, read_index(o.dir));
  ASSIGN_OR_RETURN(const std::vector<Counts> counts, count_members(set));
  if (!o.json) print_statistics(index, set, counts);
  ASSIGN_OR_RETURN(const auto tokenizer,
                   tokenizer::open_tokenizer(
                       o.tokenizer.empty() ? set.tokenizer() : o.tokenizer));
  if (tokenizer->id() != set.tokenizer())
    return invalid_argument(fmt::format(
        "{}: the tokens are those of '{}', not of --tokenizer {} ('{}')", o.dir,
        set.tokenizer(), o.tokenizer, tokenizer->id()));
  Json sequences = Json::array();
  if (index.train_tokens() > 0) {
    ASSIGN_OR_RETURN(sequences, show_sequences(o, set, *tokenizer));
  }
  if (!o.json) return ok_status();
  Json json = statistics_json(index, set, counts);
  json["sequences"] = std::move(sequences);
  print_json(json);
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
  add_json_option(c, &o->json);
  c->footer(
      "\nExample:\n  remesh data inspect data/chats --tokenizer "
      "tokenizer.json\n\nText that the loss does not count is dim, or between "
      "\u27e6 and \u27e7.");
  c->callback([&app, o, code] {
    o->color = ::isatty(STDOUT_FILENO) == 1 && getenv("NO_COLOR") == nullptr;
    *code = exit_code(app, inspect(*o));
  });
}

}  // namespace remesh::data
