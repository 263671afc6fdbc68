#include "worker/sample/chat.h"

#include <fmt/chrono.h>

#include <ctime>

#include "tests/testing/expect.h"
#include "tests/unit/huggingface/small_folder.h"
#include "tests/unit/tokenizer/small_models.h"

namespace remesh::sample {
namespace {

constexpr char kSettings[] =
    R"({"eos_token": "<|endoftext|>", "chat_template":
"{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"})";

struct ChatModel {
  ChatModel() : folder(huggingface::Dtype::kFp32) {
    folder.put("tokenizer.json", tokenizer::byte_level().dump());
  }
  ModelFiles files() const {
    return find_model(*fs, {.path = folder.path()}).value();
  }
  std::unique_ptr<FileSystem> fs = posix_file_system();
  huggingface::SmallFolder folder;
};

TEST(Chat, IsTheWholeConversationByTheModelsTemplate) {
  const ChatModel m;
  m.folder.put("tokenizer_config.json", kSettings);
  ModelFiles files = m.files();
  EXPECT_EQ(files.folder, m.folder.path());
  files.end.clear();
  Chat chat = Chat::open(files, "", "Be brief.").value();
  const int32_t end = files.tokenizer->end_of_text();
  EXPECT_EQ(files.end, std::set<int32_t>{end});
  const auto text = [&](const std::vector<int32_t>& tokens) {
    return files.tokenizer->decode(tokens).value();
  };
  const auto first = chat.ask("Größe?").value();
  EXPECT_EQ(std::count(first.begin(), first.end(), end), 2);
  const std::string one =
      "system: Be brief.\n<|endoftext|>\nuser: Größe?\n<|endoftext|>\n"
      "assistant:";
  EXPECT_EQ(text(first), one);
  chat.answered("10");
  EXPECT_EQ(text(chat.ask("Sure?").value()),
            one + " 10\n<|endoftext|>\nuser: Sure?\n<|endoftext|>\nassistant:");
}

TEST(Chat, ATemplateIsToldTheDateOfToday) {
  const ChatModel m;
  m.folder.put("tokenizer_config.json",
               R"({"chat_template": "{{ strftime_now('%Y-%m-%d') }}"})");
  const auto today = [] {
    return fmt::format("{:%Y-%m-%d}", fmt::localtime(std::time(nullptr)));
  };
  ModelFiles files = m.files();
  const std::string before = today();
  Chat chat = Chat::open(files, "", "").value();
  const std::string text =
      files.tokenizer->decode(chat.ask("a").value()).value();
  EXPECT_TRUE(text == before || text == today()) << text;
}

TEST(Chat, ATemplateFromElsewhereHasTheModelsTokens) {
  const ChatModel m;
  m.folder.put("tokenizer_config.json", kSettings);
  const testing::TempDir elsewhere;
  const std::string path = elsewhere.path() + "/own.jinja";
  testing::write_whole(path, "{{ messages[0].content }}{{ eos_token }}");
  ModelFiles files = m.files();
  files.end.clear();
  Chat chat = Chat::open(files, path, "").value();
  const int32_t end = files.tokenizer->end_of_text();
  EXPECT_EQ(files.end, std::set<int32_t>{end});
  EXPECT_EQ(chat.ask("a").value(), (std::vector<int32_t>{'a', end}));
}

TEST(Chat, NeedsATemplate) {
  const ChatModel m;
  ModelFiles files = m.files();
  EXPECT_SAYS(Chat::open(files, "", ""), "has no chat template");
  m.folder.put("own.jinja", "{{ raise_exception('not a word') }}");
  Chat chat = Chat::open(files, m.folder.path() + "/own.jinja", "").value();
  const Status refused = chat.ask("Hello").status();
  EXPECT_EQ(refused.code(), Code::kCorrupt);
  EXPECT_SAYS(refused, "not a word");
  m.folder.put("none.jinja", "{% for m in messages %}{% endfor %}");
  Chat none = Chat::open(files, m.folder.path() + "/none.jinja", "").value();
  EXPECT_EQ(none.ask("").status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace remesh::sample
