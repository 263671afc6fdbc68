#include "worker/data/chat_template.h"

#include "tests/testing/allocations.h"
#include "tests/testing/expect.h"
#include "tests/unit/data/data_test_util.h"

namespace remesh::data {
namespace {

constexpr char kTemplate[] =
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}";

constexpr char kLine[] =
    R"({"messages": [{"role": "system", "content": "Be brief."},
 {"role": "user", "content": " Größe? "}, {"role": "assistant", "content": "10"},
 {"role": "user", "content": "<|end|>"}, {"role": "assistant", "content": "11"}]})";

// "text" of what the loss does not count, "[text]" of what it does.
std::string marked(const Conversation& c) {
  std::string out;
  for (const ChatPiece& p : c) out += p.target ? "[" + p.text + "]" : p.text;
  return out;
}

class ChatTemplateTest : public testing::Test {
 protected:
  std::string problem(const std::string& name, const std::string& text) {
    const auto made = ChatTemplate::open(dir_.write(name, text));
    return made.ok() ? "" : made.status().message();
  }
  TempDir dir_;
};

TEST_F(ChatTemplateTest, AnswersAreWhatFollowsThePromptForThem) {
  const auto chat =
      ChatTemplate::open(dir_.write("t.jinja", kTemplate)).value();
  const std::string want =
      "<|system|>\nBe brief.<|end|>\n<|user|>\nGröße?<|end|>\n<|assistant|>\n"
      "[10<|end|>\n]<|user|>\n<|end|><|end|>\n<|assistant|>\n[11<|end|>\n]";
  EXPECT_EQ(marked(chat->render(kLine, "f:1").value()), want);
  EXPECT_EQ(marked(chat->render(kLine, "f:1").value()), want) << "again";
  EXPECT_EQ(marked(chat->render(R"({"messages": []})", "f:2").value()), "");
  EXPECT_EQ(chat->prompt(R"([{"role": "user", "content": "Why?"}])").value(),
            "<|user|>\nWhy?<|end|>\n<|assistant|>\n");
  // A field of that name in the data is none of the template's.
  EXPECT_EQ(
      marked(
          chat->render(R"({"prompt": true, "messages": []})", "f:3").value()),
      "");
}

TEST_F(ChatTemplateTest, AnswersAreWhatTheTemplateMarks) {
  const auto chat =
      ChatTemplate::open(
          dir_.write(
              "t.jinja",
              "{% for m in messages %}{% if m.role == 'assistant' %}A:{% "
              "generation %}"
              "{{ m.content }}.{% endgeneration %}{% elif loop.first %}{% "
              "continue %}"
              "{% else %}U:{{ m.content | tojson }}{% endif %}{% endfor %}"))
          .value();
  EXPECT_EQ(marked(chat->render(kLine, "f:1").value()),
            "U:\" Größe? \"A:[10.]U:\"<|end|>\"A:[11.]");
}

TEST_F(ChatTemplateTest, TheTemplateOfATokenizerConfigIsFound) {
  for (
      const char* text :
      {R"({"chat_template": "{{ bos_token }}{{ eos_token }}|", "bos_token": "<s>",
            "eos_token": {"content": "</s>", "lstrip": false}})",
       R"({"chat_template": [{"name": "rag", "template": "no"}, {"name":
            "default", "template": "{{ bos_token }}{{ eos_token }}|"}],
            "bos_token": {"content": "<s>"}, "eos_token": "</s>"})"}) {
    const auto chat =
        ChatTemplate::open(dir_.write("tokenizer_config.json", text)).value();
    EXPECT_EQ(marked(chat->render(R"({"messages": []})", "f").value()),
              "<s></s>|");
  }
}

