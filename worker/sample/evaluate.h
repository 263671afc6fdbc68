// How well a model predicts given text, scored as lm-evaluation-harness
// (github.com/EleutherAI/lm-evaluation-harness) does, so that figures compare.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "worker/sample/generator.h"
#include "worker/sample/model_files.h"

namespace remesh::sample {

struct TextScore {
  int64_t tokens = 0;
  int64_t bytes = 0;  // of the text
  double nats = 0;    // -log of its probability
  double per_token() const;
  double perplexity() const;     // of a token
  double bits_per_byte() const;  // comparable between tokenizers
};

// Each token is predicted once: from the tokens before it in its window, and
// the last one before the window. Windows do not overlap, but the last one is
// as long as the others, so that its tokens have as much before them.
// `tick`: tokens so far, and in all. Fails like check_finite().
Result<TextScore> score_text(Generator& model, const ModelFiles& files,
                             std::string_view text,
                             const std::function<void(int64_t, int64_t)>& tick);

// A question of which one answer is right.
struct Question {
  std::string prompt;
  std::vector<std::string> choices;
  int64_t answer = 0;
};

// One JSON object a line: {"prompt": TEXT, "choices": [TEXT, ...], "answer":
// index of the right one from 0}. Corrupt, naming the line and what is wrong.
Result<std::vector<Question>> parse_questions(std::string_view jsonl,
                                              const std::string& name);

struct ChoiceScore {
  int64_t questions = 0;
  int64_t right = 0;            // the likeliest choice is the answer
  int64_t right_by_length = 0;  // likeliest by the character
};

// Fails, before the first is scored, if a question is longer than the model's
// context or cannot be scored, and like check_finite().
Result<ChoiceScore> score_choices(
    Generator& model, const ModelFiles& files,
    const std::vector<Question>& questions,
    const std::function<void(int64_t, int64_t)>& tick);

}  // namespace remesh::sample
