#include "checkpoint/huggingface/reader.h"

namespace remesh::huggingface {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 31;

}  // namespace

int64_t Reader::integer(const char* key, int64_t absent) {
  const Json* const v = find(key);
  if (v == nullptr) {
    if (absent == 0) missing(key);
    return absent == 0 ? 1 : absent;
  }
  if (v->is_number_unsigned() && *v >= 1 && *v <= kMaxSize)
    return v->get<int64_t>();
  refuse(key, "an integer from 1 to 2^31");
  return 1;
}

double Reader::number(const char* key, double absent) {
  const Json* const v = find(key);
  if (v == nullptr) {
    if (absent == 0) missing(key);
    return absent == 0 ? 1 : absent;
  }
  if (v->is_number()) return v->get<double>();
  refuse(key, "a number");
  return 1;
}

bool Reader::flag(const char* key, bool absent) {
  const Json* const v = find(key);
  if (v == nullptr) return absent;
  if (!v->is_boolean()) refuse(key, "true or false");
  return v->is_boolean() && v->get<bool>();
}

std::string Reader::text(const char* key, const char* absent) {
  const Json* const v = find(key);
  if (v == nullptr) return absent;
  if (v->is_string()) return v->get<std::string>();
  refuse(key, "a string");
  return absent;
}

std::string Reader::token_id(const char* key) {
  const Json* const v = find(key);
  if (v == nullptr) return "";
  bool good = v->is_number_integer() || v->is_array();
  if (v->is_array())
    for (const Json& id : *v) good = good && id.is_number_integer();
  if (!good) refuse(key, "an integer or a list of integers");
  return v->dump();
}

void Reader::refuse(const char* key, const std::string& allowed) {
  const Json* const v = find(key);
  std::string value =
      v == nullptr ? "null"
                   : v->dump(-1, ' ', true, Json::error_handler_t::replace);
  if (value.size() > 100) value = value.substr(0, 100) + "...";
  fail(fmt::format("{} = {}: must be {}", key, value, allowed));
}

}  // namespace remesh::huggingface
