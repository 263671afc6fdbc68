// Reader: values of a JSON object by name, with errors that name key, value and
// what is allowed. Null is absent. The first problem is kept, so that one check
// covers many values. Private to this folder.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

#include "checkpoint/huggingface/json.h"

namespace remesh::huggingface {

class Reader {
 public:
  // `json` must outlive the reader.
  Reader(const Json& json, std::string name)
      : json_(json), name_(std::move(name)) {}

  // nullptr when absent.
  const Json* find(const char* key) const {
    const auto it = json_.find(key);
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }
  // `absent`: the value where there is none; 0: that is a problem.
  int64_t integer(const char* key, int64_t absent);
  double number(const char* key, double absent);
  bool flag(const char* key, bool absent);
  std::string text(const char* key, const char* absent);
  // An integer or a list of integers, as JSON; "" when absent.
  std::string token_id(const char* key);

  void refuse(const char* key, const std::string& allowed);
  void fail(const std::string& problem) {
    if (problem_.ok()) problem_ = invalid_argument(name_ + ": " + problem);
  }
  // Takes over the problem of a reader of an inner object.
  void fail_as(const Reader& inner) {
    if (problem_.ok()) problem_ = inner.problem_;
  }
  const Status& problem() const { return problem_; }
  const std::string& name() const { return name_; }

 private:
  void missing(const char* key) { fail(fmt::format("{} is missing", key)); }

  const Json& json_;
  std::string name_;
  Status problem_;
};

}  // namespace remesh::huggingface
