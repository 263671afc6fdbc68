// AddedTokens: tokens that are found in a text by their text, before what is
// between them is divided into pieces.
//
// Immutable after it is filled; any number of threads may then use one.
#pragma once

#include <bitset>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::tokenizer {

struct AddedToken {
  int32_t id = 0;
  bool special = false;      // only found if the caller asks for it
  bool strip_left = false;   // takes the white space before it
  bool strip_right = false;  // and that after it
  bool single_word = false;  // not beside a character of a word
};

class AddedTokens {
 public:
  using Tokens = std::map<std::string, AddedToken, std::less<>>;

  // Of two tokens with the same text the first counts. REQUIRES: it is not
  // empty.
  void add(const std::string& text, const AddedToken& token);
  bool contains(std::string_view text) const { return tokens_.contains(text); }
  const Tokens& tokens() const { return tokens_; }

  // Finds tokens from left to right, the longest of several at a place, and
  // appends them to `out`. Calls between(part, after, before) for each part of
  // the text between them that is not empty: whether a token is in front of it
  // and behind it. `between` may append to `out`, and may fail. Special tokens
  // are part of the text unless `special`.
  template <typename Between>
  Status divide(std::string_view text, bool special, std::vector<int32_t>& out,
                const Between& between) const {
    size_t begin = 0;  // of the text after the last token
    for (size_t at = 0; !tokens_.empty() && at < text.size();) {
      const auto* found = first_bytes_[static_cast<unsigned char>(text[at])]
                              ? longest_at(text.substr(at), special)
                              : nullptr;
      if (found == nullptr) {
        ++at;
        continue;
      }
      const AddedToken& token = found->second;
      const size_t end = at + found->first.size();
      if (token.single_word && (ends_in_word(text.substr(0, at)) ||
                                begins_in_word(text.substr(end)))) {
        at = end;
        continue;
      }
      std::string_view before = text.substr(begin, at - begin);
      if (token.strip_left) before.remove_suffix(trailing_space(before));
      if (!before.empty())
        RETURN_IF_ERROR(between(before, begin > 0, /*before=*/true));
      out.push_back(token.id);
      at = end;
      if (token.strip_right) at += leading_space(text.substr(at));
      begin = at;
    }
    const std::string_view rest = text.substr(begin);
    return rest.empty() ? ok_status()
                        : between(rest, begin > 0, /*before=*/false);
  }

 private:
  // The longest token that the text begins with, or null.
  const Tokens::value_type* longest_at(std::string_view text,
                                       bool special) const;

  Tokens tokens_;
  std::bitset<256> first_bytes_;
};

}  // namespace remesh::tokenizer
