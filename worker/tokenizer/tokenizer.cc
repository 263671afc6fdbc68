#include "worker/tokenizer/tokenizer.h"

#include <fmt/format.h>

#include "proto/base/file_system.h"
#include "worker/tokenizer/pipeline.h"
#include "worker/tokenizer/sentencepiece.h"
#include "worker/tokenizer/tiktoken.h"
#include "worker/tokenizer/tokenizer_json.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::tokenizer {
namespace {

constexpr uint64_t kMaxFile = uint64_t{128} << 20;
constexpr char kConfig[] = "tokenizer_config.json";

std::unique_ptr<Tokenizer> byte_tokenizer() {
  Pipeline p{.id = "bytes", .end_of_text = kByteEndOfText};
  for (int b = 0; b < kByteEndOfText; ++b)
    p.decoded.emplace_back(1, static_cast<char>(b));
  p.bpe = Bpe::make({.tokens = p.decoded, .byte_level = true}).value();
  p.decoded.emplace_back();
  return make_tokenizer(std::move(p));
}

}  // namespace

Status TextStream::add(int32_t token, std::string& out) {
  ASSIGN_OR_RETURN(std::string_view bytes, tokenizer_.token_bytes(token));
  if (token == tokenizer_.end_of_text()) {
    finish(out);
    if (!line_begins_) out += '\n';
    out += "<|endoftext|>\n";
    line_begins_ = document_begins_ = true;
    return ok_status();
  }
  if (document_begins_ && tokenizer_.adds_space() && bytes.starts_with(' '))
    bytes.remove_prefix(1);
  document_begins_ = false;
  withheld_ += bytes;
  const size_t whole = complete_prefix(withheld_);
  if (whole == 0) return ok_status();
  out.append(withheld_, 0, whole);
  line_begins_ = out.back() == '\n';
  withheld_.erase(0, whole);
  return ok_status();
}

void TextStream::finish(std::string& out) {
  if (!withheld_.empty()) line_begins_ = false;
  out += withheld_;
  withheld_.clear();
}

Result<std::string> Tokenizer::decode(std::span<const int32_t> tokens) const {
  TextStream stream(*this);
  std::string text;
  for (const int32_t token : tokens) RETURN_IF_ERROR(stream.add(token, text));
  stream.finish(text);
  return text;
}

Result<std::unique_ptr<Tokenizer>> open_tokenizer(const std::string& spec) {
  if (spec == "bytes") return byte_tokenizer();
  if (is_folder(spec))
    return invalid_argument(fmt::format(
        "tokenizer '{}': is a folder: expected {}", spec, kTokenizerHelp));
  auto text = read_file(*posix_file_system(), spec, kMaxFile);
  if (text.status().code() == Code::kNotFound)
    return not_found(fmt::format("tokenizer '{}': no such file: expected {}",
                                 spec, kTokenizerHelp));
  if (!text.ok()) return text.status();
  if (text->starts_with('{')) {
    auto end = read_file(*posix_file_system(),
                         path_join(parent_path(spec), kConfig), kMaxFile);
    if (end.ok()) end = token_in_config(*end, "eos_token");
    if (end.status().code() == Code::kNotFound) end = std::string();
    return parse_tokenizer_json(*text, spec, end);
  }
  // The tag of the first piece, of which no line of text consists.
  if (text->starts_with('\n')) return parse_sentencepiece(*text, spec);
  return parse_tiktoken(*text, spec);
}

}  // namespace remesh::tokenizer
