// JsonReader: values of a JSON object by name, with errors that name key, value
// and what is allowed. Null is absent. The first problem is kept, so that one
// check covers many values. A library of its own, like json_output.h.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>

#include "proto/base/status.h"

namespace remesh {

class JsonReader {
 public:
  // `object` must outlive the reader. Problems begin with `name`, if there is
  // one, and have this code. It is one if `object` is of another kind.
  JsonReader(const nlohmann::json& object, std::string name,
             Code code = Code::kInvalidArgument);

  // nullptr when absent.
  const nlohmann::json* find(const char* key);
  // The first of the keys that is present, or else the first.
  const char* any_of(std::initializer_list<const char*> keys);
  // `absent`: the value where there is none; below `least`: that is a problem.
  int64_t integer(const char* key, int64_t absent, int64_t least = 1,
                  int64_t most = int64_t{1} << 31);
  double number(const char* key, double absent);  // 0: that is a problem
  bool flag(const char* key, bool absent);
  // nullptr: absence is a problem.
  std::string text(const char* key, const char* absent);
  const nlohmann::json& array(const char* key);  // absence is a problem

  void refuse(const std::string& key, const std::string& allowed);
  // Keys that nobody asked for.
  void refuse_unknown();
  void fail(const std::string& problem);
  // Takes over the problem of a reader of an inner object.
  void fail_as(const JsonReader& inner) {
    if (problem_.ok()) problem_ = inner.problem_;
  }
  const Status& problem() const { return problem_; }
  const std::string& name() const { return name_; }

 private:
  void missing(const char* key) { fail(std::string(key) + " is missing"); }

  const nlohmann::json& object_;
  std::string name_;
  Code code_;
  std::set<std::string> asked_;
  Status problem_;
};

}  // namespace remesh
