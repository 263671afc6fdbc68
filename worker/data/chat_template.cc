#include "worker/data/chat_template.h"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "proto/base/file_system.h"
#include "proto/base/json_depth.h"
#include "worker/data/chat_template_py.h"
#include "worker/data/json_lines.h"

namespace remesh::data {
namespace {

// Templates print objects, such as tools, in the order in which they are given.
using Json = nlohmann::ordered_json;

constexpr uint64_t kMostBytes = uint64_t{64} << 20;
constexpr char kConfigName[] = "tokenizer_config.json";
constexpr char kTemplateName[] = "chat_template.jinja";
// Beside kTemplateName; the templates with other names are not needed here.
constexpr char kToolUseName[] = "additional_chat_templates/tool_use.jinja";

// The text in a field of an object; "" if there is none.
std::string text_in(const Json& object, const char* key) {
  const auto at = object.find(key);
  return at != object.end() && at->is_string() ? at->get<std::string>() : "";
}

// "bos_token": "<s>", or {"content": "<s>", ...}.
std::string token_text(const Json& config, const char* key) {
  const auto at = config.find(key);
  return at != config.end() && at->is_object() ? text_in(*at, "content")
                                               : text_in(config, key);
}

// A template of a list of named ones, of which "tool_use" is for conversations
// with tools; alone it is the default.
std::string template_text(const Json& config, std::string_view name) {
  const auto at = config.find("chat_template");
  if (at != config.end() && at->is_array())
    for (const Json& named : *at)
      if (named.is_object() && text_in(named, "name") == name)
        return text_in(named, "template");
  return name == "default" ? text_in(config, "chat_template") : "";
}

Result<Json> read_config(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text,
                   read_file(*posix_file_system(), path, kMostBytes));
  if (json_is_deeper(text, kMaxJsonDepth))
    return corrupt(
        fmt::format("{}: nested more than {} deep", path, kMaxJsonDepth));
  Json config = Json::parse(text, nullptr, /*exceptions=*/false);
  if (!config.is_object()) return corrupt(path + ": is no JSON object");
  return config;
}

// The file with the tokens that a template refers to: that of the tokenizer,
// or else the template's own or the one beside it. "": there is none.
std::string tokens_file(const std::string& path, const std::string& folder) {
  const auto fs = posix_file_system();
  std::string file = path_join(folder, kConfigName);
  if (!folder.empty() && fs->exists(file)) return file;
  if (path.ends_with(".json")) return path;
  file = path_join(parent_path(path), kConfigName);
  return fs->exists(file) ? file : "";
}

Result<std::string> settings_of(const std::string& path,
                                const std::string& tokenizer_folder) {
  Json settings = {{"bos_token", ""}, {"eos_token", ""}, {"template", ""}};
  if (path.ends_with(".json")) {
    ASSIGN_OR_RETURN(const Json config, read_config(path));
    settings["template"] = template_text(config, "default");
    const std::string with_tools = template_text(config, "tool_use");
    if (!with_tools.empty()) settings["tool_use"] = with_tools;
  } else {
    const auto fs = posix_file_system();
    ASSIGN_OR_RETURN(settings["template"], read_file(*fs, path, kMostBytes));
    const std::string with_tools = path_join(parent_path(path), kToolUseName);
    if (std::filesystem::path(path).filename() == kTemplateName &&
        fs->exists(with_tools)) {
      ASSIGN_OR_RETURN(settings["tool_use"],
                       read_file(*fs, with_tools, kMostBytes));
    }
  }
  if (const std::string file = tokens_file(path, tokenizer_folder);
      !file.empty()) {
    ASSIGN_OR_RETURN(const Json config, read_config(file));
    for (const char* key : {"bos_token", "eos_token"})
      settings[key] = token_text(config, key);
  }
  if (settings["template"] == "")
    return invalid_argument(path + ": has no chat_template");
  return settings.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

Result<std::string> ChatTemplate::find(const std::string& folder) {
  if (folder.empty())
    return not_found(
        "the tokenizer has no chat template; give one with --chat-template");
  for (const char* name : {kTemplateName, kConfigName}) {
    const std::string path = path_join(folder, name);
    if (posix_file_system()->exists(path)) return path;
  }
  return not_found(folder +
                   ": has no chat template (chat_template.jinja or "
                   "tokenizer_config.json); give one with --chat-template");
}

Result<std::unique_ptr<ChatTemplate>> ChatTemplate::open(
    const std::string& path, const std::string& tokenizer_folder,
    int most_seconds, const std::string& date) {
  ASSIGN_OR_RETURN(const std::string settings,
                   settings_of(path, tokenizer_folder));
  std::unique_ptr<ChatTemplate> out(new ChatTemplate(path, most_seconds, date));
  out->id_ = xxh128_text(date == kChatDate ? settings : settings + date);
  out->end_token_ = text_in(Json::parse(settings), "eos_token");
  RETURN_IF_ERROR(out->start(settings));
  return out;
}

ChatTemplate::~ChatTemplate() {
  if (socket_ >= 0) ::close(socket_);  // at which it ends
  if (pid_ > 0) ::waitpid(pid_, nullptr, 0);
}

Status ChatTemplate::start(const std::string& settings) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0)
    return errno_error("start python3", errno);
  socket_ = ends[0];
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  // Requests are UTF-8, whatever the locale says.
  std::string words[] = {"python3",
                         "-I",
                         "-X",
                         "utf8",
                         "-c",
                         kChatTemplatePy,
                         std::to_string(most_seconds_),
                         date_};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const int failed = ::posix_spawnp(&pid_, "python3", &actions, nullptr,
                                    arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  if (failed != 0) {
    pid_ = -1;
    return unavailable(path_ +
                       ": chat templates need python3, which cannot be "
                       "started");
  }
  RETURN_IF_ERROR(send(settings));
  const auto answer = receive();
  if (answer.status().code() == Code::kExhausted)
    return answer.status().with_context(path_);
  if (!answer.ok())
    return unavailable(path_ +
                       ": chat templates need python3 with jinja2 "
                       "(apt install python3-jinja2)");
  const Json v = Json::parse(*answer, nullptr, /*exceptions=*/false);
  if (!v.contains("error")) return ok_status();
  return invalid_argument(fmt::format("{}: the template is invalid: {}", path_,
                                      v["error"].get<std::string>()));
}

Status ChatTemplate::send(std::string_view line) {
  std::string text;
  text.reserve(line.size() + 1);
  text = line;
  // In JSON they can only stand between values.
  std::ranges::replace_if(
      text, [](char c) { return c == '\n' || c == '\r'; }, ' ');
  text += '\n';
  for (size_t done = 0; done < text.size();) {
    const ssize_t n =
        ::send(socket_, text.data() + done, text.size() - done, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno_error("write to python3", errno);
    done += static_cast<size_t>(n);
  }
  return ok_status();
}

Result<std::string> ChatTemplate::receive() {
  std::array<char, 1 << 16> portion;
  for (size_t searched = 0;;) {
    const size_t end = received_.find('\n', searched);
    if (end != std::string::npos) {
      std::string line = received_.substr(0, end);
      received_.erase(0, end + 1);
      return line;
    }
    const ssize_t n = ::recv(socket_, portion.data(), portion.size(), 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno_error("read from python3", errno);
    if (n == 0) return ended();
    searched = received_.size();
    received_.append(portion.data(), static_cast<size_t>(n));
  }
}

// Why python3 has closed its end.
Status ChatTemplate::ended() {
  int how = 0;
  if (pid_ > 0) ::waitpid(pid_, &how, 0);
  pid_ = -1;
  if (WIFSIGNALED(how) && WTERMSIG(how) == SIGALRM)
    return exhausted(fmt::format("takes over {} s", most_seconds_));
  return unavailable("python3 ended");
}

Result<Conversation> ChatTemplate::render(std::string_view line,
                                          const std::string& place) {
  if (json_is_deeper(line, kMaxJsonDepth))
    return corrupt(
        fmt::format("{}: nested more than {} deep", place, kMaxJsonDepth));
  if (!read_field(line, "messages").is_list)
    return corrupt(place + ": is no JSON object with a list of \"messages\"");
  return ask(fmt::format(R"({{"conversation": {}}})", line), place);
}

Result<std::string> ChatTemplate::prompt(std::string_view messages) {
  ASSIGN_OR_RETURN(
      const Conversation text,
      ask(fmt::format(
              R"({{"conversation": {{"messages": {}}}, "prompt": true}})",
              messages),
          "the conversation"));
  return text.empty() ? "" : text.front().text;
}

Result<Conversation> ChatTemplate::ask(const std::string& request,
                                       const std::string& place) {
  RETURN_IF_ERROR(send(request));
  const auto answer = receive();
  if (!answer.ok())
    return answer.status().with_context(
        fmt::format("{}: the chat template {}", place, path_));
  const Json v = Json::parse(*answer, nullptr, /*exceptions=*/false);
  if (!v.is_object() || !v.contains("pieces"))
    return corrupt(
        fmt::format("{}: the chat template {} refuses it: {}", place, path_,
                    v.is_object() ? text_in(v, "error") : "no answer"));
  Conversation out;
  for (const Json& piece : v["pieces"])
    out.push_back({piece[0].get<std::string>(), piece[1].get<bool>()});
  return out;
}

}  // namespace remesh::data
