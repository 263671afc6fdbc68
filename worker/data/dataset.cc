#include "worker/data/dataset.h"

#include <fmt/format.h>

#include <algorithm>

#include "proto/base/check.h"
#include "proto/data/index.h"

namespace remesh::data {
namespace {

// Opens one shard and compares it with its entry in the index.
Result<MappedShard> open_entry(const std::string& dir, const Index& index,
                               const ShardEntry& entry) {
  const std::string path = dir + "/" + entry.file;
  ASSIGN_OR_RETURN(MappedShard shard,
                   MappedShard::open(path, index.token_limit()));
  const ShardInfo& info = shard.info();
  if (info.vocab_size != index.vocab_size)
    return corrupt(
        fmt::format("{}: vocabulary of {}, but that of the data set has {}",
                    path, info.vocab_size, index.vocab_size));
  if (info.tokenizer != index.tokenizer)
    return corrupt(
        fmt::format("{}: tokenizer '{}', but that of the data set is '{}'",
                    path, info.tokenizer, index.tokenizer));
  if (info.has_marks != index.marked)
    return corrupt(fmt::format("{}: has {}marks, but the data set has {}", path,
                               info.has_marks ? "" : "no ",
                               index.marked ? "some" : "none"));
  if (info.num_tokens != entry.tokens || info.checksum != entry.checksum)
    return corrupt(fmt::format(
        "{}: {} tokens with checksum {}, but the index has {} with {} (does it "
        "belong to another data set?)",
        path, info.num_tokens, info.checksum, entry.tokens, entry.checksum));
  return shard;
}

}  // namespace

template <typename F>
Status Split::for_each_part(int64_t begin, int64_t count, const F& f) const {
  // The last shard that begins at or before `begin`.
  size_t i = static_cast<size_t>(
      std::upper_bound(begins_.begin(), begins_.end(), begin) -
      begins_.begin());
  for (int64_t done = 0; done < count; ++i) {
    const MappedShard& shard = shards_[i - 1];
    const int64_t at = begin + done - begins_[i - 1];
    const int64_t n = std::min(shard.info().num_tokens - at, count - done);
    RETURN_IF_ERROR(f(shard, at, n));
    done += n;
  }
  return ok_status();
}

Status Split::read(int64_t begin, std::span<int32_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  if (begin < 0 || count > num_tokens_ || begin > num_tokens_ - count)
    return invalid_argument(fmt::format(
        "tokens {} to {}: the split has only {}", begin,
        static_cast<__int128>(begin) + count > INT64_MAX ? INT64_MAX
                                                         : begin + count,
        num_tokens_));
  return for_each_part(
      begin, count, [&](const MappedShard& shard, int64_t at, int64_t n) {
        Status read = shard.read(at, out.first(static_cast<size_t>(n)));
        out = out.subspan(static_cast<size_t>(n));
        return read;
      });
}

Status Split::read_window(int64_t window, int64_t seq_len,
                          std::span<int32_t> input, std::span<int32_t> target,
                          std::vector<int64_t>* starts) const {
  CHECK(seq_len >= 1);
  const auto length = static_cast<size_t>(seq_len);
  CHECK(input.size() == length && target.size() == length);
  const int64_t windows = num_tokens_ == 0 ? 0 : (num_tokens_ - 1) / seq_len;
  if (window < 0 || window >= windows)
    return invalid_argument(
        fmt::format("window {}: the split has only {} of {} tokens", window,
                    windows, seq_len));
  RETURN_IF_ERROR(read(window * seq_len, input));
  std::copy(input.begin() + 1, input.end(), target.begin());
  RETURN_IF_ERROR(read((window + 1) * seq_len, target.last(1)));
  starts->clear();
  if (!marked_) {
    for (size_t t = 1; t < length; ++t)
      if (input[t - 1] == end_of_text_)
        starts->push_back(static_cast<int64_t>(t));
    return ok_status();
  }
  int64_t position = 1;  // of the token in the window; its target's is one less
  return for_each_part(window * seq_len + 1, seq_len,
                       [&](const MappedShard& shard, int64_t at, int64_t n) {
                         RETURN_IF_ERROR(shard.load_marks(at, n));
                         for (int64_t t = at; t < at + n; ++t, ++position) {
                           if (!shard.is_target(t))
                             target[static_cast<size_t>(position - 1)] = -1;
                           if (position < seq_len && shard.begins_document(t))
                             starts->push_back(position);
                         }
                         return ok_status();
                       });
}

Result<bool> Split::begins_document(int64_t token) const {
  if (token == 0) return true;
  bool begins = false;
  if (marked_) {
    RETURN_IF_ERROR(for_each_part(
        token, 1, [&](const MappedShard& shard, int64_t at, int64_t) {
          begins = shard.begins_document(at);
          return ok_status();
        }));
    return begins;
  }
  int32_t before = 0;
  RETURN_IF_ERROR(read(token - 1, std::span<int32_t>(&before, 1)));
  return before == end_of_text_;
}

Status Split::open(const std::string& dir, const Index& index,
                   const std::vector<ShardEntry>& entries) {
  vocab_size_ = index.vocab_size;
  end_of_text_ = index.end_of_text;
  marked_ = index.marked;
  for (const ShardEntry& entry : entries) {
    ASSIGN_OR_RETURN(MappedShard shard, open_entry(dir, index, entry));
    begins_.push_back(num_tokens_);
    num_tokens_ += shard.info().num_tokens;
    shards_.push_back(std::move(shard));
  }
  return ok_status();
}

namespace {

Result<Member> open_member(const std::string& dir, const Index& index,
                           const MemberEntry& entry) {
  Member m{.name = entry.name, .weight = entry.weight};
  RETURN_IF_ERROR(m.train.open(dir, index, index.train));
  RETURN_IF_ERROR(m.val.open(dir, index, index.val));
  return m;
}

}  // namespace

Result<Dataset> Dataset::open(const std::string& dir) {
  const auto read = read_index(dir);
  if (!read.ok() && read.status().code() == Code::kNotFound)
    return not_found(fmt::format(
        "{}: not a data set (no {}); create one with `remesh data prepare`",
        dir, kIndexName));
  if (!read.ok()) return read.status();
  const Index& index = *read;
  Dataset dataset;
  dataset.dir_ = dir;
  dataset.data_id_ = index.data_id;
  dataset.tokenizer_ = index.tokenizer;
  dataset.vocab_size_ = index.vocab_size;
  dataset.token_limit_ = index.token_limit();
  dataset.end_of_text_ = index.end_of_text;
  dataset.is_mixture_ = !index.members.empty();
  for (const MemberEntry& entry : index.members) {
    const std::string folder = member_dir(dir, entry);
    ASSIGN_OR_RETURN(Index of, read_index(folder, &entry));
    of.largest_token = std::min(of.token_limit(), index.token_limit()) - 1;
    if (of.tokenizer != index.tokenizer)
      return corrupt(fmt::format("{}: has tokenizer '{}', the mixture '{}'",
                                 folder, of.tokenizer, index.tokenizer));
    ASSIGN_OR_RETURN(Member member, open_member(folder, of, entry));
    dataset.members_.push_back(std::move(member));
  }
  if (index.members.empty()) {
    ASSIGN_OR_RETURN(Member member, open_member(dir, index, {}));
    dataset.members_.push_back(std::move(member));
  }
  return dataset;
}

Status Dataset::verify(
    const std::function<void(uint64_t, uint64_t)>& progress) const {
  std::vector<const MappedShard*> shards;
  for (const Member& member : members_)
    for (const Split* split : {&member.train, &member.val})
      for (const MappedShard& shard : split->shards_) shards.push_back(&shard);
  uint64_t total = 0;
  for (const MappedShard* shard : shards) total += shard->payload_bytes();
  uint64_t done = 0;
  for (const MappedShard* shard : shards) {
    RETURN_IF_ERROR(shard->verify());
    done += shard->payload_bytes();
    if (progress) progress(done, total);
  }
  return ok_status();
}

}  // namespace remesh::data
