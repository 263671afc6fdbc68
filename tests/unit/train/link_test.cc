#include "worker/train/link.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/testing/local_comm.h"

namespace remesh::train {
namespace {

std::vector<double> measured(const std::vector<std::string>& hosts) {
  auto comms = comm::make_local_comms(static_cast<int>(hosts.size()));
  std::vector<double> out(hosts.size());
  std::vector<std::thread> ranks;
  for (size_t r = 0; r < hosts.size(); ++r)
    ranks.emplace_back([&, r] { out[r] = measure_link(*comms[r], hosts); });
  for (std::thread& t : ranks) t.join();
  return out;
}

TEST(Link, AllRanksKnowTheSameRate) {
  const auto got = measured({"a", "b", "a", "b", "c"});
  EXPECT_GT(got[0], 1e6);
  for (const double rate : got) EXPECT_EQ(rate, got[0]);
}

TEST(Link, OneHostHasNone) {
  EXPECT_EQ(measured({"a", "a"}), (std::vector<double>{0, 0}));
  EXPECT_EQ(measured({"a"}), std::vector<double>{0});
}

}  // namespace
}  // namespace remesh::train
