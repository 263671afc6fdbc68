#include "checkpoint/memory/state_info.h"

#include <fmt/format.h>

#include <algorithm>

namespace remesh::memory {
namespace {

constexpr int64_t kMaxDegree = 65536;
constexpr int64_t kMaxStages = 1024;
constexpr int64_t kMaxCount = int64_t{1} << 56;
constexpr uint64_t kReplica = 1, kHasContent = 2;
// Words before the bounds.
constexpr size_t kFixedWords = 19;
static_assert(kFixedWords + (kMaxStages + 2) / 2 <= kMaxInfoWords);

class Reader {
 public:
  explicit Reader(std::span<const uint64_t> words) : words_(words) {}
  uint64_t word() { return words_[at_++]; }
  // A number in [low, high]; the first violation becomes the status.
  int64_t number(const char* what, int64_t low, int64_t high) {
    const auto x = static_cast<int64_t>(word());
    if (status_.ok() && (x < low || x > high))
      status_ = corrupt(fmt::format("state record: {} is {}, not {} to {}",
                                    what, x, low, high));
    return x;
  }
  int degree(const char* what) {
    return static_cast<int>(number(what, 1, kMaxDegree));
  }
  const Status& status() const { return status_; }

 private:
  std::span<const uint64_t> words_;
  size_t at_ = 0;
  Status status_;
};

}  // namespace

std::string to_string(const StateInfo& info) {
  return fmt::format("step {} of generation {}, {}rank {} of {}", info.step,
                     info.generation, info.replica ? "replica of " : "",
                     info.rank, info.sharding.layout.to_string());
}

std::vector<uint64_t> encode(const StateInfo& info) {
  const geometry::Sharding& s = info.sharding;
  CHECK(s.bounds.size() <= kMaxStages + 1);
  std::vector<uint64_t> w;
  w.reserve(kFixedWords + (s.bounds.size() + 1) / 2);
  const auto put = [&](int64_t x) { w.push_back(static_cast<uint64_t>(x)); };
  put(info.step);
  put(info.generation);
  put(info.rank);
  put(s.layout.dp);
  put(s.layout.pp);
  put(s.layout.tp);
  put(s.layout.cp);
  put(s.chunks);
  put(s.zero.stage);
  put(s.zero.shard_group);
  w.push_back(info.model);
  put(info.elements);
  put(info.tokens);
  put(info.sequences);
  w.push_back((info.replica ? kReplica : 0) | (info.content ? kHasContent : 0));
  for (const uint64_t h : info.content.value_or(ContentHash{})) w.push_back(h);
  put(static_cast<int64_t>(s.bounds.size()));
  for (size_t i = 0; i < s.bounds.size(); i += 2) {
    CHECK(s.bounds[i] >= 0 && s.bounds[i] <= INT32_MAX);
    uint64_t two = static_cast<uint64_t>(s.bounds[i]);
    if (i + 1 < s.bounds.size())
      two |= static_cast<uint64_t>(s.bounds[i + 1]) << 32;
    w.push_back(two);
  }
  return w;
}

Result<StateInfo> decode(std::span<const uint64_t> words) {
  if (words.size() < kFixedWords || words.size() > kMaxInfoWords)
    return corrupt(fmt::format("state record: {} words", words.size()));
  Reader in(words);
  StateInfo info;
  geometry::Sharding& s = info.sharding;
  info.step = in.number("step", 0, kMaxCount);
  info.generation = in.number("generation", 0, kMaxCount);
  const int64_t rank = in.number("rank", 0, kMaxCount);
  s.layout.dp = in.degree("dp");
  s.layout.pp = in.degree("pp");
  s.layout.tp = in.degree("tp");
  s.layout.cp = in.degree("cp");
  s.chunks = static_cast<int>(in.number("chunks", 1, kMaxStages));
  s.zero.stage = static_cast<int>(in.number("ZeRO stage", 0, 3));
  s.zero.shard_group =
      static_cast<int>(in.number("ZeRO shard group", 0, kMaxDegree));
  info.model = in.word();
  info.elements = in.number("elements", 0, kMaxCount);
  info.tokens = in.number("tokens", 0, INT64_MAX);
  info.sequences = in.number("sequences", 0, INT64_MAX);
  const int64_t flags = in.number("flags", 0, kReplica | kHasContent);
  ContentHash content;
  for (uint64_t& h : content) h = in.word();
  const int64_t bounds = in.number("bounds", 0, kMaxStages + 1);
  RETURN_IF_ERROR(in.status());
  const int64_t world =
      int64_t{s.layout.dp} * s.layout.pp * s.layout.tp * s.layout.cp;
  if (world > INT32_MAX || rank >= world)
    return corrupt(
        fmt::format("state record: rank {} of a mesh of {}", rank, world));
  info.rank = static_cast<int>(rank);
  info.replica = (static_cast<uint64_t>(flags) & kReplica) != 0;
  if ((static_cast<uint64_t>(flags) & kHasContent) != 0) info.content = content;
  if (words.size() != kFixedWords + static_cast<size_t>(bounds + 1) / 2)
    return corrupt(fmt::format("state record: {} words with {} bounds",
                               words.size(), bounds));
  for (int64_t i = 0; i < bounds; ++i) {
    const uint64_t two = words[kFixedWords + static_cast<size_t>(i / 2)];
    s.bounds.push_back(
        static_cast<int64_t>(i % 2 == 0 ? two & 0xffffffff : two >> 32));
    if (s.bounds.back() > INT32_MAX)
      return corrupt("state record: a bound of " +
                     std::to_string(s.bounds.back()));
  }
  // Unused bits are 0.
  const std::vector<uint64_t> again = encode(info);
  if (!std::equal(again.begin(), again.end(), words.begin(), words.end()))
    return corrupt("state record: unknown bits are set");
  return info;
}

}  // namespace remesh::memory