// As Qwen 3: thoughts are written before the last answer only, and the content
// of a message is trimmed.
TEST_F(ChatTemplateTest, AnswersOfATemplateThatRewritesEarlierOnesAreFound) {
  const auto chat = ChatTemplate::open(dir_.write("t.jinja", R"(
{%- for m in messages %}<|{{ m.role }}|>
{% set content = (m.content.split('</think>') | last).strip() -%}
{% if m.role == 'assistant' and loop.last %}<think>
{{ m.content.split('</think>')[0].split('<think>')[1] if '</think>' in m.content
}}</think>
{% endif %}{{ content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %})"))
                        .value();
  const auto text = [&](const std::string& first, const std::string& last) {
    const auto c = chat->render(
        R"({"messages": [{"role": "user", "content": "<|assistant|>\n"},
 {"role": "assistant", "content": ")" +
            first + R"("},
 {"role": "user", "content": "Why?"},
 {"role": "assistant", "content": ")" +
            last + R"("}]})",
        "f:1");
    return c.ok() ? marked(*c) : c.status().message();
  };
  for (const char* first : {"10", "  10\\n", "<think>so</think>10"})
    EXPECT_EQ(text(first, "11"),
              "<|user|>\n<|assistant|><|end|>\n<|assistant|>\n[10<|end|>\n]"
              "<|user|>\nWhy?<|end|>\n<|assistant|>\n"
              "[<think>\n</think>\n11<|end|>\n]")
        << first;
  EXPECT_HAS(text("10", "<think>a</think>11"),
             "[<think>\na</think>\n11<|end|>\n]");
}

TEST_F(ChatTemplateTest, ATemplateOfItsOwnHasTheTokensBesideIt) {
  const std::string path =
      dir_.write("chat_template.jinja", "{{ bos_token }}{{ eos_token }}|");
  const auto text = [&] {
    return marked((*ChatTemplate::open(path))
                      ->render(R"({"messages": []})", "f")
                      .value());
  };
  EXPECT_EQ(text(), "|");
  dir_.write("tokenizer_config.json",
             R"({"bos_token": "<s>", "eos_token": {"content": "</s>"}})");
  EXPECT_EQ(text(), "<s></s>|");
  EXPECT_EQ((*ChatTemplate::open(path))->end_token(), "</s>");
  dir_.write("tokenizer_config.json", "{");
  EXPECT_SAYS(ChatTemplate::open(path),
              "tokenizer_config.json: is no JSON object");
}

TEST_F(ChatTemplateTest, TheDateIsTheOneGiven) {
  const std::string path = dir_.write(
      "t.jinja", "{{ strftime_now('%d %b %Y %H:%M') }} {{ bos_token }}");
  const auto plain = ChatTemplate::open(path).value();
  const auto other =
      ChatTemplate::open(path, "", ChatTemplate::kMostSeconds, "2026-02-03")
          .value();
  const std::string line = R"({"messages": []})";
  EXPECT_EQ(marked(plain->render(line, "f").value()), "26 Jul 2024 00:00 ");
  EXPECT_EQ(marked(other->render(line, "f").value()), "03 Feb 2026 00:00 ");
  EXPECT_NE(plain->id(), other->id());
}

TEST_F(ChatTemplateTest, TokensAreThoseOfTheTokenizerInUse) {
  const TempDir tokenizer;
  tokenizer.write("tokenizer_config.json",
                  R"({"bos_token": "<b>", "eos_token": "<e>",
                      "chat_template": "not this one"})");
  const auto text = [&](const std::string& path, const std::string& folder) {
    const auto chat = ChatTemplate::open(path, folder);
    EXPECT_OK(chat);
    return marked((*chat)->render(R"({"messages": []})", "f").value());
  };
  const std::string alone =
      dir_.write("t.jinja", "{{ bos_token }}{{ eos_token }}|");
  EXPECT_EQ(text(alone, tokenizer / ""), "<b><e>|");
  EXPECT_EQ(text(alone, dir_ / "no_such_folder"), "|");
  // Also where the template comes with tokens of another tokenizer.
  const std::string config =
      dir_.write("tokenizer_config.json",
                 R"({"bos_token": "<s>", "eos_token": "</s>",
          "chat_template": "{{ bos_token }}{{ eos_token }}|"})");
  EXPECT_EQ(text(alone, tokenizer / ""), "<b><e>|");
  EXPECT_EQ(text(config, tokenizer / ""), "<b><e>|");
  EXPECT_EQ(text(alone, dir_ / "no_such_folder"), "<s></s>|");
  EXPECT_EQ(text(config, ""), "<s></s>|");
  EXPECT_EQ((*ChatTemplate::open(alone, tokenizer / ""))->end_token(), "<e>");
}

