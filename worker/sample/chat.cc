#include "worker/sample/chat.h"

namespace remesh::sample {

Result<Chat> Chat::open(ModelFiles& files, const std::string& path,
                        const std::string& system) {
  Chat chat;
  chat.tokenizer_ = files.tokenizer.get();
  std::string file = path;
  if (file.empty()) {
    ASSIGN_OR_RETURN(file, data::ChatTemplate::find(files.folder));
  }
  ASSIGN_OR_RETURN(
      chat.template_,
      data::ChatTemplate::open(file, files.folder,
                               data::ChatTemplate::kMostSeconds, /*date=*/""));
  std::vector<int32_t> end;
  RETURN_IF_ERROR(chat.tokenizer_->encode(chat.template_->end_token(),
                                          {.special = true}, end));
  if (end.size() == 1) files.end.insert(end.front());
  if (!system.empty()) chat.add("system", system);
  return chat;
}

void Chat::add(const char* role, const std::string& text) {
  messages_.push_back({{"role", role}, {"content", text}});
}

Result<std::vector<int32_t>> Chat::ask(const std::string& message) {
  add("user", message);
  ASSIGN_OR_RETURN(
      const std::string text,
      template_->prompt(messages_.dump(
          -1, ' ', false, nlohmann::json::error_handler_t::replace)));
  std::vector<int32_t> tokens;
  RETURN_IF_ERROR(
      tokenizer_->encode(text, {.special = true, .continued = true}, tokens));
  if (tokens.empty())
    return invalid_argument(
        "the chat template makes no text of this conversation");
  return tokens;
}

void Chat::answered(const std::string& text) { add("assistant", text); }

}  // namespace remesh::sample
