#include "worker/tokenizer/added_tokens.h"

#include <algorithm>

#include "proto/base/check.h"

namespace remesh::tokenizer {

void AddedTokens::add(const std::string& text, const AddedToken& token) {
  CHECK(!text.empty());
  first_bytes_.set(static_cast<unsigned char>(text[0]));
  tokens_.emplace(text, token);
}

// Every token that is a prefix of the text is one of the last token before the
// text, too.
const AddedTokens::Tokens::value_type* AddedTokens::longest_at(
    std::string_view text, bool special) const {
  while (!text.empty()) {
    auto it = tokens_.upper_bound(text);
    if (it == tokens_.begin()) return nullptr;
    --it;
    const auto common =
        static_cast<size_t>(std::mismatch(text.begin(), text.end(),
                                          it->first.begin(), it->first.end())
                                .first -
                            text.begin());
    if (common == it->first.size() && (special || !it->second.special))
      return &*it;
    text = text.substr(0, std::min(common, text.size() - 1));
  }
  return nullptr;
}

}  // namespace remesh::tokenizer
