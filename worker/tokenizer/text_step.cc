#include "worker/tokenizer/text_step.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "proto/base/check.h"

namespace remesh::tokenizer {
namespace {

// Steps of a hostile file may double a text again and again. The longest form
// of a character has 11 times its bytes.
Status check_growth(size_t before, size_t after) {
  const size_t most =
      std::min(size_t{INT32_MAX}, 16 * before + (size_t{1} << 20));
  if (after <= most) return ok_status();
  return invalid_argument(
      fmt::format("the tokenizer makes a text of {} bytes longer than {} bytes",
                  before, most));
}

}  // namespace

Status apply_steps(const std::vector<TextStep>& steps, TextEdges edges,
                   Matcher& matcher, std::string_view* text,
                   std::string* held) {
  if (steps.empty()) return ok_status();
  *held = *text;
  for (const TextStep& step : steps) {
    RETURN_IF_ERROR(step(edges, matcher, *held));
    RETURN_IF_ERROR(check_growth(text->size(), held->size()));
  }
  *text = *held;
  return ok_status();
}

TextStep to_normal_form(NormalForm form) {
  return [form](TextEdges, Matcher&, std::string& text) {
    text = normalized(text, form);
    return ok_status();
  };
}

TextStep to_lowercase() {
  return [](TextEdges, Matcher&, std::string& text) {
    text = lowercase(text);
    return ok_status();
  };
}

TextStep strip(bool left, bool right) {
  return [left, right](TextEdges edges, Matcher&, std::string& text) {
    if (right && edges.ends) text.resize(text.size() - trailing_space(text));
    if (left && edges.begins) text.erase(0, leading_space(text));
    return ok_status();
  };
}

TextStep replace(std::string from, std::string to) {
  CHECK(!from.empty());
  return [from = std::move(from), to = std::move(to)](
             TextEdges, Matcher&, std::string& text) -> Status {
    std::string out;
    out.reserve(text.size() + text.size() / 2);
    size_t at = 0;
    for (size_t found; (found = text.find(from, at)) != std::string::npos;
         at = found + from.size()) {
      out.append(text, at, found - at).append(to);
      RETURN_IF_ERROR(check_growth(text.size(), out.size()));
    }
    text = std::move(out.append(text, at));
    return ok_status();
  };
}

TextStep replace(Regex from, std::string to) {
  return [from = std::move(from), to = std::move(to)](
             TextEdges, Matcher& matcher, std::string& text) -> Status {
    std::string out;
    size_t at = 0;
    RETURN_IF_ERROR(
        from.for_each_match(text, matcher, [&](size_t begin, size_t end) {
          out.append(text, at, begin - at).append(to);
          at = end;
          return check_growth(text.size(), out.size());
        }));
    text = std::move(out.append(text, at));
    return ok_status();
  };
}

TextStep prepend(std::string prefix, bool once) {
  return [prefix = std::move(prefix), once](TextEdges edges, Matcher&,
                                            std::string& text) {
    if (edges.begins && !text.empty() && !(once && text.starts_with(prefix)))
      text.insert(0, prefix);
    return ok_status();
  };
}

}  // namespace remesh::tokenizer