// A python3 that, like one under an 8-bit locale, takes text for UTF-8 only if
// it is told to.
TEST_F(ChatTemplateTest, TextIsUtf8InEveryLocale) {
  const std::string path = ::getenv("PATH");
  const std::string script = dir_.write(
      "python3", "#!/bin/sh\nPATH='" + path +
                     "'\ncase \" $* \" in *' -X utf8 '*) exec python3 \"$@\";; "
                     "esac\nexec env LC_ALL=C python3 -X utf8=0 \"$@\"\n");
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  ::setenv("PATH", (dir_ / ":" + path).c_str(), 1);
  const auto chat = ChatTemplate::open(dir_.write(
      "t.jinja", "{{ messages[0].content }} größer {{ 'größer' | length }}"));
  ::setenv("PATH", path.c_str(), 1);
  ASSERT_OK(chat);
  ASSERT_OK_AND(
      const auto text,
      (*chat)->render(R"({"messages": [{"content": "Größe\u20ac"}]})", "f:1"));
  EXPECT_EQ(marked(text), "Größe\u20ac größer 6");
}

// As they are given, by the template that is for them.
TEST_F(ChatTemplateTest, ToolsKeepTheirOrderAndHaveTheirTemplate) {
  const std::string default_template =
      "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
  const std::string line =
      R"({"messages": [{"role": "user", "content": "t"}],
          "tools": [{"type": "f", "name": {"unit": "C", "city": "Rome"}}]})";
  ASSERT_OK_AND(
      const auto both,
      ChatTemplate::open(dir_.write(
          "tokenizer_config.json",
          R"({"chat_template": [{"name": "default", "template": ")" +
              default_template +
              R"("}, {"name": "tool_use", "template": "{{ tools[0] | tojson }}"}]})")));
  EXPECT_EQ(marked(both->render(line, "f:1").value()),
            R"({"type": "f", "name": {"unit": "C", "city": "Rome"}})");
  EXPECT_EQ(marked(both->render(R"({"messages": [{"content": "t",
                                                  "role": "user"}]})",
                                "f:2")
                       .value()),
            "user:t;");
}

TEST_F(ChatTemplateTest, ToolsHaveTheAdditionalTemplate) {
  std::filesystem::create_directory(dir_ / "additional_chat_templates");
  dir_.write("additional_chat_templates/tool_use.jinja", "with tools");
  dir_.write("additional_chat_templates/rag.jinja", "{% for %}");
  const std::string path = dir_.write("chat_template.jinja", "without");
  const auto text = [&](const std::string& file, const char* more) {
    const auto chat = ChatTemplate::open(file);
    EXPECT_OK(chat);
    return marked(
        (*chat)
            ->render(std::string(R"({"messages": [])") + more + "}", "f:1")
            .value());
  };
  EXPECT_EQ(text(path, ""), "without");
  EXPECT_EQ(text(path, R"(, "tools": [])"), "with tools");
  // Another file is a template of its own.
  const std::string own = dir_.write("own.jinja", "own");
  EXPECT_EQ(text(own, R"(, "tools": [])"), "own");
}

