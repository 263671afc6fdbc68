// ChatTemplate: conversations as the text that a chat model is trained on, by a
// Jinja template as Hugging Face's models have in tokenizer_config.json.
//
// python3 renders it with the package jinja2, in a process of its own that
// lives as long as the object; chat_template.py says how. A conversation may
// take 60 s, 4 GiB of memory and 64 Mi characters of text. Not thread-safe.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace remesh::data {

struct ChatPiece {
  std::string text;
  bool target = false;  // an answer, which the loss counts
};
using Conversation = std::vector<ChatPiece>;

// The date that a template is told, unless another is given, so that the same
// conversations give the same text. It is the one that Llama 3's templates
// write where they cannot ask.
inline constexpr char kChatDate[] = "2024-07-26";

class ChatTemplate {
 public:
  static constexpr int kMostSeconds = 60;

  // `path`: a tokenizer_config.json, or a file with the template alone, such as
  // chat_template.jinja, which has that of conversations with tools in
  // additional_chat_templates/tool_use.jinja beside it. bos_token and eos_token
  // are those of the tokenizer_config.json in `tokenizer_folder`, or, without
  // one, of `path` or the file beside it. NotFound without the file,
  // InvalidArgument if it has no template or an invalid one, Unavailable
  // without python3 or jinja2, Exhausted if it takes over `most_seconds`.
  // `date`: what strftime_now() writes, as in kChatDate; "": the time of now.
  static Result<std::unique_ptr<ChatTemplate>> open(
      const std::string& path, const std::string& tokenizer_folder = "",
      int most_seconds = kMostSeconds, const std::string& date = kChatDate);
  ~ChatTemplate();
  ChatTemplate(const ChatTemplate&) = delete;
  ChatTemplate& operator=(const ChatTemplate&) = delete;

  // The file with the template in a model's folder. NotFound if it has none.
  static Result<std::string> find(const std::string& folder);

  // A hash of the template, the tokens it refers to and the date, 32 hex
  // digits.
  const std::string& id() const { return id_; }

  // `line`: a JSON object with "messages", a list of {"role", "content"}, and
  // perhaps "tools". Corrupt, naming `place`, if it is none or the template
  // refuses it; Exhausted if that takes too long, after which every call fails.
  Result<Conversation> render(std::string_view line, const std::string& place);
  // The text that a model continues with its answer to the last of these
  // messages, a JSON list. Fails likewise.
  Result<std::string> prompt(std::string_view messages);
  // What the settings name as the token that ends a text; "" if they do not.
  const std::string& end_token() const { return end_token_; }

 private:
  ChatTemplate(std::string path, int most_seconds, std::string date)
      : path_(std::move(path)),
        date_(std::move(date)),
        most_seconds_(most_seconds) {}
  Status start(const std::string& settings);
  Result<Conversation> ask(const std::string& request,
                           const std::string& place);
  Status send(std::string_view line);
  Result<std::string> receive();
  Status ended();

  std::string path_, date_, id_, end_token_;
  int most_seconds_;
  pid_t pid_ = -1;
  int socket_ = -1;
  std::string received_;
};

}  // namespace remesh::data
