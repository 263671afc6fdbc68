// remesh-data: creates and verifies data sets; `remesh data` runs it.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <string>

#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/process.h"
#include "proto/base/text.h"
#include "proto/base/usage.h"
#include "proto/base/version.h"
#include "worker/data/dataset.h"
#include "worker/data/prepare.h"
#include "worker/data/tokenizer.h"

namespace remesh::data {
namespace {

constexpr int64_t kRedrawMs = 100;
constexpr int kBarWidth = 30;

// A progress bar on stderr, if that is a terminal.
class Bar {
 public:
  explicit Bar(std::string what) : what_(std::move(what)) {}
  ~Bar() {
    if (drawn_) std::fputs("\r\x1b[K", stderr);
  }
  Bar(const Bar&) = delete;
  Bar& operator=(const Bar&) = delete;

  void show(uint64_t done, uint64_t total) {
    const int64_t now = monotonic_ms();
    if (!terminal_ || now - drawn_ms_ < kRedrawMs) return;
    if (began_ms_ == 0) began_ms_ = now;
    drawn_ms_ = now;
    drawn_ = true;
    const double share = total == 0
                             ? 1.0
                             : std::min(1.0, static_cast<double>(done) /
                                                 static_cast<double>(total));
    const int full = static_cast<int>(share * kBarWidth);
    std::string left;
    if (share > 0.02) {
      const double seconds = static_cast<double>(now - began_ms_) / 1000;
      left = "  " + format_duration(seconds / share - seconds) + " left";
    }
    fmt::print(stderr, "\r\x1b[K{} [{}{}] {:>3.0f}%  {} of {}{}", what_,
               std::string(full, '='), std::string(kBarWidth - full, '.'),
               share * 100, format_bytes(done), format_bytes(total), left);
  }

 private:
  std::string what_;
  bool terminal_ = isatty(STDERR_FILENO) == 1;
  bool drawn_ = false;
  int64_t began_ms_ = 0;
  int64_t drawn_ms_ = 0;
};

int fail(const Status& status) {
  const ExitCode code = exit_with("remesh data", status);
  return status.code() == Code::kAlreadyExists ? kExitUsage : code;
}

int prepare_command(const PrepareOptions& options) {
  Result<PrepareSummary> done = invalid_argument("not run");
  {
    Bar bar("preparing");
    done =
        prepare(options, *posix_file_system(),
                [&](uint64_t read, uint64_t total) { bar.show(read, total); });
  }
  if (!done.ok()) return fail(done.status());
  const PrepareSummary& s = *done;
  fmt::print(
      "{}: {}{}, {} of text\n"
      "  training    {} tokens in {}\n"
      "  validation  {} tokens in {}\n"
      "  tokenizer {}, vocabulary {}, data_id {}\n",
      options.out_dir, s.up_to_date ? "up to date, " : "",
      plural(s.documents, "document"), format_bytes(s.text_bytes),
      s.train_tokens, plural(s.train_shards, "shard"), s.val_tokens,
      plural(s.val_shards, "shard"), s.tokenizer, s.vocab_size, s.data_id);
  return 0;
}

int verify_command(const std::string& dir) {
  auto set = Dataset::open(dir);
  if (!set.ok()) return fail(set.status());
  Status status;
  {
    Bar bar("verifying");
    status = set->verify(
        [&](uint64_t done, uint64_t total) { bar.show(done, total); });
  }
  if (!status.ok()) return fail(status);
  fmt::print("{}: {} training and {} validation tokens, all verified\n", dir,
             set->train().num_tokens(), set->val().num_tokens());
  return 0;
}

void declare_prepare(CLI::App& app, PrepareOptions* o, int* code) {
  CLI::App* c = app.add_subcommand(
      "prepare", "Convert text files to a data set of token shards");
  c->add_option("INPUT,--input", o->inputs,
                "Text files, plain or .xz, read in this order")
      ->required();
  c->add_option("--out", o->out_dir, "Folder of the data set")->required();
  c->add_option("--tokenizer", o->tokenizer,
                "Tokenizer: " + join(tokenizer_names()))
      ->capture_default_str();
  c->add_option("--val-fraction", o->val_fraction,
                "Share of the text held out for validation, 0 to 0.5")
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
  c->add_flag("--overwrite", o->overwrite,
              "Replace a data set in the folder; its other files stay");
  c->footer(R"(
A line "<|endoftext|>" ends a document, as does the end of a file.

Examples:
  remesh data prepare --input books.txt.xz --out data/books
  remesh data prepare --input a.txt b.txt --out data/ab --val-fraction 0.05)");
  c->callback([o, code] { *code = prepare_command(*o); });
}

int data_main(int argc, char** argv) {
  CLI::App app("Prepares text for training.");
  app.name("remesh data");
  app.set_version_flag("--version", version_line("remesh data"));
  app.require_subcommand(1);
  app.footer(
      "\nExample:\n"
      "  remesh data prepare --input books.txt.xz --out data/books");
  PrepareOptions options;
  std::string dir;
  int code = 0;
  declare_prepare(app, &options, &code);
  CLI::App* verify = app.add_subcommand(
      "verify", "Read a complete data set and compare its checksums");
  verify->add_option("DIR", dir, "Folder of the data set")->required();
  verify->footer("\nExample:\n  remesh data verify data/books");
  verify->callback([&] { code = verify_command(dir); });
  report_usage_in_one_line(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kExitUsage;
  }
  return code;
}

}  // namespace
}  // namespace remesh::data

int main(int argc, char** argv) {
  remesh::open_standard_descriptors();
  return remesh::data::data_main(argc, argv);
}
