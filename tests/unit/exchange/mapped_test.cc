// Replicas that the keeper copies from the owner's segment are complete or
// absent.
#include "checkpoint/exchange/mapped.h"

#include <algorithm>
#include <vector>

#include "checkpoint/memory/stream_copy.h"
#include "proto/base/rng.h"
#include "tests/testing/expect.h"
#include "tests/testing/temp_dir.h"

namespace remesh::exchange {
namespace {

using geometry::kNumStateVectors;
using memory::StateInfo;
using memory::StateSegment;

constexpr uint64_t kJob = 4;
constexpr int kRank = 3;
constexpr int64_t kElements = 100'003;

float value(int64_t step, size_t vector, size_t i) {
  return static_cast<float>(step * 1000 + static_cast<int64_t>(vector * 300) +
                            static_cast<int64_t>(i % 251));
}

void fill(const geometry::StateView& s, int64_t step) {
  for (size_t v = 0; v < kNumStateVectors; ++v)
    for (size_t i = 0; i < s[v].size(); ++i) s[v][i] = value(step, v, i);
}

void update(StateSegment& s, int64_t step) {
  const int to = static_cast<int>(step % 2);
  s.begin(to);
  fill(s.write(to, kElements), step);
  StateInfo info;
  info.step = step;
  info.generation = 1;
  info.rank = kRank;
  info.sharding = {.layout = {.dp = 4}, .bounds = {0, 4}};
  info.elements = kElements;
  (void)s.commit(info);
}

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

  // The newest step of the replica, verified, or -1.
  int64_t newest() {
    const auto c = copy->contents();
    EXPECT_TRUE(c.damaged.empty());
    for (const auto& s : c.states) {
      EXPECT_TRUE(s.info.replica && s.info.content && s.info.rank == kRank);
      EXPECT_OK(copy->verify_content(s));
      const auto v = copy->read(s.buffer, kElements);
      for (size_t k = 0; k < kNumStateVectors; ++k)
        for (size_t i = 0; i < v[k].size(); ++i)
          if (v[k][i] != value(s.info.step, k, i)) {
            ADD_FAILURE() << "step " << s.info.step << " is torn";
            return -1;
          }
    }
    return c.states.empty() ? -1 : c.states[0].info.step;
  }
};

TEST(MappedReplica, FollowsItsOwner) {
  Two t;
  update(*t.own, 7);
  for (int64_t step = 8; step < 12; ++step) {
    t.replica.start(step, 1);
    // Nothing to copy before the owner has committed.
    const uint64_t before = t.replica.pieces();
    EXPECT_FALSE(t.replica.poll());
    EXPECT_EQ(t.replica.pieces(), before);
    update(*t.own, step);
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
  t.replica.start(11, 2);
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(t.replica.poll());
}

TEST(MappedReplica, ACopyOfAnOverwrittenStateIsDiscarded) {
  Two t;
  update(*t.own, 1);
  t.replica.start(1, 1);
  while (!t.replica.poll()) {
  }
  update(*t.own, 2);
  t.replica.start(2, 1);
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
