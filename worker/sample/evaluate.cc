#include "worker/sample/evaluate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <utility>

#include "proto/base/json_depth.h"
#include "worker/data/json_lines.h"

namespace remesh::sample {
namespace {

// log of the probability of `token`.
double log_probability(std::span<const float> logits, int32_t token) {
  const float largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits)
    sum += std::exp(static_cast<double>(x - largest));
  return static_cast<double>(logits[static_cast<size_t>(token)] - largest) -
         std::log(sum);
}

// Characters of UTF-8.
int64_t length_of(const std::string& text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (c & 0xC0) != 0x80; });
}

// Prompt and continuation as tokens. They are encoded together, and spaces
// between them belong to the continuation, which tokenizers put in front of
// words.
struct Encoded {
  std::vector<int32_t> prompt, continuation;
};

Result<Encoded> encode(const ModelFiles& files, const std::string& prompt,
                       const std::string& continuation) {
  const size_t end = prompt.find_last_not_of(" \t\n\r\v\f") + 1;
  const std::string context = prompt.substr(0, end);
  Encoded out;
  RETURN_IF_ERROR(files.tokenizer->encode(context, {}, out.prompt));
  std::vector<int32_t> all;
  RETURN_IF_ERROR(files.tokenizer->encode(
      context + prompt.substr(end) + continuation, {}, all));
  const size_t shared = std::min(out.prompt.size(), all.size());
  out.continuation.assign(all.begin() + static_cast<std::ptrdiff_t>(shared),
                          all.end());
  const auto& begin = context.empty() ? files.begin : files.text_begin;
  out.prompt.insert(out.prompt.begin(), begin.begin(), begin.end());
  return out;
}

// The prompt with each choice. Fails on a question that cannot be scored.
Result<std::vector<Encoded>> encode_choices(const Generator& model,
                                            const ModelFiles& files,
                                            const Question& q, int64_t number) {
  const auto bad = [&](const std::string& what) {
    return invalid_argument(fmt::format("question {}: {}", number, what));
  };
  std::vector<Encoded> out;
  for (const std::string& choice : q.choices) {
    ASSIGN_OR_RETURN(Encoded e, encode(files, q.prompt, choice));
    if (e.continuation.empty())
      return bad(
          fmt::format("the choice '{}' cannot be scored: with it the prompt "
                      "has no more tokens than without",
                      choice));
    RETURN_IF_ERROR(check_vocabulary(e.prompt, model.vocab_size()));
    RETURN_IF_ERROR(check_vocabulary(e.continuation, model.vocab_size()));
    if (e.prompt.empty()) return bad("has no token before a choice");
    const size_t length = e.prompt.size() + e.continuation.size();
    if (static_cast<int64_t>(length) > model.context())
      return bad(fmt::format("has {} tokens; at most {} are allowed (--window)",
                             length, model.context()));
    out.push_back(std::move(e));
  }
  return out;
}

}  // namespace

double TextScore::per_token() const {
  return nats / static_cast<double>(tokens);
}
double TextScore::perplexity() const { return std::exp(per_token()); }
double TextScore::bits_per_byte() const {
  return nats / static_cast<double>(bytes) / std::numbers::ln2;
}

Result<TextScore> score_text(
    Generator& model, const ModelFiles& files, std::string_view text,
    const std::function<void(int64_t, int64_t)>& tick) {
  std::vector<int32_t> tokens = files.begin;
  RETURN_IF_ERROR(files.tokenizer->encode(text, {}, tokens));
  RETURN_IF_ERROR(check_vocabulary(tokens, model.vocab_size()));
  if (tokens.size() < 2)
    return invalid_argument("the text has no token to predict");
  const auto all = static_cast<int64_t>(tokens.size()) - 1;
  TextScore out{.tokens = all, .bytes = static_cast<int64_t>(text.size())};
  const auto loss = [&](int64_t from, int64_t n) {
    return n == 0 ? 0
                  : model.loss(std::span(tokens).subspan(
                        static_cast<size_t>(from), static_cast<size_t>(n) + 1));
  };
  for (int64_t at = 0; at < all; at += model.window()) {
    const int64_t n = std::min(model.window(), all - at);
    const int64_t from = std::max<int64_t>(0, at + n - model.window());
    out.nats += loss(from, at + n - from) - loss(from, at - from);
    const auto nats = static_cast<float>(out.nats);
    RETURN_IF_ERROR(check_finite({&nats, 1}));
    tick(at + n, all);
  }
  return out;
}

