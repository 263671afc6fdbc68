// remesh-data: data sets and tokenizers. `remesh data` runs it, and with
// "tokenizer" as its first argument `remesh tokenizer`.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/process.h"
#include "proto/base/progress_bar.h"
#include "proto/base/text.h"
#include "proto/base/version.h"
#include "worker/data/commands.h"
#include "worker/data/dataset.h"
#include "worker/data/mix.h"
#include "worker/data/prepare.h"
#include "worker/tokenizer/tokenizer.h"

namespace remesh::data {
namespace {

Status prepare_command(const PrepareOptions& options, bool json) {
  Result<Prepared> done = invalid_argument("not run");
  {
    ProgressBar bar("preparing");
    done =
        prepare(options, *posix_file_system(),
                [&](uint64_t read, uint64_t total) { bar.show(read, total); });
  }
  ASSIGN_OR_RETURN(const Prepared made, std::move(done));
  const Index& index = made.index;
  if (!made.changes.empty())
    print_error(
        fmt::format("note: decoding does not undo all that this tokenizer does "
                    "to a text: {}\n",
                    made.changes));
  if (json) {
    print_json({{"path", options.out_dir},
                {"up_to_date", made.up_to_date},
                {"data_id", index.data_id},
                {"documents", index.documents},
                {"text_bytes", index.text_bytes},
                {"train_tokens", index.train_tokens()},
                {"train_shards", index.train.size()},
                {"val_tokens", index.val_tokens()},
                {"val_shards", index.val.size()},
                {"tokenizer", index.tokenizer},
                {"vocab_size", index.vocab_size}});
    return ok_status();
  }
  fmt::print(
      "{}: {}{}, {} of text\n"
      "  training    {} tokens in {}\n"
      "  validation  {} tokens in {}\n"
      "  tokenizer {}, vocabulary {}, data_id {}\n",
      options.out_dir, made.up_to_date ? "up to date, " : "",
      plural(index.documents, "document"), format_bytes(index.text_bytes),
      index.train_tokens(), plural(std::ssize(index.train), "shard"),
      index.val_tokens(), plural(std::ssize(index.val), "shard"),
      index.tokenizer, index.vocab_size, index.data_id);
  return ok_status();
}

Status verify_command(const std::string& dir, bool json) {
  ASSIGN_OR_RETURN(const Dataset set, Dataset::open(dir));
  {
    ProgressBar bar("verifying");
    RETURN_IF_ERROR(set.verify(
        [&](uint64_t done, uint64_t total) { bar.show(done, total); }));
  }
  int64_t train = 0, val = 0;
  for (const Member& m : set.members()) {
    train += m.train.num_tokens();
    val += m.val.num_tokens();
  }
  if (json)
    print_json({{"path", dir},
                {"data_id", set.data_id()},
                {"train_tokens", train},
                {"val_tokens", val}});
  else
    fmt::print("{}: {} training and {} validation tokens, all verified\n", dir,
               train, val);
  return ok_status();
}

struct ShowOptions {
  std::string dir;
  std::string tokenizer = "bytes";
  int64_t from = 0;
  int64_t tokens = 256;
  bool json = false;
};

Status show(const ShowOptions& o) {
  ASSIGN_OR_RETURN(const Dataset set, Dataset::open(o.dir));
  ASSIGN_OR_RETURN(const auto tokenizer,
                   tokenizer::open_tokenizer(o.tokenizer));
  if (tokenizer->id() != set.tokenizer())
    return invalid_argument(fmt::format(
        "{}: the tokens are those of '{}', not of --tokenizer {} ('{}')", o.dir,
        set.tokenizer(), o.tokenizer, tokenizer->id()));
  if (set.is_mixture())
    return invalid_argument(o.dir + ": is a mixture; name one of its members");
  const Split& split = set.train();
  if (o.from < 0 || o.from >= split.num_tokens() || o.tokens < 1)
    return invalid_argument(
        fmt::format("--from {} --tokens {}: it has training tokens 0 to {}",
                    o.from, o.tokens, split.num_tokens() - 1));
  std::vector<int32_t> tokens(
      static_cast<size_t>(std::min(o.tokens, split.num_tokens() - o.from)));
  RETURN_IF_ERROR(split.read(o.from, tokens));
  ASSIGN_OR_RETURN(const std::string text, tokenizer->decode(tokens));
  if (o.json)
    print_json({{"path", o.dir},
                {"first_token", o.from},
                {"ids", tokens},
                {"text", text}});
  else
    std::fwrite(text.data(), 1, text.size(), stdout);
  return ok_status();
}

void add_show(CLI::App& app, int* code) {
  auto o = std::make_shared<ShowOptions>();
  CLI::App* c =
      app.add_subcommand("show", "Print training tokens of a data set as text");
  c->add_option("DIR", o->dir, "Folder of the data set")->required();
  c->add_option("--tokenizer", o->tokenizer,
                "The one that the data set was made with: " +
                    std::string(tokenizer::kTokenizerHelp))
      ->capture_default_str();
  c->add_option("--from", o->from, "The first token")->capture_default_str();
  c->add_option("--tokens", o->tokens, "At most so many tokens")
      ->capture_default_str();
  add_json_option(c, &o->json);
  c->footer("\nExample:\n  remesh data show data/books --from 5000");
  c->callback([&app, o, code] { *code = exit_code(app, show(*o)); });
}

void add_prepare(CLI::App& app, int* code) {
  auto o = std::make_shared<PrepareOptions>();
  auto json = std::make_shared<bool>(false);
  CLI::App* c = app.add_subcommand(
      "prepare", "Convert text files to a data set of token shards");
  c->add_option(
       "INPUT,--input", o->inputs,
       "Files, folders or patterns: text or JSON lines (.jsonl, .json), plain "
       "or gzip, xz, zst or bz2; read in this order")
      ->required();
  c->add_option("--out", o->out_dir, "Folder of the data set")->required();
  c->add_option("--tokenizer", o->tokenizer,
                std::string("Tokenizer: ") + tokenizer::kTokenizerHelp)
      ->capture_default_str();
  c->add_option("--val-fraction", o->val_fraction,
                "Share of the text held out for validation, 0 to 0.5; 1: all "
                "of it, for a mixture to validate on")
      ->capture_default_str();
  c->add_option("--val-block-bytes", o->val_block_bytes,
                "Size of the held-out blocks, about; 0: 16 KiB, or less for a "
                "small input")
      ->capture_default_str();
  c->add_option("--shard-tokens", o->shard_tokens,
                "Maximum number of tokens per shard")
      ->capture_default_str();
  c->add_option("--seed", o->seed, "Seed of the held-out sample")
      ->capture_default_str();
  c->add_flag("--raw-bytes", o->raw_bytes,
              "Take the files as they are, also if they are not UTF-8 text");
  c->add_option("--field", o->field, "Field of JSON lines with the text")
      ->capture_default_str();
  c->add_flag("--chat", o->chat,
              "The JSON lines are conversations: {\"messages\": [{\"role\": "
              "..., \"content\": ...}, ...]}; the loss counts the answers")
      ->excludes("--field");
  c->add_option("--chat-template", o->chat_template,
                "Jinja file or tokenizer_config.json; its bos_token and "
                "eos_token are the tokenizer's. Default: the one beside the "
                "tokenizer")
      ->needs("--chat");
  c->add_option("--chat-date", o->chat_date,
                "The date that a template writes where it asks for today's, so "
                "that the same text makes the same data")
      ->needs("--chat")
      ->capture_default_str();
  c->add_flag("--overwrite", o->overwrite,
              "Replace a data set in the folder; its other files stay");
  add_json_option(c, json.get());
  c->footer(R"(
In text a line "<|endoftext|>" ends a document, as does the end of a file.

Examples:
  remesh data prepare --input books.txt.xz --out data/books
  remesh data prepare --input a.txt b.txt --out data/ab --val-fraction 0.05
  remesh data prepare --input texts/ 'more/*.jsonl.zst' --out data/all
  remesh data prepare --input chats.jsonl --chat --out data/chats \
      --tokenizer Qwen3-0.6B/tokenizer.json)");
  c->callback([&app, o, json, code] {
    *code = exit_code(app, prepare_command(*o, *json));
  });
}

Status mix_command(const MixOptions& o, bool json) {
  ASSIGN_OR_RETURN(const Index made, mix(o, *posix_file_system()));
  double all = 0;
  for (const MemberEntry& m : made.members) all += m.weight;
  if (json) {
    auto members = nlohmann::ordered_json::array();
    for (const MemberEntry& m : made.members)
      members.push_back({{"name", m.name},
                         {"path", m.dir},
                         {"weight", m.weight},
                         {"share", m.weight / all},
                         {"train_tokens", m.train_tokens},
                         {"val_tokens", m.val_tokens}});
    print_json({{"path", o.out_dir},
                {"data_id", made.data_id},
                {"train_tokens", made.train_tokens()},
                {"val_tokens", made.val_tokens()},
                {"members", std::move(members)}});
    return ok_status();
  }
  fmt::print("{}: {} of {} training tokens\n", o.out_dir,
             plural(static_cast<int64_t>(made.members.size()), "data set"),
             made.train_tokens());
  for (const MemberEntry& m : made.members)
    if (m.weight > 0)
      fmt::print("  {:<16} {:5.1f} % of the sequences, {} training tokens\n",
                 m.name, 100 * m.weight / all, m.train_tokens);
    else
      fmt::print("  {:<16} for validation only, {} tokens\n", m.name,
                 m.val_tokens);
  return ok_status();
}

void add_mix(CLI::App& app, int* code) {
  auto o = std::make_shared<MixOptions>();
  auto json = std::make_shared<bool>(false);
  CLI::App* c = app.add_subcommand(
      "mix",
      "Make a data set of others, mixed by weight as training reads them");
  c->add_option("FOLDER=WEIGHT", o->members,
                "Data sets of one tokenizer, and their shares")
      ->required();
  c->add_option("--out", o->out_dir, "Folder of the mixture")->required();
  c->add_flag("--overwrite", o->overwrite, "Replace a data set in the folder");
  add_json_option(c, json.get());
  c->footer(R"(
Nothing is copied: the data sets must stay where they are. Validation takes an
equal part of each that has held-out text, gives the loss of each under its name,
and their mean by weight. A data set of weight 0 is for validation only, such as
one that was prepared with --val-fraction 1. Where only such have held-out text,
the mean is of equal weights.

Examples:
  remesh data mix data/books=0.7 data/code=0.3 --out data/mix
  remesh data mix data/books=1 data/exams=0 data/news=0 --out data/mix)");
  c->callback([&app, o, json, code] {
    *code = exit_code(app, mix_command(*o, *json));
  });
}

void add_data_commands(CLI::App& app, int* code) {
  app.require_subcommand(1);
  app.footer(
      "\nExample:\n"
      "  remesh data prepare --input books.txt.xz --out data/books");
  add_prepare(app, code);
  add_mix(app, code);
  add_show(app, code);
  add_inspect(app, code);
  auto dir = std::make_shared<std::string>();
  auto json = std::make_shared<bool>(false);
  CLI::App* verify = app.add_subcommand(
      "verify", "Read a complete data set and compare its checksums");
  verify->add_option("DIR", *dir, "Folder of the data set")->required();
  add_json_option(verify, json.get());
  verify->footer("\nExample:\n  remesh data verify data/books");
  verify->callback([&app, dir, json, code] {
    *code = exit_code(app, verify_command(*dir, *json));
  });
}

int data_main(int argc, char** argv) {
  const bool tokenizer = argc > 1 && std::string_view(argv[1]) == "tokenizer";
  CLI::App app(tokenizer ? "Encodes text as tokens, and makes tokenizers."
                         : "Prepares text for training.");
  app.name(tokenizer ? "remesh tokenizer" : "remesh data");
  app.set_version_flag("--version", version_line("remesh data"));
  int code = 0;
  if (tokenizer)
    add_tokenizer_commands(app, &code);
  else
    add_data_commands(app, &code);
  const int skip = tokenizer ? 1 : 0;
  if (const auto ended = parse_arguments(app, argc - skip, argv + skip))
    return *ended;
  return check_output(app.get_name().c_str(), code);
}

}  // namespace
}  // namespace remesh::data

int main(int argc, char** argv) {
  remesh::begin_program();
  return remesh::data::data_main(argc, argv);
}
