#include "worker/data/split_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <iterator>
#include <utility>

#include "proto/base/machine.h"
#include "proto/base/rng.h"

namespace remesh::data {
namespace {

// Longer documents are encoded in parts.
constexpr size_t kPartBytes = size_t{4} << 20;
// What a thread encodes at once, if it is not one part.
constexpr size_t kTogether = size_t{1} << 20;

// Whether block number `block` is held out, as every (1 / fraction)-th is.
bool held_out(double fraction, double phase, int64_t block) {
  const auto b = static_cast<double>(block);
  return std::floor((b + 1) * fraction + phase) >
         std::floor(b * fraction + phase);
}

bool is_space(char c) {
  return std::isspace(static_cast<unsigned char>(c)) != 0;
}

// Where a text is best divided: behind the last line in its second half whose
// end has no white space beside it, or else at the end.
size_t part_end(std::string_view text) {
  for (size_t at = text.size() - 1; at > text.size() / 2; --at)
    if (text[at - 1] == '\n' && !is_space(text[at]) && !is_space(text[at - 2]))
      return at;
  return text.size();
}

}  // namespace

SplitWriter::~SplitWriter() {
  for (const std::string& name : names_)
    (void)fs_.remove(dir_ + "/" + name + kPartial).ok();
}

Status SplitWriter::append(std::span<const int32_t> tokens, Marks marks) {
  while (!tokens.empty()) {
    if (!writer_) RETURN_IF_ERROR(begin_shard());
    const auto room =
        static_cast<size_t>(shard_tokens_ - writer_->num_tokens());
    const size_t n = std::min(room, tokens.size());
    RETURN_IF_ERROR(writer_->append(tokens.first(n), marks));
    marks.begins_document = false;
    tokens = tokens.subspan(n);
    if (writer_->num_tokens() == shard_tokens_) RETURN_IF_ERROR(end_shard());
  }
  return ok_status();
}

Status SplitWriter::rename() {
  for (const std::string& name : names_)
    RETURN_IF_ERROR(
        fs_.rename(dir_ + "/" + name + kPartial, dir_ + "/" + name));
  return ok_status();
}

Status SplitWriter::begin_shard() {
  const std::string name = fmt::format("{}-{:05}.tok", split_, names_.size());
  names_.push_back(name);
  ASSIGN_OR_RETURN(
      ShardWriter writer,
      ShardWriter::create(fs_, dir_ + "/" + name + kPartial, tokenizer_.id(),
                          tokenizer_.vocab_size(), marked_));
  writer_ = std::move(writer);
  return ok_status();
}

Status SplitWriter::end_shard() {
  ASSIGN_OR_RETURN(const ShardInfo info, writer_->finish());
  entries_.push_back({names_.back(), info.num_tokens, info.checksum});
  writer_.reset();
  return ok_status();
}

BlockRouter::BlockRouter(double fraction, uint64_t seed, int64_t block_bytes,
                         const tokenizer::Tokenizer& tokenizer,
                         SplitWriter& train, SplitWriter& val)
    : fraction_(fraction),
      phase_(static_cast<double>(
                 random_u64(seed, hash64("remesh.held_out"), 0) >> 11) *
             0x1p-53),
      block_bytes_(block_bytes),
      tokenizer_(tokenizer),
      train_(train),
      val_(val),
      threads_(static_cast<size_t>(std::max(1, usable_cores()))) {}

SplitWriter* BlockRouter::next_block() {
  return held_out(fraction_, phase_, blocks_++) ? &val_ : &train_;
}

Status BlockRouter::add(const TextBlock& block) {
  SplitWriter* to = next_block();
  const std::string_view text = block.text;
  size_t begin = 0;
  size_t k = 0;
  if (!block.ends.empty() && block.ends[0] == 0) {
    k = 1;
    RETURN_IF_ERROR(close());
  } else if (open_ != nullptr && open_ != to) {
    RETURN_IF_ERROR(close());  // the document continues in the other split
  }
  for (; k < block.ends.size(); ++k) {
    RETURN_IF_ERROR(append(to, text.substr(begin, block.ends[k] - begin)));
    RETURN_IF_ERROR(close());
    begin = block.ends[k];
  }
  return append(to, text.substr(begin));
}

Status BlockRouter::add(const Conversation& conversation) {
  if (conversations_to_ == nullptr) conversations_to_ = next_block();
  bool begins = true, after_added = false;
  for (const ChatPiece& piece : conversation) {
    tokens_.clear();
    RETURN_IF_ERROR(
        tokenizer_.encode(piece.text,
                          {.special = true,
                           .continues = !begins,
                           .after_added = after_added,
                           .continued = &piece != &conversation.back()},
                          tokens_));
    if (!tokens_.empty())
      after_added = tokenizer_.restarts_after(tokens_.back());
    RETURN_IF_ERROR(conversations_to_->append(
        tokens_, {.targets = piece.target, .begins_document = begins}));
    begins = begins && tokens_.empty();
    if (piece.target) answer_tokens_ += std::ssize(tokens_);
    conversation_bytes_ += static_cast<int64_t>(piece.text.size());
  }
  if (!begins) ++conversations_;
  if (conversation_bytes_ >= block_bytes_) {
    conversations_to_ = nullptr;
    conversation_bytes_ = 0;
  }
  return ok_status();
}

Status BlockRouter::append(SplitWriter* to, std::string_view text) {
  if (text.empty()) return ok_status();
  open_ = to;
  text_ += text;
  return text_.size() < kPartBytes ? ok_status()
                                   : add_part(part_end(text_), /*ends=*/false);
}

Status BlockRouter::add_part(size_t bytes, bool ends) {
  parts_.push_back({open_, text_.substr(0, bytes), continues_, ends});
  parts_bytes_ += bytes + sizeof(Part);  // documents may be tiny
  text_.erase(0, bytes);
  continues_ = true;
  if (parts_bytes_ < kTogether) return ok_status();
  start_encoding();
  return encoding_.size() <= threads_ ? ok_status() : write_encoded();
}

void BlockRouter::start_encoding() {
  encoding_.push_back(std::async(
      std::launch::async,
      [this, parts = std::exchange(parts_, {})]() -> Result<Encoded> {
        return encode(parts);
      }));
  parts_bytes_ = 0;
}

Result<BlockRouter::Encoded> BlockRouter::encode(
    const std::vector<Part>& parts) const {
  Encoded out;
  for (const Part& part : parts) {
    std::vector<int32_t> tokens;
    RETURN_IF_ERROR(tokenizer_.encode(
        part.text, {.continues = part.continues, .continued = !part.ends},
        tokens));
    if (part.ends) tokens.push_back(tokenizer_.end_of_text());
    out.emplace_back(part.to, std::move(tokens));
  }
  return out;
}

// Waits for the oldest, which follows what has been written.
Status BlockRouter::write_encoded() {
  auto encoded = encoding_.front().get();
  encoding_.pop_front();
  if (!encoded.ok()) return encoded.status();
  for (const auto& [to, tokens] : *encoded) RETURN_IF_ERROR(to->append(tokens));
  return ok_status();
}

Status BlockRouter::finish() {
  if (!parts_.empty()) start_encoding();
  while (!encoding_.empty()) RETURN_IF_ERROR(write_encoded());
  return ok_status();
}

// Ends the open document in the split that has its last part.
Status BlockRouter::close() {
  if (open_ == nullptr) return ok_status();
  RETURN_IF_ERROR(add_part(text_.size(), /*ends=*/true));
  continues_ = false;
  open_ = nullptr;
  return ok_status();
}

}  // namespace remesh::data
