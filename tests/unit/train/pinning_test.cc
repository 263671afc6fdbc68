#include "worker/train/pinning.h"

#include <numeric>

#include "proto/base/machine.h"
#include "tests/testing/expect.h"

namespace remesh::train {
namespace {

using Cpus = std::vector<int>;

// `ranks_on[i]` ranks of `threads` threads on worker i of host i / per_host.
pb::Assignment assignment(const std::vector<int>& ranks_on, int threads,
                          int per_host) {
  pb::Assignment a;
  int rank = 0;
  for (size_t w = 0; w < ranks_on.size(); ++w) {
    const std::string name = "w" + std::to_string(w);
    a.add_workers(name);
    a.add_hosts("h" + std::to_string(static_cast<int>(w) / per_host));
    for (int i = 0; i < ranks_on[w]; ++i) {
      pb::RankPlace* p = a.add_ranks();
      p->set_rank(rank++);
      p->set_worker(name);
      p->set_threads(threads);
    }
  }
  return a;
}

Cpus range(int begin, int end) {
  Cpus out(static_cast<size_t>(end - begin));
  std::iota(out.begin(), out.end(), begin);
  return out;
}

TEST(Pinning, RanksThatFillAHostHaveCpusOfTheirOwn) {
  const pb::Assignment a = assignment({2, 2, 4}, 2, 2);
  const Cpus eight = range(0, 8);
  EXPECT_EQ(cpus_of_rank(a, 0, eight), range(0, 2));
  EXPECT_EQ(cpus_of_rank(a, 3, eight), range(6, 8));
  EXPECT_EQ(cpus_of_rank(a, 4, eight), range(0, 2));  // of the other host
  EXPECT_EQ(cpus_of_rank(a, 7, eight), range(6, 8));
}

TEST(Pinning, TwiceAsManyRanksShareEvenlyWithTheirNeighbours) {
  const pb::Assignment a = assignment({1, 1, 1, 1}, 1, 4);
  const Cpus two = {4, 9};
  EXPECT_EQ(cpus_of_rank(a, 0, two), Cpus{4});
  EXPECT_EQ(cpus_of_rank(a, 1, two), Cpus{4});
  EXPECT_EQ(cpus_of_rank(a, 2, two), Cpus{9});
  EXPECT_EQ(cpus_of_rank(a, 3, two), Cpus{9});
}

TEST(Pinning, NoRankIsPinnedIfUnevenOrIfCpusAreLeft) {
  EXPECT_EQ(cpus_of_rank(assignment({3}, 1, 1), 0, range(0, 2)), Cpus{});
  EXPECT_EQ(cpus_of_rank(assignment({2}, 1, 1), 0, range(0, 8)), Cpus{});
  EXPECT_EQ(cpus_of_rank(assignment({1}, 8, 1), 0, range(0, 8)), Cpus{});
  EXPECT_EQ(cpus_of_rank(assignment({2}, 3, 1), 0, range(0, 2)), Cpus{});
  EXPECT_EQ(cpus_of_rank(assignment({2}, 0, 1), 0, range(0, 2)), Cpus{});
  EXPECT_EQ(cpus_of_rank(assignment({2}, 1, 1), 5, range(0, 2)), Cpus{});
}

TEST(Pinning, TheProcessIsBoundAsAssigned) {
  const Cpus before = allowed_cpus();
  ASSERT_FALSE(before.empty());
  const Cpus last = {before.back()};
  ASSERT_OK(pin_to(last));
  EXPECT_EQ(allowed_cpus(), last);
  ASSERT_OK(pin_to(before));
  EXPECT_EQ(allowed_cpus(), before);
}

}  // namespace
}  // namespace remesh::train
