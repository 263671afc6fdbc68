// The stores of weights and gradients alone, with passes simulated by the test.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/testing/llama.h"
#include "tests/testing/local_comm.h"
#include "tests/unit/exchange/wrapped_comm.h"
#include "worker/engine/grad_store.h"
#include "worker/engine/optimizer.h"
#include "worker/engine/units.h"

namespace remesh::engine {
namespace {

using geometry::ShardTable;
using geometry::ZeroPlan;

geometry::ParamTable tiny_table(int64_t layers = 3) {
  return geometry::ParamTable::make(geometry::llama(8, layers, 2, 1, 21, 33));
}

ShardTable whole_shard(const geometry::ParamTable& table) {
  return ShardTable::make(table, {}, {}, {0, table.config().n_layers}).value();
}

float value(int rank, int64_t e, int microbatch) {
  return static_cast<float>((e * 7 + rank * 13 + microbatch * 5) % 101) / 3;
}

// Counts the sums in progress, each of which has scratch of its own. None ends
// before somebody waits for it.
class CountingComm final : public exchange::WrappedComm {
 public:
  explicit CountingComm(comm::Comm& inner) : ObservedComm(inner, {}) {}
  comm::RequestPtr start_all_reduce(std::span<float> d, comm::Op op) override {
    return counted(inner().start_all_reduce(d, op));
  }
  comm::RequestPtr start_reduce_scatter(std::span<const float> all,
                                        std::span<float> mine) override {
    return counted(inner().start_reduce_scatter(all, mine));
  }
  int started() const { return started_; }
  int most() const { return most_; }

 private:
  class Counted final : public comm::Request {
   public:
    Counted(comm::RequestPtr inner, int& now)
        : inner_(std::move(inner)), now_(now) {}
    ~Counted() override { --now_; }
    void wait() override { inner_->wait(); }
    bool test() override { return false; }

