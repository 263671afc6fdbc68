#include "worker/data/sampler.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>

#include "proto/base/check.h"
#include "proto/base/rng.h"

namespace remesh::data {
namespace {

// Four rounds give a pseudo-random permutation (Luby and Rackoff). Halves of a
// few bits need more to mix well, and one sequence costs little.
constexpr int kRounds = 8;

uint64_t feistel(uint64_t key, uint64_t tweak, int half_bits, uint64_t x) {
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t left = x >> half_bits;
  uint64_t right = x & mask;
  for (int round = 0; round < kRounds; ++round) {
    // right has at most 31 bits, so the round fits above it.
    const uint64_t f =
        random_u64(key, tweak, (static_cast<uint64_t>(round) << 32) | right);
    const uint64_t next = left ^ (f & mask);
    left = right;
    right = next;
  }
  return (left << half_bits) | right;
}

}  // namespace

int64_t num_windows(int64_t num_tokens, int64_t seq_len) {
  CHECK(seq_len >= 1 && num_tokens >= 0);
  return num_tokens == 0 ? 0 : (num_tokens - 1) / seq_len;
}

uint64_t keyed_permutation(uint64_t key, uint64_t tweak, uint64_t n,
                           uint64_t index) {
  CHECK(n <= uint64_t{1} << 62);
  CHECK(index < n);
  if (n == 1) return 0;
  const int bits = std::max(2, static_cast<int>(std::bit_width(n - 1)));
  const int half_bits = (bits + 1) / 2;
  uint64_t x = index;
  do {
    x = feistel(key, tweak, half_bits, x);
  } while (x >= n);
  return x;
}

Result<Sampler> Sampler::make(uint64_t seed,
                              const std::vector<MixtureMember>& members,
                              int64_t seq_len, int64_t global_batch,
                              int64_t offset) {
  CHECK(!members.empty());
  std::vector<Stream> streams;
  double rest = 0;
  for (const MixtureMember& member : members) {
    if (seq_len < 1 || global_batch < 1 || member.num_tokens < 0 ||
        !(member.weight >= 0))
      return invalid_argument(fmt::format(
          "sampler: {} tokens of weight {}, sequence length {}, global batch "
          "{}: must be at least 0, 0, 1 and 1",
          member.num_tokens, member.weight, seq_len, global_batch));
    const int64_t windows = num_windows(member.num_tokens, seq_len);
    if (windows < 1 && member.weight > 0)
      return invalid_argument(fmt::format(
          "train.seq_len = {}: the training data have {} tokens, fewer than "
          "one sequence of {} and the token after it",
          seq_len, member.num_tokens, seq_len));
    // A separate key, so that no other use of the seed shares the stream.
    const uint64_t key =
        random_u64(seed, hash64("remesh.sampler"), streams.size());
    streams.push_back({.key = key, .windows = windows});
    rest += member.weight;
  }
  if (rest == 0)
    return invalid_argument("sampler: no data set has a weight above 0");
  rest = 0;
  for (size_t k = members.size(); k-- > 0;) {
    if (members[k].weight == 0) continue;  // a share of 0
    rest += members[k].weight;
    streams[k].share =
        static_cast<uint64_t>(std::llround(members[k].weight / rest * 0x1p32));
  }
  return Sampler(std::move(streams), global_batch, offset);
}

Sampler::Sequence Sampler::at(int64_t s, int64_t i) const {
  CHECK(s >= 0);
  CHECK(i >= 0 && i < global_batch_);
  int64_t n = offset_ + s * global_batch_ + i;
  CHECK(n >= 0);
  for (size_t k = 0;; ++k) {
    const Stream& stream = streams_[k];
    const auto taken = [&](int64_t of) {
      return static_cast<int64_t>(
          (static_cast<unsigned __int128>(of) * stream.share + (1ULL << 31)) >>
          32);
    };
    const int64_t mine = taken(n);
    if (taken(n + 1) == mine) {
      n -= mine;
      continue;
    }
    const int64_t epoch = mine / stream.windows;
    return {epoch,
            static_cast<int64_t>(keyed_permutation(
                stream.key, static_cast<uint64_t>(epoch),
                static_cast<uint64_t>(stream.windows),
                static_cast<uint64_t>(mine % stream.windows))),
            k};
  }
}

std::vector<int64_t> validation_windows(int64_t num_windows, int64_t count) {
  CHECK(num_windows >= 0 && count >= 0);
  if (count > num_windows) count = num_windows;
  std::vector<int64_t> windows(static_cast<size_t>(count));
  // The middles of `count` equal parts: floor((2k + 1) * num / (2 * count)).
  for (int64_t k = 0; k < count; ++k)
    windows[static_cast<size_t>(k)] = static_cast<int64_t>(
        static_cast<__int128>(2 * k + 1) * num_windows / (2 * count));
  return windows;
}

}  // namespace remesh::data
