#include "checkpoint/huggingface/json.h"

#include <fmt/format.h>

#include <set>
#include <vector>

#include "checkpoint/huggingface/safetensors.h"

namespace remesh::huggingface {
namespace {

constexpr int kMaxDepth = 64;

// Whether brackets outside of strings are nested too deep: the parser would
// keep every one of them.
bool too_deep(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string && c == '\\') ++i;
    if (c == '"') in_string = !in_string;
    if (in_string) continue;
    if (c == '[' || c == '{') ++depth;
    if (c == ']' || c == '}') --depth;
    if (depth > kMaxDepth) return true;
  }
  return false;
}

// Sees each key while a text is parsed. False skips the value: the text is
// refused anyway.
class Watch {
 public:
  bool operator()(int depth, Json::parse_event_t event, const Json& value) {
    using Event = Json::parse_event_t;
    if (event == Event::object_start) {
      keys_.resize(static_cast<size_t>(depth));
      keys_.emplace_back();
    } else if (event == Event::key) {
      keys_.resize(static_cast<size_t>(depth));
      const auto& key = value.get_ref<const std::string&>();
      if (!keys_.back().insert(key).second)
        problem_ = printable(key) + " appears twice";
    }
    return problem_.empty();
  }
  const std::string& problem() const { return problem_; }

 private:
  std::vector<std::set<std::string>> keys_;  // of each open object, by depth
  std::string problem_;
};

}  // namespace

Result<Json> parse_json(std::string_view text, const std::string& name) {
  if (too_deep(text))
    return corrupt(
        fmt::format("{}: nested more than {} deep", name, kMaxDepth));
  Watch watch;
  try {
    Json json =
        Json::parse(text, [&](int depth, Json::parse_event_t event, Json& v) {
          return watch(depth, event, v);
        });
    if (!watch.problem().empty()) return corrupt(name + ": " + watch.problem());
    if (!json.is_object()) return corrupt(name + ": must be a JSON object");
    return json;
  } catch (const Json::exception& e) {
    return corrupt(fmt::format("{}: {}", name, e.what()));
  }
}

}  // namespace remesh::huggingface
