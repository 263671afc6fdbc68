#include "worker/data/text_encoder.h"

#include <algorithm>
#include <cctype>
#include <memory>

#include "proto/base/machine.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::data {
namespace {

// Longer documents are encoded in parts.
constexpr size_t kPartBytes = size_t{4} << 20;
// What a thread encodes at once, if it is not one part.
constexpr size_t kTogether = size_t{1} << 20;

bool is_space(char c) {
  return std::isspace(static_cast<unsigned char>(c)) != 0;
}

// Where a text is best divided: behind the last line in its second half whose
// end has no white space beside it, or else before such a space, or else behind
// its last character.
size_t part_end(std::string_view text) {
  for (size_t at = text.size() - 1; at > text.size() / 2; --at)
    if (text[at - 1] == '\n' && !is_space(text[at]) && !is_space(text[at - 2]))
      return at;
  for (size_t at = text.size() - 2; at > text.size() / 2; --at)
    if (text[at] == ' ' && !is_space(text[at + 1]) && !is_space(text[at - 1]))
      return at;
  return tokenizer::complete_prefix(text);
}

}  // namespace

TextEncoder::TextEncoder(const tokenizer::Tokenizer& tokenizer,
                         const Options& options, Sink sink)
    : tokenizer_(tokenizer),
      options_(options),
      sink_(std::move(sink)),
      threads_(static_cast<size_t>(std::max(1, usable_cores()))) {}

Status TextEncoder::add(std::string_view text, int to) {
  if (text.empty()) return ok_status();
  open_ = true;
  to_ = to;
  text_ += text;
  return text_.size() < kPartBytes ? ok_status()
                                   : take_part(part_end(text_), /*ends=*/false);
}

Status TextEncoder::end() {
  if (!open_) return ok_status();
  RETURN_IF_ERROR(take_part(text_.size(), /*ends=*/true));
  open_ = false;
  begins_ = true;
  return ok_status();
}

Status TextEncoder::finish() {
  RETURN_IF_ERROR(end());
  if (!parts_.empty()) start_encoding();
  while (!encoding_.empty()) RETURN_IF_ERROR(pass_on());
  return ok_status();
}

Status TextEncoder::take_part(size_t bytes, bool ends) {
  parts_.push_back({text_.substr(0, bytes), to_, begins_, ends});
  parts_bytes_ += bytes + sizeof(Part);  // documents may be tiny
  text_.erase(0, bytes);
  begins_ = false;
  if (parts_bytes_ < kTogether) return ok_status();
  start_encoding();
  return encoding_.size() <= threads_ ? ok_status() : pass_on();
}

void TextEncoder::start_encoding() {
  const auto parts =
      std::make_shared<const std::vector<Part>>(std::exchange(parts_, {}));
  // A copy, because libstdc++ passes it on a second time where no more threads
  // are allowed; then pass_on() does the work.
  const auto work = [this, parts] { return encode(*parts); };
  encoding_.push_back(
      std::async(std::launch::async | std::launch::deferred, work));
  parts_bytes_ = 0;
}

Result<TextEncoder::Encoded> TextEncoder::encode(
    const std::vector<Part>& parts) const {
  Encoded out;
  for (const Part& part : parts) {
    std::vector<int32_t> tokens;
    RETURN_IF_ERROR(tokenizer_.encode(part.text,
                                      {.special = options_.special,
                                       .continues = !part.begins,
                                       .continued = !part.ends},
                                      tokens));
    if (part.ends && options_.ends) tokens.push_back(tokenizer_.end_of_text());
    out.emplace_back(part.to, std::move(tokens));
  }
  return out;
}

// Waits for the oldest, which follows what has been passed on.
Status TextEncoder::pass_on() {
  auto encoded = encoding_.front().get();
  encoding_.pop_front();
  if (!encoded.ok()) return encoded.status();
  for (const auto& [to, tokens] : *encoded) RETURN_IF_ERROR(sink_(to, tokens));
  return ok_status();
}

}  // namespace remesh::data
