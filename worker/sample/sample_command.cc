// `remesh sample`: text from a model.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/json_output.h"
#include "proto/base/progress_bar.h"
#include "proto/base/rng.h"
#include "proto/base/text.h"
#include "proto/base/usage.h"
#include "worker/sample/chat.h"
#include "worker/sample/choice.h"
#include "worker/sample/commands.h"
#include "worker/sample/generator.h"

namespace remesh::sample {
namespace {

struct Options {
  ModelChoice model;
  Compute compute;
  std::string prompt;
  bool has_prompt = false;
  bool raw = false;
  bool special = false;
  bool chat = false;
  std::string system, chat_template;
  int64_t context = 0;  // of a conversation; 0: by the model
  int64_t tokens = 256;
  ChoiceOptions choice{.temperature = 0.8, .top_p = 0.95};
  uint64_t seed = 1;
  bool ignore_end = false;
  bool json = false;
};

struct Speed {
  int64_t tokens = 0;
  double seconds = 0;
  double per_s() const {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
  }
};

struct Sampled {
  std::string text;    // without the prompt
  bool ended = false;  // by a token that ends a text
  int64_t prompt_tokens = 0;
  Speed read, made;  // read: without tokens known from the last turn
};

Status print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() ||
      std::fflush(stdout) != 0)
    return errno_error("write the text", errno);
  return ok_status();
}

// The tokens that the text begins with: those of the prompt, after what
// precedes a text.
Result<std::vector<int32_t>> first_tokens(const Options& o,
                                          const ModelFiles& files) {
  std::vector<int32_t> tokens;
  if (!o.raw) tokens = o.prompt.empty() ? files.begin : files.text_begin;
  RETURN_IF_ERROR(
      files.tokenizer->encode(o.prompt, {.special = o.special}, tokens));
  if (tokens.empty())
    return invalid_argument(
        "--prompt: has no token; give a text, or leave out --raw");
  return tokens;
}

// How many tokens of the prompt the model has already. The logits need one
// more.
size_t known_tokens(const std::vector<int32_t>& held,
                    const std::vector<int32_t>& prompt) {
  const auto same =
      std::mismatch(held.begin(), held.end(), prompt.begin(), prompt.end());
  return std::min(static_cast<size_t>(same.second - prompt.begin()),
                  prompt.size() - 1);
}

// Gives the text to `show` as it comes. `held`: the tokens that the model has.
Result<Sampled> generate(
    const Options& o, const ModelFiles& files, Generator& model,
    const std::vector<int32_t>& prompt, uint64_t turn,
    std::vector<int32_t>* held,
    const std::function<Status(const std::string&)>& show) {
  const int64_t room =
      model.context() - static_cast<int64_t>(prompt.size()) + 1;
  if (room < 1)
    return invalid_argument(fmt::format(
        "the conversation has {} tokens; there is room for {}: give "
        "a larger --context",
        prompt.size(), model.context()));
  Sampled out;
  tokenizer::TextStream stream(*files.tokenizer,
                               /*begins=*/o.chat || o.prompt.empty());
  int64_t began_ns = monotonic_ns();
  const auto unknown = std::span(prompt).subspan(known_tokens(*held, prompt));
  model.truncate(static_cast<int64_t>(prompt.size() - unknown.size()));
  std::span<const float> logits = model.extend(unknown);
  *held = prompt;
  out.prompt_tokens = static_cast<int64_t>(prompt.size());
  out.read = {static_cast<int64_t>(unknown.size()), seconds_since(began_ns)};
  began_ns = monotonic_ns();
  const auto add = [&](const std::string& text) {
    out.text += text;
    return show(text);
  };
  for (int64_t i = 0; i < std::min(o.tokens, room); ++i) {
    // A model may have more rows than its tokenizer has tokens.
    const auto choices = logits.first(std::min(
        logits.size(), static_cast<size_t>(files.tokenizer->vocab_size())));
    RETURN_IF_ERROR(check_finite(choices));
    const double random =
        static_cast<double>(
            random_u64(o.seed, turn, static_cast<uint64_t>(i)) >> 11) *
        0x1p-53;
    const int32_t token = choose(choices, o.choice, random);
    out.made = {i + 1, seconds_since(began_ns)};
    out.ended = files.end.contains(token) && !o.ignore_end;
    if (out.ended) break;
    std::string text;
    RETURN_IF_ERROR(stream.add(token, text));
    RETURN_IF_ERROR(add(text));
    if (i + 1 == std::min(o.tokens, room)) break;
    logits = model.extend({&token, 1});
    held->push_back(token);
  }
  std::string text;
  stream.finish(text);
  RETURN_IF_ERROR(add(text));
  return out;
}

