// `remesh eval`: how well a model predicts text.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "proto/base/exit_code.h"
#include "proto/base/file_system.h"
#include "proto/base/json_output.h"
#include "proto/base/progress_bar.h"
#include "proto/base/text.h"
#include "proto/base/usage.h"
#include "worker/data/text_reader.h"
#include "worker/sample/commands.h"
#include "worker/sample/evaluate.h"

namespace remesh::sample {
namespace {

constexpr size_t kMostBytes = size_t{1} << 32;
constexpr size_t kPortion = size_t{1} << 20;
constexpr int64_t kDefaultWindow = 1024;

struct Options {
  ModelChoice model;
  Compute compute;
  std::string text, choices;  // files
  int64_t window = 0;
  bool json = false;
};

void print_text(const Options& o, const TextScore& s) {
  if (o.json)
    print_json({{"tokens", s.tokens},
                {"bytes", s.bytes},
                {"nats_per_token", s.per_token()},
                {"perplexity", s.perplexity()},
                {"bits_per_byte", s.bits_per_byte()}});
  else
    fmt::print(
        "{}: {}, {:.4f} nats a token (perplexity {:.4f}), {:.4f} bits a byte\n",
        o.text, plural(s.tokens, "token"), s.per_token(), s.perplexity(),
        s.bits_per_byte());
}

void print_choices(const Options& o, const ChoiceScore& s) {
  const auto share = [&](int64_t right) {
    return static_cast<double>(right) / static_cast<double>(s.questions);
  };
  if (o.json)
    print_json({{"questions", s.questions},
                {"acc", share(s.right)},
                {"acc_norm", share(s.right_by_length)}});
  else
    fmt::print(
        "{}: {}, {:.1f} % right (acc), {:.1f} % by the character (acc_norm)\n",
        o.choices, plural(s.questions, "question"), 100 * share(s.right),
        100 * share(s.right_by_length));
}

// As `remesh data prepare` reads it: decompressed, without a byte order mark.
Result<std::string> read_text(const std::string& path) {
  ASSIGN_OR_RETURN(data::TextReader reader, data::TextReader::open(path));
  std::string text;
  for (size_t got = 1; got > 0;) {
    const size_t before = text.size();
    text.resize(before + kPortion);
    ASSIGN_OR_RETURN(got, reader.read(std::span(text).subspan(before)));
    text.resize(before + got);
    if (text.size() > kMostBytes)
      return invalid_argument(fmt::format("{}: has over {} of text", path,
                                          format_bytes(kMostBytes)));
  }
  return text;
}

Status evaluate(const Options& o) {
  if (o.text.empty() == o.choices.empty())
    return invalid_argument("give --text FILE or --choices FILE, one of both");
  const auto fs = posix_file_system();
  const std::string& file = o.text.empty() ? o.choices : o.text;
  ASSIGN_OR_RETURN(const std::string input, read_text(file));
  std::vector<Question> questions;
  if (o.text.empty()) {
    ASSIGN_OR_RETURN(questions, parse_questions(input, file));
  }
  ASSIGN_OR_RETURN(const ModelFiles files, find_model(*fs, o.model));
  auto bar = std::make_unique<ProgressBar>("loading");
  const LoadTick loaded = [&](uint64_t done, uint64_t all) {
    bar->show(done, all);
  };
  ASSIGN_OR_RETURN(const Weights weights, open_weights(*fs, files, loaded));
  const int64_t window = o.window > 0 ? o.window
                         : files.trained_length > 0
                             ? std::min(files.trained_length, kDefaultWindow)
                             : kDefaultWindow;
  const auto backend = backend_of(o.compute);
  ASSIGN_OR_RETURN(const auto model,
                   Generator::load(weights, dtype_of(o.compute, *backend),
                                   window, *backend, window));
  bar = std::make_unique<ProgressBar>("evaluating",
                                      o.text.empty() ? "question" : "token");
  const auto tick = [&](int64_t done, int64_t all) {
    bar->show(static_cast<uint64_t>(done), static_cast<uint64_t>(all));
  };
  if (!o.text.empty()) {
    ASSIGN_OR_RETURN(const TextScore s, score_text(*model, files, input, tick));
    bar.reset();
    print_text(o, s);
    return ok_status();
  }
  ASSIGN_OR_RETURN(const ChoiceScore s,
                   score_choices(*model, files, questions, tick));
  bar.reset();
  print_choices(o, s);
  return ok_status();
}

}  // namespace

void add_eval_command(CLI::App& app, int* code) {
  auto o = std::make_shared<Options>();
  add_model_options(app, &o->model);
  app.add_option("--text", o->text,
                 "File whose text is predicted, plain or compressed");
  app.add_option("--choices", o->choices,
                 "File of questions, one a line: {\"prompt\": TEXT, "
                 "\"choices\": [TEXT, ...], \"answer\": INDEX}");
  app.add_option("--window", o->window,
                 "Tokens that are predicted from each other. Default: as in "
                 "training, at most 1024")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  add_compute_options(app, &o->compute);
  add_json_option(&app, &o->json);
  app.footer(R"(
Examples:
  remesh eval runs/latest --text held-out.txt
  remesh eval Llama-3.2-1B --choices arc_easy.jsonl

Perplexity, acc and acc_norm are those of lm-evaluation-harness.)");
  app.callback([&app, o, code] {
    const Status status = evaluate(*o);
    *code = status.ok() ? kExitOk : exit_with(app.get_name(), status);
  });
}

}  // namespace remesh::sample
