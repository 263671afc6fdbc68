#include "worker/train/link.h"

#include <gtest/gtest.h>

#include "tests/testing/local_comm.h"

namespace remesh::train {
namespace {

std::vector<double> measured(const std::vector<std::string>& hosts) {
  std::vector<double> out(hosts.size());
  comm::on_ranks(static_cast<int>(hosts.size()), [&](comm::Comm& comm) {
    out[static_cast<size_t>(comm.rank())] = measure_link(comm, hosts);
  });
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