Result<std::vector<Question>> parse_questions(std::string_view jsonl,
                                              const std::string& name) {
  std::vector<Question> out;
  for (int64_t line = 1; !jsonl.empty(); ++line) {
    const size_t end = std::min(jsonl.find('\n'), jsonl.size());
    const std::string_view text = jsonl.substr(0, end);
    jsonl.remove_prefix(std::min(end + 1, jsonl.size()));
    if (text.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto bad = [&](const std::string& what) {
      return corrupt(fmt::format("{}:{}: {}", name, line, what));
    };
    if (json_is_deeper(text, data::kMaxJsonDepth))
      return bad(fmt::format("nested more than {} deep", data::kMaxJsonDepth));
    const auto v = nlohmann::json::parse(text, nullptr, false);
    if (!v.is_object()) return bad("is no JSON object");
    Question q;
    if (!v.contains("prompt") || !v["prompt"].is_string())
      return bad("prompt: is required, a text");
    q.prompt = v["prompt"];
    if (!v.contains("choices") || !v["choices"].is_array() ||
        v["choices"].size() < 2)
      return bad("choices: is required, a list of at least two texts");
    for (const auto& c : v["choices"]) {
      if (!c.is_string() || c.get<std::string>().empty())
        return bad("choices: each must be a text that is not empty");
      q.choices.push_back(c);
    }
    const auto choices = static_cast<int64_t>(q.choices.size());
    if (!v.contains("answer") || !v["answer"].is_number_integer() ||
        v["answer"] < 0 || v["answer"] >= choices)
      return bad(fmt::format("answer: must be from 0 to {}", choices - 1));
    q.answer = v["answer"];
    out.push_back(std::move(q));
  }
  if (out.empty()) return corrupt(name + ": has no questions");
  return out;
}

Result<ChoiceScore> score_choices(
    Generator& model, const ModelFiles& files,
    const std::vector<Question>& questions,
    const std::function<void(int64_t, int64_t)>& tick) {
  const auto all = static_cast<int64_t>(questions.size());
  // Before hours of work, not after them.
  for (int64_t i = 0; i < all; ++i)
    RETURN_IF_ERROR(
        encode_choices(model, files, questions[static_cast<size_t>(i)], i + 1)
            .status());
  ChoiceScore out;
  for (const Question& q : questions) {
    ASSIGN_OR_RETURN(const std::vector<Encoded> encoded,
                     encode_choices(model, files, q, ++out.questions));
    std::vector<double> likelihood, by_length;
    for (size_t c = 0; c < encoded.size(); ++c) {
      const Encoded& e = encoded[c];
      model.truncate(0);
      std::span<const float> logits = model.extend(e.prompt);
      double sum = 0;
      for (size_t i = 0; i < e.continuation.size(); ++i) {
        RETURN_IF_ERROR(check_finite(logits));
        sum += log_probability(logits, e.continuation[i]);
        if (i + 1 < e.continuation.size())
          logits = model.extend({&e.continuation[i], 1});
      }
      likelihood.push_back(sum);
      by_length.push_back(sum / static_cast<double>(length_of(q.choices[c])));
    }
    const auto best = [](const std::vector<double>& v) {
      return std::max_element(v.begin(), v.end()) - v.begin();
    };
    out.right += best(likelihood) == q.answer ? 1 : 0;
    out.right_by_length += best(by_length) == q.answer ? 1 : 0;
    tick(out.questions, all);
  }
  return out;
}

}  // namespace remesh::sample
