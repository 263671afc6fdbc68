// Chat: a conversation as the tokens that a chat model continues with its
// answer.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "worker/data/chat_template.h"
#include "worker/sample/model_files.h"

namespace remesh::sample {

class Chat {
 public:
  // With the template in that file, or if it is "" in the model's folder.
  // `system`: the first message, unless it is "". A template that asks gets the
  // date of today. Adds the token that ends an
  // answer to `files.end`. Fails like ChatTemplate::open() and find().
  static Result<Chat> open(ModelFiles& files, const std::string& path,
                           const std::string& system);

  // All tokens up to the beginning of the answer to `message`. Fails like
  // ChatTemplate::prompt() and Tokenizer::encode().
  Result<std::vector<int32_t>> ask(const std::string& message);
  // What the model answered to the last message.
  void answered(const std::string& text);

 private:
  void add(const char* role, const std::string& text);

  const tokenizer::Tokenizer* tokenizer_ = nullptr;
  std::unique_ptr<data::ChatTemplate> template_;
  nlohmann::json messages_ = nlohmann::json::array();
};

}  // namespace remesh::sample
