// Replicas that the keeper copies from the owner's segment are complete or
// absent.
#include "checkpoint/exchange/mapped.h"

#include <algorithm>
#include <vector>

#include "checkpoint/memory/stream_copy.h"
#include "proto/base/rng.h"
#include "tests/testing/segment_states.h"
#include "tests/testing/temp_dir.h"

namespace remesh::exchange {
namespace {

using memory::StateSegment;

constexpr uint64_t kJob = 4;
constexpr int kRank = 3;
constexpr int64_t kElements = 100'003;

struct Two {
  ShmDir dir;
  std::unique_ptr<StateSegment> own =
      StateSegment::create(dir / "own", kJob, kElements).value();
  std::unique_ptr<StateSegment> copy =
      StateSegment::create(dir / "copy", kJob, kElements + 5).value();
  MappedReplica replica{
      kRank,
      StateSegment::open(dir / "own", kJob, StateSegment::Mode::kRead).value(),
      *copy, kElements, 1 << 16};

  void update_own(int64_t step) {
    update(*own, memory::info_of(step, kElements, kRank));
  }
  int64_t newest() {
    const auto c = copy->contents();
    for (const auto& s : c.states)
      EXPECT_TRUE(s.info.replica && s.info.content);
    return newest_step(*copy, kRank);
  }
};

TEST(MappedReplica, FollowsItsOwner) {
  Two t;
  t.update_own(7);
  for (int64_t step = 8; step < 12; ++step) {
    t.replica.start(step, 3);
    // Nothing to copy before the owner has committed.
    const uint64_t before = t.replica.pieces();
    EXPECT_FALSE(t.replica.poll());
    EXPECT_EQ(t.replica.pieces(), before);
    t.update_own(step);
    int polls = 0;
    while (!t.replica.poll()) {
      ++polls;
      // A replica in progress does not touch the last one.
      if (polls == 5) {
        EXPECT_EQ(t.newest(), step == 8 ? -1 : step - 1);
      }
    }
    EXPECT_GT(polls, 10);
    EXPECT_OK(t.replica.status());
    EXPECT_EQ(t.newest(), step);
  }
  // The same step of another generation is another state.
  t.replica.start(11, 4);
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(t.replica.poll());
}

TEST(MappedReplica, ACopyOfAnOverwrittenStateIsDiscarded) {
  Two t;
  t.update_own(1);
  t.replica.start(1, 3);
  while (!t.replica.poll()) {
  }
  t.update_own(2);
  t.replica.start(2, 3);
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(t.replica.poll());
  t.own->begin(0);  // where step 2 is
  while (!t.replica.poll()) {
  }
  EXPECT_EQ(t.replica.status().code(), Code::kCorrupt);
  EXPECT_SAYS(t.replica.status(), "rank 3");
  EXPECT_EQ(t.newest(), 1);
}

TEST(StreamCopy, CopiesAnyBytesAtAnyAlignment) {
  std::vector<unsigned char> from(5000), want(5000), got(5000);
  for (uint64_t i = 0; i < 2000; ++i) {
    for (size_t k = 0; k < from.size(); ++k)
      from[k] = static_cast<unsigned char>(random_u64(1, i, k));
    const auto at = static_cast<size_t>(random_u64(2, i, 0) % 200);
    const auto to = static_cast<size_t>(random_u64(2, i, 1) % 200);
    const auto n =
        static_cast<size_t>(random_u64(2, i, 2) % (i % 2 == 0 ? 300 : 4500));
    std::fill(want.begin(), want.end(), 7);
    std::fill(got.begin(), got.end(), 7);
    std::copy_n(from.begin() + static_cast<int64_t>(at), n,
                want.begin() + static_cast<int64_t>(to));
    memory::stream_copy(got.data() + to, from.data() + at, n);
    ASSERT_EQ(got, want) << n << " bytes from " << at << " to " << to;
  }
}

}  // namespace
}  // namespace remesh::exchange