std::string to_json(const std::string& prompt, const Sampled& s) {
  return json_output({{"prompt", prompt},
                      {"text", s.text},
                      {"ended", s.ended},
                      {"prompt_tokens", s.prompt_tokens},
                      {"prompt_tokens_read", s.read.tokens},
                      {"tokens", s.made.tokens},
                      {"prompt_tokens_per_s", s.read.per_s()},
                      {"tokens_per_s", s.made.per_s()}},
                     JsonLayout::kOneLine);
}

// Prints what the model says to `prompt`, as it comes and then at which speed,
// or as JSON. `with`: how it computes.
Result<Sampled> print_sampled(const Options& o, const ModelFiles& files,
                              Generator& model, const std::string& with,
                              const std::string& prompt,
                              const std::vector<int32_t>& tokens, uint64_t turn,
                              std::vector<int32_t>* held) {
  ASSIGN_OR_RETURN(Sampled done, generate(o, files, model, tokens, turn, held,
                                          [&](const std::string& text) {
                                            return o.json ? ok_status()
                                                          : print(text);
                                          }));
  RETURN_IF_ERROR(print(o.json ? to_json(prompt, done) : "\n"));
  if (!o.json)
    print_error(fmt::format(
        "\n{} of prompt at {:.0f} tokens/s, then {} at {:.1f} tokens/s ({})\n",
        plural(done.read.tokens, "token"), done.read.per_s(), done.made.tokens,
        done.made.per_s(), with));
  return done;
}

// Answers the prompt or, without one, each line of the standard input.
Status answer(const Options& o, ModelFiles& files, Generator& model,
              const std::string& with) {
  ASSIGN_OR_RETURN(Chat chat, Chat::open(files, o.chat_template, o.system));
  std::vector<int32_t> held;
  std::string message = o.prompt;
  const bool asks = !o.has_prompt && ::isatty(STDIN_FILENO) != 0;
  for (uint64_t turn = 0;; ++turn) {
    if (asks) print_error("> ");
    if (!o.has_prompt && !std::getline(std::cin, message)) return ok_status();
    ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, chat.ask(message));
    RETURN_IF_ERROR(check_vocabulary(tokens, model.vocab_size()));
    ASSIGN_OR_RETURN(
        const Sampled done,
        print_sampled(o, files, model, with, message, tokens, turn, &held));
    if (o.has_prompt) return ok_status();
    chat.answered(done.text);
  }
}

Status continue_prompt(const Options& o, const ModelFiles& files,
                       const std::vector<int32_t>& prompt, Generator& model,
                       const std::string& with) {
  if (!o.json) RETURN_IF_ERROR(print(o.prompt));
  std::vector<int32_t> held;
  RETURN_IF_ERROR(print_sampled(o, files, model, with, o.prompt, prompt,
                                /*turn=*/0, &held)
                      .status());
  if (!o.json && files.trained_length > 0 &&
      model.length() > files.trained_length)
    print_error(fmt::format(
        "The model was trained on sequences of {} tokens; text beyond that may "
        "be worse.\n",
        files.trained_length));
  return ok_status();
}

// Tokens of a conversation.
int64_t chat_context(const Options& o, const ModelFiles& files) {
  constexpr int64_t kUsual = 4096, kMost = 8192;
  if (o.context > 0) return o.context;
  return files.trained_length > 0 ? std::min(files.trained_length, kMost)
                                  : kUsual;
}

