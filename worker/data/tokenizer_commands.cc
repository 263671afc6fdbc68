#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/file_system.h"
#include "proto/base/number.h"
#include "proto/base/progress_bar.h"
#include "worker/data/commands.h"
#include "worker/data/inputs.h"
#include "worker/data/json_lines.h"
#include "worker/data/text_encoder.h"
#include "worker/data/text_reader.h"
#include "worker/tokenizer/bpe_trainer.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::data {
namespace {

constexpr size_t kTrainBlock = size_t{1} << 20;
constexpr size_t kPortion = size_t{1} << 20;  // of the standard input

struct Options {
  std::string tokenizer;
  std::optional<std::string> text;
  bool special = false;
  bool json = false;
  // train
  std::vector<std::string> inputs;
  std::string field = "text";
  std::string out;
  int64_t vocab_size = 32000;
  bool overwrite = false;
};

// The size of the file that is the standard input; 0: it is none.
uint64_t input_bytes() {
  struct stat about {};
  const bool is_file =
      ::fstat(STDIN_FILENO, &about) == 0 && S_ISREG(about.st_mode);
  return is_file ? static_cast<uint64_t>(about.st_size) : 0;
}

// Gives --text, or the standard input as it comes. A bar shows how far a file
// is, unless the output is on the terminal itself.
Status for_each_portion(const Options& o, const char* what,
                        const std::function<Status(std::string_view)>& take) {
  if (o.text) return take(*o.text);
  const uint64_t total = ::isatty(STDOUT_FILENO) == 1 ? 0 : input_bytes();
  ProgressBar bar(what);
  std::vector<char> portion(kPortion);
  uint64_t done = 0;
  for (;;) {
    const ssize_t got = ::read(STDIN_FILENO, portion.data(), portion.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno_error("read the standard input", errno);
    if (got == 0) return ok_status();
    RETURN_IF_ERROR(take({portion.data(), static_cast<size_t>(got)}));
    done += static_cast<uint64_t>(got);
    if (total > 0) bar.show(done, std::max(done, total));
  }
}

// Prints the tokens as they come, or, as JSON, all of them at the end.
Status encode(const Options& o) {
  ASSIGN_OR_RETURN(const auto tokenizer,
                   tokenizer::open_tokenizer(o.tokenizer));
  std::vector<int32_t> ids;
  const char* between = "";
  TextEncoder encoder(*tokenizer, {.special = o.special},
                      [&](int, std::span<const int32_t> tokens) {
                        if (o.json) {
                          ids.insert(ids.end(), tokens.begin(), tokens.end());
                        } else if (!tokens.empty()) {
                          fmt::print("{}{}", between, fmt::join(tokens, " "));
                          between = " ";
                        }
                        return ok_status();
                      });
  RETURN_IF_ERROR(for_each_portion(o, "encoding", [&](std::string_view part) {
    return encoder.add(part, 0);
  }));
  RETURN_IF_ERROR(encoder.finish());
  if (o.json)
    print_json({{"tokenizer", tokenizer->id()}, {"ids", ids}});
  else
    fmt::print("\n");
  return ok_status();
}

// Integers with spaces or commas between them, which come in portions.
class NumberReader {
 public:
  // Calls f(token) for each that is complete.
  template <typename F>
  Status add(std::string_view text, const F& f) {
    for (const char c : text) {
      if (std::string_view(" \t\r\n,").find(c) == std::string_view::npos)
        number_ += c;
      else
        RETURN_IF_ERROR(finish(f));
      if (number_.size() > kMost) return refuse();
    }
    return ok_status();
  }
  // The same with the last one, at the end.
  template <typename F>
  Status finish(const F& f) {
    if (number_.empty()) return ok_status();
    const auto token = parse_number<int32_t>(number_);
    if (!token) return refuse();
    number_.clear();
    return f(*token);
  }

 private:
  static constexpr size_t kMost = 20;  // characters

  Status refuse() const {
    return invalid_argument(
        fmt::format("'{}' is not a token: expected integers with spaces or "
                    "commas between them",
                    number_));
  }

  std::string number_;
};

// Prints the text as it comes, or, as JSON, all of it at the end.
Status decode(const Options& o) {
  ASSIGN_OR_RETURN(const auto tokenizer,
                   tokenizer::open_tokenizer(o.tokenizer));
  tokenizer::TextStream stream(*tokenizer);
  NumberReader numbers;
  std::string text;
  const auto print = [&] {
    if (o.json) return;
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    text.clear();
  };
  const auto add = [&](int32_t token) { return stream.add(token, text); };
  RETURN_IF_ERROR(for_each_portion(o, "decoding", [&](std::string_view part) {
    Status added = numbers.add(part, add);
    print();
    return added;
  }));
  RETURN_IF_ERROR(numbers.finish(add));
  stream.finish(text);
  print();
  if (o.json) print_json({{"tokenizer", tokenizer->id()}, {"text", text}});
  return ok_status();
}

Status add_texts(const Options& o, tokenizer::BpeTrainer& trainer) {
  ASSIGN_OR_RETURN(const std::vector<std::string> inputs,
                   expand_inputs(o.inputs));
  uint64_t done = 0, total = 0;
  for (const std::string& path : inputs) {
    ASSIGN_OR_RETURN(const TextReader reader, TextReader::open(path));
    total += reader.file_bytes();
  }
  ProgressBar bar("reading");
  BlockSplitter splitter(kTrainBlock, [&](const TextBlock& block) {
    return trainer.add(block.text);
  });
  for (const std::string& path : inputs) {
    ASSIGN_OR_RETURN(TextReader reader, TextReader::open(path));
    const auto progress = [&](uint64_t bytes) {
      bar.show(done += bytes, total);
    };
    RETURN_IF_ERROR(
        split_documents(reader, o.field, splitter, progress).status());
  }
  return splitter.finish();
}

Status train(const Options& o) {
  const auto fs = posix_file_system();
  if (!o.overwrite && fs->exists(o.out))
    return already_exists(fmt::format(
        "{}: exists: choose another name, or use --overwrite", o.out));
  // Checked before the work, not after it.
  if (is_folder(o.out))
    return invalid_argument(o.out + ": is a folder; give a file");
  if (!is_folder(parent_path(o.out)))
    return not_found(
        fmt::format("{}: there is no folder {}", o.out, parent_path(o.out)));
  ASSIGN_OR_RETURN(tokenizer::BpeTrainer trainer,
                   tokenizer::BpeTrainer::make(o.vocab_size));
  RETURN_IF_ERROR(add_texts(o, trainer));
  std::string json;
  {
    ProgressBar bar("merging", "token");
    ASSIGN_OR_RETURN(json, trainer.finish([&](uint64_t done, uint64_t total) {
      bar.show(done, total);
    }));
  }
  RETURN_IF_ERROR(write_file_atomically(*fs, o.out, json));
  ASSIGN_OR_RETURN(const auto made, tokenizer::open_tokenizer(o.out));
  if (o.json)
    print_json({{"path", o.out},
                {"vocab_size", made->vocab_size()},
                {"tokenizer", made->id()}});
  else
    fmt::print("{}: {} tokens, {}\n", o.out, made->vocab_size(), made->id());
  return ok_status();
}

}  // namespace

void add_tokenizer_commands(CLI::App& app, int* code) {
  auto o = std::make_shared<Options>();
  app.require_subcommand(1);
  app.footer(R"(
Examples:
  remesh tokenizer train books.txt.xz --out books.json
  remesh tokenizer encode --tokenizer books.json --text "To be"
  remesh tokenizer decode --tokenizer books.json --text "415 311")");
  const auto add = [&](const char* name, const char* help,
                       Status (*run)(const Options&)) {
    CLI::App* c = app.add_subcommand(name, help);
    c->callback([&app, o, run, code] { *code = exit_code(app, run(*o)); });
    add_json_option(c, &o->json);
    if (run == train) return c;
    c->add_option("--tokenizer", o->tokenizer,
                  std::string("Tokenizer: ") + tokenizer::kTokenizerHelp)
        ->required();
    c->add_option("--text", o->text, "This instead of the standard input");
    return c;
  };
  CLI::App* c = add("encode", "Print the tokens of a text", encode);
  c->add_flag("--special", o->special,
              "Special tokens that are written out in the text, such as "
              "<|endoftext|>, become these tokens");
  add("decode", "Print the text of tokens", decode);
  c = add("train", "Make a byte-level BPE tokenizer from text", train);
  c->add_option("INPUT,--input", o->inputs,
                "Files, folders or patterns, which are read as by `remesh data "
                "prepare`")
      ->required();
  c->add_option("--field", o->field, "Of JSON lines, the one with the text")
      ->capture_default_str();
  c->add_option("--out", o->out, "The tokenizer.json to write")->required();
  c->add_option("--vocab-size", o->vocab_size,
                "Number of tokens, including 256 bytes and <|endoftext|>")
      ->capture_default_str();
  c->add_flag("--overwrite", o->overwrite, "Replace the file");
}

}  // namespace remesh::data
