// Regex: regular expressions over UTF-8, by PCRE2 with its just-in-time
// compiler.
//
// Patterns are those of tokenizer.json, written for the Oniguruma library: \d
// and \s know all of Unicode, and ^ and $ match at every line. Syntax that
// the two libraries read differently is refused: set operations and nested sets
// in brackets, the options m and s, {,n} and {n,m}+, \h, \w, \b, \K, \C, \G,
// \Q and \N. They differ in two more places: \s matches U+180E, which Unicode
// no longer counts as a space, only here, and with the option i a character
// never matches several, as "ß" matches "ss" there.
//
// Bytes that are not UTF-8 divide a text into texts of their own: no match
// contains one or looks across it.
//
// A Regex is immutable and may be used by any number of threads, each with a
// Matcher of its own.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "proto/base/status.h"

namespace remesh::tokenizer {

// Memory that matches of any Regex, one at a time, reuse.
class Matcher {
 public:
  Matcher();
  ~Matcher();
  Matcher(const Matcher&) = delete;
  Matcher& operator=(const Matcher&) = delete;

 private:
  friend class Regex;
  void* data_;
  void* context_;
};

class Regex {
 public:
  // Fails on an invalid pattern, naming it and the offset of the error.
  static Result<Regex> compile(const std::string& pattern);
  // The pattern sees bytes instead of characters.
  static Result<Regex> compile_for_bytes(const std::string& pattern);

  // Whether it matches, perhaps, where there is no text.
  bool may_match_nothing() const;

  // Calls found(begin, end), which may fail, for every match that is not empty,
  // from left to right. Fails if a match takes more steps or memory than is
  // reasonable for a tokenizer. `found` may use the matcher for other matches.
  template <typename Found>
  Status for_each_match(std::string_view text, Matcher& matcher,
                        const Found& found) const {
    for (size_t from = 0; from < text.size();) {
      std::string_view part = text.substr(from);
      part = part.substr(0, matchable_prefix(part));
      size_t begin = 0;
      size_t end = 0;
      while (end < part.size()) {
        ASSIGN_OR_RETURN(const bool any, next(part, matcher, &begin, &end));
        if (!any) break;
        RETURN_IF_ERROR(found(from + begin, from + end));
      }
      from += part.empty() ? 1 : part.size();
    }
    return ok_status();
  }

 private:
  struct Code;
  explicit Regex(std::shared_ptr<const Code> code) : code_(std::move(code)) {}
  static Result<Regex> compile_with(const std::string& pattern,
                                    unsigned options);
  size_t matchable_prefix(std::string_view text) const;
  // Finds the first match at *end or later that is not empty. REQUIRES: all of
  // the text is matchable.
  Result<bool> next(std::string_view text, Matcher& matcher, size_t* begin,
                    size_t* end) const;
  std::shared_ptr<const Code> code_;
};

}  // namespace remesh::tokenizer