   private:
    comm::RequestPtr inner_;
    int& now_;
  };
  comm::RequestPtr counted(comm::RequestPtr inner) {
    ++started_;
    most_ = std::max(most_, ++now_);
    return std::make_unique<Counted>(std::move(inner), now_);
  }
  int started_ = 0;
  int now_ = 0;
  int most_ = 0;
};

// Rank r adds r microbatches (so rank 0 none) with values of its own, twice.
void sum_on(int n, const geometry::ZeroOptions& zero, bool one_microbatch,
            int64_t bucket, std::vector<float>& out, int* most = nullptr) {
  const auto table = tiny_table();
  const ShardTable shard = whole_shard(table);
  out.assign(static_cast<size_t>(shard.num_elements()), -1);
  comm::on_ranks(n, [&](comm::Comm& data) {
    const int r = data.rank();
    const auto backend = kernels::make_cpu_backend(1);
    const ZeroPlan plan = ZeroPlan::make(shard, zero, n, r).value();
    double waited_s = 0;
    const auto store =
        GradStore::make(shard, plan, *backend, one_microbatch, bucket, waited_s)
            .value();
    std::unique_ptr<comm::Comm> group, replicas;
    if (plan.shard_size() > 1)
      group = data.split(plan.replica_index(), plan.shard_index());
    if (plan.num_replicas() > 1)
      replicas = data.split(plan.shard_index(), plan.replica_index());
    GradGroups groups;
    groups.shard = group.get();
    std::unique_ptr<CountingComm> counting;
    if (replicas != nullptr)
      counting = std::make_unique<CountingComm>(*replicas);
    groups.replicas = counting.get();
    store->connect(groups);
    for (int round = 0; round < 2; ++round) {
      store->begin();
      const int mine = one_microbatch ? (r > 0 ? 1 : 0) : r;
      for (int m = 0; m < mine; ++m)
        for (size_t u = shard.units().size(); u-- > 0;) {
          const geometry::Unit& unit = shard.units()[u];
          float* g = store->grads(static_cast<int>(u));
          for (int64_t e = unit.begin; e < unit.end; ++e)
            g[e - unit.begin] += value(r, e, m);
          if (m + 1 == mine) store->ready(static_cast<int>(u));
        }
      store->finish([] {});
    }
    for (size_t u = 0; u < shard.units().size(); ++u) {
      const auto sum = store->reduced(u);
      // Each element is written by one rank, and once more by its replicas.
      if (plan.replica_index() == 0)
        std::copy(sum.begin(), sum.end(),
                  out.begin() + plan.update_range(u).begin);
    }
    if (most != nullptr && r == 0) *most = counting->most();
  });
}

std::vector<float> naive_sum(int n, bool one_microbatch) {
  const auto table = tiny_table();
  std::vector<float> out;
  for (int64_t e = 0; e < table.num_elements(); ++e) {
    float sum = 0;
    for (int r = 0; r < n; ++r) {
      float local = 0;
      const int mine = one_microbatch ? (r > 0 ? 1 : 0) : r;
      for (int m = 0; m < mine; ++m) local += value(r, e, m);
      sum = r == 0 ? local : sum + local;
    }
    out.push_back(sum);
  }
  return out;
}

TEST(GradStore, EveryZeroStageGivesTheBitsOfASumInRankOrder) {
  for (const int n : {1, 2, 3, 4})
    for (const bool one : {false, true})
      for (int stage = 0; stage <= 3; ++stage)
        for (const int64_t bucket : {97, 100000}) {
          std::vector<float> got;
          sum_on(n, {.stage = stage}, one, bucket, got);
          EXPECT_EQ(got, naive_sum(n, one))
              << n << " ranks, stage " << stage << ", one " << one;
        }
}

TEST(GradStore, ShardGroupsAreSummedFirstThenTheirReplicas) {
  std::vector<float> got;
  sum_on(4, {.stage = 2, .shard_group = 2}, false, 500, got);
  const std::vector<float> want = naive_sum(4, false);
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT_NEAR(got[i], want[i], 1e-5 * std::abs(want[i]) + 1e-6);
}

TEST(GradStore, FewBucketsOfALargeUnitAreSummedAtOnce) {
  std::vector<float> got;
  int most = 0;
  sum_on(2, {.stage = 0}, false, /*bucket=*/3, got, &most);
  EXPECT_EQ(got, naive_sum(2, false));
  EXPECT_GT(most, 1);
  EXPECT_LE(most, 8);
}

// Each layer's gradient is final long before the first sum has ended. Waiting
// for the oldest sum, which is progress, is waiting for no other.
TEST(GradStore, FewUnitsAreScatteredAtOnce) {
  const auto table = tiny_table(20);
  const ShardTable shard = whole_shard(table);
  comm::on_ranks(2, [&](comm::Comm& comm) {
    const auto backend = kernels::make_cpu_backend(1);
    const ZeroPlan plan =
        ZeroPlan::make(shard, {.stage = 1}, 2, comm.rank()).value();
    double waited_s = 0;
    const auto store =
        GradStore::make(shard, plan, *backend, false, 1000, waited_s).value();
    CountingComm counting(comm);
    GradGroups groups;
    groups.shard = &counting;
    store->connect(groups);
    store->begin();
    int summed = 0;
    store->finish([&] { EXPECT_LE(counting.started(), ++summed + 8); });
    EXPECT_EQ(counting.started(), 22);
    EXPECT_EQ(counting.most(), 8);
  });
}

// With one microbatch a step the higher stages hold a part of the gradients.
TEST(GradStore, StreamingHoldsLess) {
  const auto table = tiny_table(12);
  const ShardTable shard = whole_shard(table);
  const auto backend = kernels::make_cpu_backend(1);
  const auto bytes = [&](int stage, bool one) {
    const ZeroPlan plan = ZeroPlan::make(shard, {.stage = stage}, 2, 0).value();
    double waited_s = 0;
    return GradStore::make(shard, plan, *backend, one, 1000, waited_s)
        .value()
        ->bytes();
  };
  EXPECT_EQ(bytes(1, true), bytes(2, false));
  EXPECT_LT(bytes(2, true), bytes(2, false));
  EXPECT_EQ(bytes(3, true), bytes(2, true));
}

TEST(Units, SharesAreWholeAndPadded) {
  const auto table = tiny_table();
  const ShardTable shard = whole_shard(table);
  for (int z = 1; z <= 5; ++z) {
    const UnitLayout layout(shard, z);
    int64_t at = 0;
    for (size_t u = 0; u < shard.units().size(); ++u) {
      EXPECT_EQ(layout.offset(u), at);
      EXPECT_EQ(layout.length(u), layout.share(u) * z);
      EXPECT_GE(layout.length(u), shard.units()[u].numel());
      EXPECT_EQ(layout.share(u) % 16, 0);
      at += layout.length(u);
    }
    EXPECT_EQ(layout.total(), at);
  }
}

// Arbitrary ranges, even within a parameter, update like the full vector.
TEST(Optimizer, SharesOfAUpdateAreTheUpdate) {
  const auto table = tiny_table();
  const ShardTable shard = whole_shard(table);
  const auto backend = kernels::make_cpu_backend(1);
  const OptimizerOptions options{.weight_decay = 0.5};
  const auto n = static_cast<size_t>(shard.num_elements());
  const auto update = [&](int z) {
    std::vector<float> whole(n);
    double squares = 0;
    for (int r = 0; r < z; ++r) {
      const ZeroPlan plan = ZeroPlan::make(shard, {.stage = 1}, z, r).value();
      const geometry::RankShard rank{shard, plan};
      const auto size = static_cast<size_t>(plan.state_elements());
      std::vector<float> p(size), m(size), v(size);
      for (size_t u = 0; u < shard.units().size(); ++u) {
        const auto range = plan.update_range(u);
        const auto at = static_cast<size_t>(plan.state_offset(u));
        std::vector<float> g;
        for (int64_t e = range.begin; e < range.end; ++e) {
          g.push_back(value(1, e, 0));
          p[at + g.size() - 1] = value(2, e, 0);
        }
        squares += square_sum(*backend, options, rank, u, g);
        update_unit(*backend, options,
                    {.number = 1, .lr = 0.1, .grad_scale = 0.5}, rank, u, g,
                    {p, m, v}, {p, m, v});
        for (int64_t e = range.begin; e < range.end; ++e)
          whole[static_cast<size_t>(e)] =
              p[at + static_cast<size_t>(e - range.begin)];
      }
    }
    return std::pair(whole, squares);
  };
  const auto [one, squares] = update(1);
  for (const int z : {2, 3, 5}) {
    const auto [parts, sum] = update(z);
    EXPECT_EQ(parts, one) << z;
    EXPECT_NEAR(sum / squares, 1, 1e-6);
  }
  // Norms do not decay, matrices do.
  const auto norm = static_cast<size_t>(shard.find(geometry::Role::kFinalNorm));
  const auto e = shard[norm].offset;
  const float grad = value(1, e, 0) * 0.5F;
  ASSERT_GT(grad, 0);
  EXPECT_NEAR(one[static_cast<size_t>(e)], value(2, e, 0) - 0.1F, 1e-4);
}

}  // namespace
}  // namespace remesh::engine
