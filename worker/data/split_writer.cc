#include "worker/data/split_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "proto/base/rng.h"

namespace remesh::data {
namespace {

// Whether block number `block` is held out, as every (1 / fraction)-th is.
bool held_out(double fraction, double phase, int64_t block) {
  const auto b = static_cast<double>(block);
  return std::floor((b + 1) * fraction + phase) >
         std::floor(b * fraction + phase);
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
  largest_token_ = std::max(largest_token_, writer_->largest_token());
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
      splits_{&train, &val},
      encoder_(tokenizer, {.ends = true},
               [this](int to, std::span<const int32_t> tokens) {
                 return splits_[static_cast<size_t>(to)]->append(tokens);
               }) {}

int BlockRouter::next_block() {
  return held_out(fraction_, phase_, blocks_++) ? 1 : 0;
}

Status BlockRouter::add(const TextBlock& block) {
  const int to = next_block();
  const std::string_view text = block.text;
  size_t begin = 0;
  size_t k = 0;
  if (!block.ends.empty() && block.ends[0] == 0) {
    k = 1;
    RETURN_IF_ERROR(encoder_.end());
  } else if (to != last_) {
    RETURN_IF_ERROR(encoder_.end());  // it continues in the other split
  }
  last_ = to;
  for (; k < block.ends.size(); ++k) {
    RETURN_IF_ERROR(
        encoder_.add(text.substr(begin, block.ends[k] - begin), to));
    RETURN_IF_ERROR(encoder_.end());
    begin = block.ends[k];
  }
  return encoder_.add(text.substr(begin), to);
}

Status BlockRouter::add(const Conversation& conversation) {
  if (conversations_to_ == nullptr)
    conversations_to_ = splits_[static_cast<size_t>(next_block())];
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

}  // namespace remesh::data
