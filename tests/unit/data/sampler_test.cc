#include "worker/data/sampler.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "tests/testing/expect.h"
#include "tests/testing/seed.h"

namespace remesh::data {
namespace {

std::vector<uint64_t> permutation(uint64_t key, uint64_t tweak, uint64_t n) {
  std::vector<uint64_t> p(n);
  for (uint64_t i = 0; i < n; ++i) p[i] = keyed_permutation(key, tweak, n, i);
  return p;
}

TEST(KeyedPermutation, IsABijectionForEverySizeAndSeed) {
  const uint64_t seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 rng(seed);
  std::vector<uint64_t> sizes(150);
  std::iota(sizes.begin(), sizes.end(), uint64_t{1});
  for (const uint64_t n : {255, 256, 257, 1000, 1023, 1024, 1025, 4097, 20000})
    sizes.push_back(n);
  for (const uint64_t n : sizes) {
    std::vector<uint64_t> p = permutation(rng(), rng(), n);
    std::sort(p.begin(), p.end());
    for (uint64_t i = 0; i < n; ++i) ASSERT_EQ(p[i], i) << "size " << n;
  }
}

TEST(KeyedPermutation, HugeDomainsStayInsideAndDoNotCollide) {
  for (const uint64_t n :
       {uint64_t{1} << 62, (uint64_t{1} << 61) + 1, uint64_t{1} << 33}) {
    std::set<uint64_t> seen;
    for (uint64_t i = 0; i < 2000; ++i) {
      const uint64_t x = keyed_permutation(3, 4, n, n - 1 - i);
      EXPECT_LT(x, n);
      EXPECT_TRUE(seen.insert(x).second);
    }
  }
}

// Known answers: a change of the order would change the data on which every
// resumed run trains.
TEST(KeyedPermutation, GivesTheKnownAnswers) {
  EXPECT_EQ(permutation(1, 0, 10),
            (std::vector<uint64_t>{0, 4, 2, 9, 1, 6, 7, 5, 3, 8}));
  EXPECT_EQ(keyed_permutation(7, 3, 1'000'000'007, 12345), 189953485U);
}

// Every element is equally likely at every place: chi-squared over keys.
TEST(KeyedPermutation, IsUniformOverKeys) {
  for (const uint64_t n : {2, 3, 5, 7, 16, 37}) {
    constexpr uint64_t kKeys = 4000;
    std::vector<double> count(n * n);
    for (uint64_t key = 0; key < kKeys; ++key)
      for (uint64_t i = 0; i < n; ++i)
        ++count[i * n + keyed_permutation(key, 1, n, i)];
    const double expected = static_cast<double>(kKeys) / static_cast<double>(n);
    double chi2 = 0;
    for (const double c : count)
      chi2 += (c - expected) * (c - expected) / expected;
    const auto df = static_cast<double>((n - 1) * (n - 1));
    EXPECT_LT(chi2, df + 6 * std::sqrt(2 * df)) << "size " << n;
  }
}

TEST(KeyedPermutation, NeighboursAreScattered) {
  constexpr uint64_t kSize = 10000;
  const std::vector<uint64_t> p = permutation(5, 0, kSize);
  double distance = 0;
  int ascents = 0;
  for (size_t i = 1; i < p.size(); ++i) {
    distance +=
        std::abs(static_cast<double>(p[i]) - static_cast<double>(p[i - 1]));
    ascents += p[i] > p[i - 1] ? 1 : 0;
  }
  EXPECT_NEAR(distance / kSize, kSize / 3.0, kSize * 0.01);
  EXPECT_NEAR(ascents, kSize / 2.0, 200);
}

TEST(Sampler, EveryWindowIsUsedOncePerPassWhateverTheBatch) {
  for (const int64_t windows : {1, 2, 7, 64, 333}) {
    for (const int64_t batch : {1, 3, 8, 50, 400}) {
      ASSERT_OK_AND(const auto sampler,
                    Sampler::make(9, {{windows * 16 + 1}}, 16, batch));
      constexpr int64_t kPasses = 3;
      std::vector<std::vector<int>> used(
          kPasses, std::vector<int>(static_cast<size_t>(windows)));
      for (int64_t n = 0; n < kPasses * windows; ++n) {
        const auto s = sampler.at(n / batch, n % batch);
        ASSERT_EQ(s.epoch, n / windows);
        ++used[static_cast<size_t>(s.epoch)][static_cast<size_t>(s.window)];
      }
      for (const auto& pass : used)
        for (const int count : pass) ASSERT_EQ(count, 1);
    }
  }
}

// The order of sequences does not depend on the batch size.
TEST(Sampler, TheOrderIsTheSameForEveryBatchSize) {
  const auto a = Sampler::make(4, {{1601}}, 16, 1);
  const auto b = Sampler::make(4, {{1601}}, 16, 7);
  for (int64_t n = 0; n < 500; ++n) ASSERT_EQ(a->at(n, 0), b->at(n / 7, n % 7));
}

TEST(Sampler, PassesAndSeedsHaveDifferentOrders) {
  constexpr int64_t kWindows = 100;
  const auto order = [&](uint64_t seed, int64_t pass) {
    const auto s = Sampler::make(seed, {{kWindows * 8 + 1}}, 8, kWindows);
    std::vector<int64_t> windows;
    for (int64_t i = 0; i < kWindows; ++i)
      windows.push_back(s->at(pass, i).window);
    return windows;
  };
  std::set<std::vector<int64_t>> orders;
  for (uint64_t seed = 0; seed < 4; ++seed)
    for (int64_t pass = 0; pass < 4; ++pass) orders.insert(order(seed, pass));
  EXPECT_EQ(orders.size(), 16U);
}

TEST(Sampler, DataTooShortForOneWindowAreRefused) {
  EXPECT_EQ(num_windows(0, 4), 0);
  EXPECT_EQ(num_windows(4, 4), 0);
  EXPECT_EQ(num_windows(5, 4), 1);
  EXPECT_EQ(num_windows(8, 4), 1);
  EXPECT_EQ(num_windows(9, 4), 2);
  EXPECT_SAYS(Sampler::make(1, {{256}}, 256, 4), "256 tokens");
  EXPECT_FALSE(Sampler::make(1, {{256}}, 0, 4).ok());
  EXPECT_FALSE(Sampler::make(1, {{256}}, 8, 0).ok());
  EXPECT_FALSE(Sampler::make(1, {{256}, {8}}, 8, 4).ok());
  EXPECT_FALSE(Sampler::make(1, {{256}, {256, -1}}, 8, 4).ok());
  EXPECT_SAYS(Sampler::make(1, {{256, 0}, {256, 0}}, 8, 4), "no data set has");
}

TEST(Sampler, AMemberOfWeightZeroHasNoSequence) {
  ASSERT_OK_AND(const auto sampler,
                Sampler::make(1, {{0, 0}, {256, 3}, {64, 0}, {256, 1}, {0, 0}},
                              8, /*global_batch=*/4));
  std::map<size_t, int> taken;
  for (int64_t s = 0; s < 100; ++s)
    for (int64_t i = 0; i < 4; ++i) ++taken[sampler.at(s, i).member];
  EXPECT_EQ(taken, (std::map<size_t, int>{{1, 300}, {3, 100}}));
}

// At any time each member has had its share, but for one sequence for each
// member before it and itself, and each of its windows once a pass.
TEST(Sampler, SourcesHaveTheirSharesAllTheTime) {
  std::mt19937_64 random(1);
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<Sampler::MixtureMember> members(1 + random() % 6);
    double all = 0;
    for (auto& s : members) {
      s = {static_cast<int64_t>(1 + 8 * (1 + random() % 40)),
           static_cast<double>(1 + random() % 1000) / 100};
      all += s.weight;
    }
    ASSERT_OK_AND(const auto sampler,
                  Sampler::make(7, members, 8, /*global_batch=*/5));
    std::vector<int64_t> taken(members.size());
    std::vector<std::map<std::pair<int64_t, int64_t>, int>> used(
        members.size());
    for (int64_t n = 0; n < 2000; ++n) {
      const auto s = sampler.at(n / 5, n % 5);
      const int64_t windows = num_windows(members[s.member].num_tokens, 8);
      ASSERT_EQ(s.epoch, taken[s.member]++ / windows);
      ASSERT_EQ(++used[s.member][std::pair(s.epoch, s.window)], 1);
      for (size_t k = 0; k < members.size(); ++k)
        ASSERT_NEAR(static_cast<double>(taken[k]),
                    static_cast<double>(n + 1) * members[k].weight / all,
                    static_cast<double>(k) + 1);
    }
  }
}

TEST(ValidationWindows, AreEvenlySpreadAscendingAndDistinct) {
  EXPECT_EQ(validation_windows(10, 0), std::vector<int64_t>{});
  EXPECT_EQ(validation_windows(0, 10), std::vector<int64_t>{});
  EXPECT_EQ(validation_windows(10, 2), (std::vector<int64_t>{2, 7}));
  EXPECT_EQ(validation_windows(3, 10), (std::vector<int64_t>{0, 1, 2}));
  for (const int64_t count : {1, 5, 64, 99, 100}) {
    const auto w = validation_windows(100, count);
    ASSERT_EQ(static_cast<int64_t>(w.size()), count);
    for (size_t i = 1; i < w.size(); ++i) {
      EXPECT_GE(w[i] - w[i - 1], 100 / count);
      EXPECT_LE(w[i] - w[i - 1], 100 / count + 1);
    }
    EXPECT_GE(w.front(), 0);
    EXPECT_LT(w.back(), 100);
  }
}

}  // namespace
}  // namespace remesh::data
