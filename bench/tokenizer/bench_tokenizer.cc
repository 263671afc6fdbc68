// bench_tokenizer: how fast does one core encode and decode text, and make a
// vocabulary?
//
// Encoding is divided into dividing the text into pieces, which the pattern
// matcher of PCRE2 does, and encoding the pieces. The ratio of the first to the
// whole, in neighbouring measurements, is the share that no faster BPE could
// save.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/options.h"
#include "bench/process_use.h"
#include "bench/targets.h"
#include "proto/base/median.h"
#include "worker/data/text_reader.h"
#include "worker/tokenizer/bpe_trainer.h"
#include "worker/tokenizer/pipeline.h"
#include "worker/tokenizer/tokenizer.h"
#include "worker/tokenizer/tokenizer_json.h"

namespace remesh::bench {
namespace {

constexpr double kEncodeRate = 20;   // MB/s
constexpr double kOneCharacter = 1;  // s for 1 MB
constexpr double kTrainSeconds = 60;
constexpr size_t kDocument = size_t{1} << 20;
constexpr size_t kMixedBytes = 100'000'000;

struct Options {
  std::string text = "deploy/data/books.txt.xz";
  std::string tokenizer;
  int64_t vocab_size = 32000;
  int rounds = 5;
  bool smoke = false;
};

Result<std::string> read_text(const std::string& path, size_t max_bytes) {
  ASSIGN_OR_RETURN(data::TextReader reader, data::TextReader::open(path));
  std::string text(max_bytes, '\0');
  size_t size = 0;
  for (;;) {
    ASSIGN_OR_RETURN(const size_t got,
                     reader.read({text.data() + size, text.size() - size}));
    size += got;
    if (got == 0 || size == text.size()) break;
  }
  text.resize(size);
  return text;
}

// Parts of about kDocument that end with a line.
std::vector<std::string_view> documents_of(std::string_view text) {
  std::vector<std::string_view> documents;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n', kDocument), text.size() - 1);
    documents.push_back(text.substr(0, end + 1));
    text.remove_prefix(end + 1);
  }
  return documents;
}

template <typename F>
double seconds_of(const F& f) {
  const double began = thread_cpu_s();
  f();
  return thread_cpu_s() - began;
}

// Parts of the text, characters of two to four bytes, and any bytes, in turns.
std::string mixed(std::string_view text, size_t bytes) {
  constexpr std::array<std::pair<int, int>, 3> kBegins = {
      {{0xC2, 30}, {0xE1, 12}, {0xF1, 3}}};
  std::mt19937_64 random(1);
  const auto any = [&](size_t n) { return static_cast<size_t>(random() % n); };
  std::string out;
  while (out.size() < bytes) {
    out += text.substr(any(text.size()), any(4096));
    for (size_t n = any(1024); n > 0; --n) {
      const size_t more = any(kBegins.size());
      const auto [first, count] = kBegins[more];
      out += static_cast<char>(
          first + static_cast<int>(any(static_cast<size_t>(count))));
      for (size_t i = 0; i <= more; ++i)
        out += static_cast<char>(0x80 + any(0x40));
    }
    for (size_t n = any(4096); n > 0; --n) out += static_cast<char>(any(256));
  }
  return out;
}

// Whether decoding gives all of it back, in documents of any ends.
Result<bool> comes_back(const tokenizer::Tokenizer& t, std::string_view text) {
  for (; !text.empty(); text.remove_prefix(std::min(kDocument, text.size()))) {
    const std::string_view part = text.substr(0, kDocument);
    std::vector<int32_t> tokens;
    RETURN_IF_ERROR(t.encode(part, {}, tokens));
    ASSIGN_OR_RETURN(const std::string back, t.decode(tokens));
    if (back != part) return false;
  }
  return true;
}

struct Measured {
  std::vector<double> pieces, encode, decode, one_character;
  int64_t tokens = 0;
  bool same = true;  // decoding gave the text back
};

Result<Measured> measure(const tokenizer::Tokenizer& t,
                         const std::vector<std::string_view>& documents,
                         int rounds) {
  ASSIGN_OR_RETURN(tokenizer::Regex pattern,
                   tokenizer::Regex::compile(tokenizer::kLlama3Pattern));
  tokenizer::Matcher matcher;
  const std::string one(size_t{1} << 20, 'a');
  Measured m;
  Status status;
  const auto note = [&](const Status& s) {
    if (status.ok()) status = s;
  };
  for (int round = 0; round < rounds; ++round) {
    m.pieces.push_back(seconds_of([&] {
      for (const std::string_view d : documents)
        note(pattern.for_each_match(
            d, matcher, [](size_t, size_t) { return ok_status(); }));
    }));
    std::vector<std::vector<int32_t>> tokens(documents.size());
    m.encode.push_back(seconds_of([&] {
      for (size_t i = 0; i < documents.size(); ++i)
        note(t.encode(documents[i], {}, tokens[i]));
    }));
    std::vector<std::string> back(documents.size());
    m.decode.push_back(seconds_of([&] {
      for (size_t i = 0; i < documents.size(); ++i) {
        auto text = t.decode(tokens[i]);
        note(text.status());
        if (text.ok()) back[i] = std::move(*text);
      }
    }));
    m.tokens = 0;
    for (size_t i = 0; i < documents.size(); ++i) {
      m.same = m.same && back[i] == documents[i];
      m.tokens += static_cast<int64_t>(tokens[i].size());
    }
    std::vector<int32_t> ignored;
    m.one_character.push_back(
        seconds_of([&] { note(t.encode(one, {}, ignored)); }));
  }
  RETURN_IF_ERROR(status);
  return m;
}

Result<int> run(Options o) {
  if (o.smoke) {
    o.vocab_size = 1000;
    o.rounds = 1;
  }
  ASSIGN_OR_RETURN(const std::string text,
                   read_text(o.text, size_t{o.smoke ? 1U : 32U} << 20));
  const auto documents = documents_of(text);
  const double mb = static_cast<double>(text.size()) * 1e-6;
  Targets targets(o.smoke);
  std::unique_ptr<tokenizer::Tokenizer> t;
  if (o.tokenizer.empty()) {
    std::string json;
    Status status;
    const double seconds = seconds_of([&] {
      auto trainer = tokenizer::BpeTrainer::make(o.vocab_size);
      status = trainer.status();
      for (size_t i = 0; i < documents.size() && status.ok(); ++i)
        status = trainer->add(documents[i]);
      if (!status.ok()) return;
      auto made = trainer->finish();
      status = made.status();
      if (made.ok()) json = std::move(*made);
    });
    RETURN_IF_ERROR(status);
    fmt::print("train     {} tokens from {:.1f} MB in {:.1f} s\n", o.vocab_size,
               mb, seconds);
    targets.at_most("seconds to train", kTrainSeconds, seconds);
    ASSIGN_OR_RETURN(t, tokenizer::parse_tokenizer_json(json, "trained"));
  } else {
    ASSIGN_OR_RETURN(t, tokenizer::open_tokenizer(o.tokenizer));
  }
  ASSIGN_OR_RETURN(const Measured m, measure(*t, documents, o.rounds));
  std::vector<double> share;
  for (size_t i = 0; i < m.encode.size(); ++i)
    share.push_back(m.pieces[i] / m.encode[i]);
  const double rate = mb / median(m.encode);
  fmt::print(
      "encode    {:.1f} MB/s, {:.2f} bytes per token\n"
      "pattern   {:.1f} MB/s alone, {:.2f} of the time of encode\n"
      "decode    {:.1f} MB/s\n"
      "1 MB 'a'  {:.3f} s\n",
      rate, static_cast<double>(text.size()) / static_cast<double>(m.tokens),
      mb / median(m.pieces), median(share), mb / median(m.decode),
      median(m.one_character));
  targets.require("decoding gives the text back", m.same);
  ASSIGN_OR_RETURN(
      const bool back,
      comes_back(*t, mixed(text, o.smoke ? size_t{1} << 20 : kMixedBytes)));
  targets.require("decoding gives text, characters and bytes back", back);
  targets.at_least("MB/s encoded", kEncodeRate, rate);
  targets.at_most("seconds for 1 MB of one character", kOneCharacter,
                  median(m.one_character));
  return targets.report();
}

int main(int argc, char** argv) {
  CLI::App app("How fast is text encoded, and a vocabulary made?");
  Options o;
  app.add_option("--text", o.text, "Text, plain or .xz; the first 32 MiB")
      ->capture_default_str();
  app.add_option("--tokenizer", o.tokenizer,
                 std::string("Instead of one trained on the text: ") +
                     tokenizer::kTokenizerHelp);
  app.add_option("--vocab-size", o.vocab_size, "Of the trained one")
      ->capture_default_str();
  add_number(app, "--rounds", o.rounds, "Measurements", 1, 1000);
  app.add_flag("--smoke", o.smoke, "Tiny and quick; targets are not judged");
  CLI11_PARSE(app, argc, argv);
  const auto code = run(o);
  if (code.ok()) return *code;
  return failed("bench_tokenizer", code.status().to_string());
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) { return remesh::bench::main(argc, argv); }