TEST_F(ChatTemplateTest, DeepConversationsAreRefused) {
  const auto chat =
      ChatTemplate::open(dir_.write("t.jinja", kTemplate)).value();
  const std::string deep =
      std::string(300'000, '[') + std::string(300'000, ']');
  EXPECT_HAS(
      chat->render("{\"messages\": " + deep + "}", "f:7").status().message(),
      "f:7: nested more than 256 deep");
  EXPECT_HAS(problem("e.json", "{\"chat_template\": " + deep + "}"),
             "e.json: nested more than 256 deep");
}

TEST_F(ChatTemplateTest, ALineTakesNoMoreThanAFewTimesItsSize) {
  const auto chat =
      ChatTemplate::open(dir_.write("t.jinja", kTemplate)).value();
  std::string line =
      R"({"messages": [{"role": "user", "content": "a", "n": [0)";
  for (int i = 0; i < 1'000'000; ++i) line += ",0";
  line += "]}]}";
  reset_allocations();
  EXPECT_EQ(marked(chat->render(line, "f:1").value()), "<|user|>\na<|end|>\n");
  EXPECT_LT(most_allocated(), 4 * line.size());
}

TEST_F(ChatTemplateTest, ATemplateThatDoesNotEndIsStopped) {
  const std::string loops = dir_.write(
      "t.jinja",
      "{% for m in messages %}{% for i in range(100000) %}"
      "{% for k in range(100000) %}{% endfor %}{% endfor %}{% endfor %}");
  const auto chat = ChatTemplate::open(loops, "", 1).value();
  EXPECT_EQ(marked(chat->render(R"({"messages": []})", "f:1").value()), "");
  const Status late = chat->render(kLine, "f:2").status();
  EXPECT_EQ(late.code(), Code::kExhausted) << late.message();
  EXPECT_EQ(late.message(),
            "f:2: the chat template " + loops + ": takes over 1 s");
  EXPECT_FALSE(chat->render(R"({"messages": []})", "f:3").ok());
  // While it is compiled, in a function of Python itself.
  const std::string power = dir_.write("power.jinja", "{{ 7 ** (10 ** 9) }}");
  EXPECT_EQ(ChatTemplate::open(power, "", 1).status().message(),
            power + ": takes over 1 s");
}

TEST_F(ChatTemplateTest, EveryFailureIsALineAndNotTheEnd) {
  const auto why = [&](const std::string& text) {
    const auto chat = ChatTemplate::open(
        dir_.write("t.jinja", "{% if messages %}" + text + "{% endif %}"));
    EXPECT_OK(chat);
    const Status failed = (*chat)->render(kLine, "f:1").status();
    EXPECT_EQ(failed.code(), Code::kCorrupt) << failed.message();
    EXPECT_LACKS(failed.message(), "\n");
    EXPECT_OK((*chat)->render(R"({"messages": []})", "f:2"));
    return failed.message();
  };
  EXPECT_HAS(why("{% for i in range(1000) %}{{ 'x' * 100000 }}{% endfor %}"),
             "the text has over 67108864 characters");
  EXPECT_HAS(why("{{ 'x' * (10 ** 11) }}"), "needs over 4 GiB of memory");
  EXPECT_HAS(why("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
             "RecursionError");
  EXPECT_HAS(why("{{ 1 // (messages | length - 5) }}"), "ZeroDivisionError");
  EXPECT_HAS(why("{{ raise_exception('a\\nb') }}"), "a b");
}

TEST_F(ChatTemplateTest, WhatCannotBeRenderedIsNamed) {
  EXPECT_HAS(problem("a.jinja", "{% for %}"), "the template is invalid");
  EXPECT_HAS(problem("b.json", "{}"), "has no chat_template");
  EXPECT_HAS(problem("c.json", "[]"), "is no JSON object");
  EXPECT_HAS(problem("d.json", R"({"chat_template": 3})"),
             "has no chat_template");
  EXPECT_EQ(ChatTemplate::open(dir_ / "none").status().code(), Code::kNotFound);
  const auto chat =
      ChatTemplate::open(
          dir_.write("t.jinja",
                     "{% for m in messages %}{% if m.role not in ['user', "
                     "'assistant'] %}{{ raise_exception('who is ' + m.role) }}"
                     "{% endif %}{{ m.content }}{% if loop.last %}!"
                     "{% endif %}{% endfor %}"))
          .value();
  const auto why = [&](const char* line) {
    const auto made = chat->render(line, "chats.jsonl:7");
    EXPECT_EQ(made.status().code(), Code::kCorrupt);
    return made.status().message();
  };
  EXPECT_HAS(why(kLine), "chats.jsonl:7: the chat template");
  EXPECT_HAS(why(kLine), "who is system");
  EXPECT_HAS(why("{"), "chats.jsonl:7: is no JSON object with a list");
  EXPECT_HAS(why(R"({"messages": 3})"), "is no JSON object with a list");
  EXPECT_HAS(why(R"({"messages": [3]})"), "refuses it");
  // The last message's text has an end that it has not before others.
  EXPECT_HAS(why(R"({"messages": [{"role": "assistant", "content": "a"},
                          {"role": "user", "content": "b"}]})"),
             "{% generation %}");
  // It continues.
  EXPECT_EQ(marked(chat->render(R"({"messages": [{"role": "user", "content":
                                "x"}]})",
                                "f")
                       .value()),
            "x!");
}

}  // namespace
}  // namespace remesh::data
