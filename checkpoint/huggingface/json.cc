#include "checkpoint/huggingface/json.h"

#include <fmt/format.h>

#include <set>
#include <vector>

#include "checkpoint/huggingface/safetensors.h"
#include "proto/base/json_depth.h"

namespace remesh::huggingface {
namespace {

constexpr int kMaxDepth = 64;

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
  if (json_is_deeper(text, kMaxDepth))
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
    // Without "[json.exception.parse_error.101] ".
    const std::string_view what = e.what();
    return corrupt(
        fmt::format("{}: {}", name, what.substr(what.find("] ") + 2)));
  }
}

}  // namespace remesh::huggingface