Status sample(const Options& o) {
  // The range that is checked before lets it pass.
  if (std::isnan(o.choice.temperature) || std::isnan(o.choice.top_p))
    return invalid_argument("--temperature and --top-p: must be numbers");
  const auto fs = posix_file_system();
  ASSIGN_OR_RETURN(ModelFiles files, find_model(*fs, o.model));
  auto bar = std::make_unique<ProgressBar>("loading");
  const LoadTick loaded = [&](uint64_t done, uint64_t all) {
    bar->show(done, all);
  };
  ASSIGN_OR_RETURN(const Weights weights, open_weights(*fs, files, loaded));
  std::vector<int32_t> prompt;
  if (!o.chat) {
    ASSIGN_OR_RETURN(prompt, first_tokens(o, files));
    RETURN_IF_ERROR(check_vocabulary(prompt, weights.model.vocab_size));
  }
  const auto backend = backend_of(o.compute);
  const kernels::Dtype dtype = dtype_of(o.compute, *backend);
  const int64_t context = o.chat
                              ? chat_context(o, files)
                              : static_cast<int64_t>(prompt.size()) + o.tokens;
  ASSIGN_OR_RETURN(const auto model,
                   Generator::load(weights, dtype, context, *backend));
  bar.reset();
  const std::string with =
      fmt::format("{}, {}", dtype == kernels::Dtype::kFp32 ? "fp32" : "bf16",
                  plural(backend->threads(), "thread"));
  if (o.chat) return answer(o, files, *model, with);
  return continue_prompt(o, files, prompt, *model, with);
}

void add_options(CLI::App& app, Options* o) {
  add_model_options(app, &o->model);
  app.add_option("--prompt", o->prompt,
                 "Text to continue; -: from the standard input. Default: the "
                 "beginning of a text");
  app.add_flag("--chat", o->chat,
               "Answer the prompt as a chat model, by its template; without a "
               "prompt, each line of the standard input");
  app.add_option("--system", o->system, "First message of a conversation")
      ->needs("--chat");
  app.add_option("--chat-template", o->chat_template,
                 "File with the template. Default: that in the model's folder")
      ->check(CLI::ExistingFile)
      ->needs("--chat");
  app.add_option("--context", o->context,
                 "Most tokens of a conversation. Default: those that the model "
                 "was trained with, at most 8192")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->needs("--chat");
  app.add_flag("--raw", o->raw,
               "Put no token that begins a text before the prompt");
  app.add_flag("--special", o->special,
               "Special tokens that are written out in the prompt, such as "
               "<|endoftext|>, become these tokens, as they do with --chat");
  app.add_option("--tokens", o->tokens, "At most so many")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  app.add_option("--temperature", o->choice.temperature,
                 "0: always the most likely token; 1: by the model's "
                 "probabilities")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  app.add_option("--top-k", o->choice.top_k,
                 "Only the most likely tokens; 0: all")
      ->check(CLI::Range(int64_t{0}, INT64_MAX))
      ->capture_default_str();
  app.add_option("--top-p", o->choice.top_p,
                 "Only the most likely tokens that have this probability "
                 "together")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--seed", o->seed,
                 "The same seed gives the same text on the same machine")
      ->capture_default_str();
  app.add_flag("--ignore-end", o->ignore_end,
               "Continue after a token that ends a text");
  add_compute_options(app, &o->compute);
  add_json_option(&app, &o->json);
}

}  // namespace

void add_sample_command(CLI::App& app, int* code) {
  auto o = std::make_shared<Options>();
  add_options(app, o.get());
  app.footer(R"(
Examples:
  remesh sample runs/latest --prompt "It was"
  remesh sample Llama-3.2-1B --prompt "The sea" --temperature 0 --tokens 100
  remesh sample Qwen3-0.6B --chat

The text goes to the standard output, the speed to the standard error. The run
may be training meanwhile, which this does not disturb: its newest state is read,
from the memory of this host or from the newest checkpoint.)");
  app.callback([&app, o, code] {
    o->has_prompt = app.count("--prompt") > 0;
    if (o->prompt == "-")
      o->prompt.assign(std::istreambuf_iterator<char>(std::cin), {});
    const Status status = sample(*o);
    *code = status.ok() ? kExitOk : exit_with(app.get_name(), status);
  });
}

}  // namespace remesh::sample
