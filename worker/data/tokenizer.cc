#include "worker/data/tokenizer.h"

#include <fmt/format.h>

#include "proto/base/text.h"

namespace remesh::data {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  std::string id() const override { return "bytes"; }
  int64_t vocab_size() const override { return 257; }
  int32_t end_of_text() const override { return kByteEndOfText; }

  Status encode(std::string_view text,
                std::vector<int32_t>& out) const override {
    const size_t start = out.size();
    out.resize(start + text.size());
    for (size_t i = 0; i < text.size(); ++i)
      out[start + i] = static_cast<unsigned char>(text[i]);
    return ok_status();
  }

  Result<std::string> decode(std::span<const int32_t> tokens) const override {
    std::string text;
    text.reserve(tokens.size());
    for (const int32_t token : tokens) {
      if (token < 0 || token > kByteEndOfText)
        return invalid_argument(
            fmt::format("token {}: the bytes tokenizer has tokens 0 to {}",
                        token, kByteEndOfText));
      if (token < kByteEndOfText) {
        text.push_back(static_cast<char>(token));
        continue;
      }
      if (!text.empty() && text.back() != '\n') text.push_back('\n');
      text += "<|endoftext|>\n";
    }
    return text;
  }
};

}  // namespace

std::vector<std::string> tokenizer_names() { return {"bytes"}; }

Result<std::unique_ptr<Tokenizer>> make_tokenizer(std::string_view name) {
  if (name == "bytes")
    return std::unique_ptr<Tokenizer>(std::make_unique<ByteTokenizer>());
  return invalid_argument(fmt::format("unknown tokenizer '{}': expected {}",
                                      name, join(tokenizer_names())));
}

}  // namespace remesh::data
