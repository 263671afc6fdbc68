#include "proto/base/json_reader.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "proto/base/text.h"

namespace remesh {

using nlohmann::json;

JsonReader::JsonReader(const json& object, std::string name, Code code)
    : object_(object), name_(std::move(name)), code_(code) {
  if (!object_.is_object()) fail("must be an object");
}

const json* JsonReader::find(const char* key) {
  asked_.insert(key);
  const auto it = object_.find(key);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

const char* JsonReader::any_of(std::initializer_list<const char*> keys) {
  for (const char* key : keys)
    if (find(key) != nullptr) return key;
  return *keys.begin();
}

int64_t JsonReader::integer(const char* key, int64_t absent, int64_t least,
                            int64_t most) {
  const json* const v = find(key);
  if (v == nullptr && absent >= least) return absent;
  if (v == nullptr) return missing(key), least;
  if (v->is_number_integer() && *v >= least && *v <= most)
    return v->get<int64_t>();
  return refuse(key, fmt::format("an integer from {} to {}", least, most)),
         least;
}

double JsonReader::number(const char* key, double absent) {
  const json* const v = find(key);
  if (v == nullptr && absent != 0) return absent;
  if (v == nullptr) return missing(key), 1;
  if (v->is_number()) return v->get<double>();
  return refuse(key, "a number"), 1;
}

bool JsonReader::flag(const char* key, bool absent) {
  const json* const v = find(key);
  if (v == nullptr) return absent;
  if (v->is_boolean()) return v->get<bool>();
  return refuse(key, "true or false"), false;
}

std::string JsonReader::text(const char* key, const char* absent) {
  const json* const v = find(key);
  if (v == nullptr && absent != nullptr) return absent;
  if (v == nullptr) return missing(key), std::string();
  if (v->is_string()) return v->get<std::string>();
  return refuse(key, "a string"), std::string();
}

const json& JsonReader::array(const char* key) {
  static const json kEmpty = json::array();
  const json* const v = find(key);
  if (v == nullptr) return missing(key), kEmpty;
  if (v->is_array()) return *v;
  return refuse(key, "an array"), kEmpty;
}

void JsonReader::refuse(const std::string& key, const std::string& allowed) {
  const auto it = object_.find(key);
  std::string value =
      it == object_.end()
          ? "missing"
          : it->dump(-1, ' ', true, json::error_handler_t::replace);
  if (value.size() > 100) value = value.substr(0, 100) + "...";
  fail(fmt::format("{} = {}: must be {}", key, value, allowed));
}

void JsonReader::refuse_unknown() {
  const std::vector<std::string> known(asked_.begin(), asked_.end());
  for (const auto& [key, value] : object_.items())
    if (!asked_.contains(key))
      fail(fmt::format("unknown key '{}'; known: {}", key, join(known)));
}

void JsonReader::fail(const std::string& problem) {
  if (problem_.ok())
    problem_ = Status(code_, name_.empty() ? problem : name_ + ": " + problem);
}

}  // namespace remesh
