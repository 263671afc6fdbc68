#include "tests/testing/local_comm.h"

#include "parallel/comm/mesh.h"
#include "tests/testing/expect.h"
#include "tests/testing/seed.h"
#include "tests/unit/comm/comm_contract.h"

namespace remesh::comm {
namespace {

TEST(LocalComm, KeepsTheContractUnderRandomOperations) {
  const uint64_t seed = test_seed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  for (const int n : {1, 2, 3, 5}) {
    std::vector<std::vector<std::string>> failures(static_cast<size_t>(n));
    on_ranks(n, [&](Comm& c) {
      failures[static_cast<size_t>(c.rank())] =
          check_contract(c, seed, 60, 20000);
    });
    for (const auto& of_rank : failures)
      for (const auto& f : of_rank) ADD_FAILURE() << f;
  }
}

TEST(LocalComm, SendWaitsForItsReceiver) {
  on_ranks(2, [](Comm& c) {
    const std::byte b{1};
    std::byte in{0};
    if (c.rank() == 0) {
      auto request = c.start_send({&b, 1}, 1, 0);
      EXPECT_FALSE(request->test());
      c.barrier();
      request->wait();
    } else {
      c.barrier();
      c.recv({&in, 1}, 0, 0);
      EXPECT_EQ(in, b);
    }
  });
}

TEST(LocalCommDeathTest, DifferentCollectivesAreCaught) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(on_ranks(2,
                        [](Comm& c) {
                          std::vector<float> x(c.rank() == 0 ? 3 : 4);
                          c.all_reduce(std::span(x), Op::kSum);
                        }),
               "ranks call different collectives");
}

TEST(Mesh, GroupsAreTheAxesOfTheLayout) {
  for (const geometry::Layout layout :
       {geometry::Layout{.dp = 2, .pp = 2, .tp = 2},
        geometry::Layout{.dp = 3, .pp = 1, .tp = 2, .cp = 2},
        geometry::Layout{}}) {
    on_ranks(layout.world(), [&](Comm& world) {
      ASSERT_OK_AND(auto made, Mesh::make(world, layout));
      Mesh& mesh = *made;
      const geometry::Coord me = layout.coord(world.rank());
      EXPECT_EQ(mesh.coord(), me);
      const auto expect_axis = [&](Comm& axis, int degree, int index,
                                   int geometry::Coord::*coordinate) {
        EXPECT_EQ(axis.size(), degree);
        EXPECT_EQ(axis.rank(), index);
        int64_t sum = world.rank();
        axis.all_reduce(std::span(&sum, 1), Op::kSum);
        int64_t want = 0;
        for (int i = 0; i < degree; ++i) {
          geometry::Coord peer = me;
          peer.*coordinate = i;
          want += layout.rank(peer);
        }
        EXPECT_EQ(sum, want);
      };
      expect_axis(mesh.pp(), layout.pp, me.pp, &geometry::Coord::pp);
      expect_axis(mesh.tp(), layout.tp, me.tp, &geometry::Coord::tp);
      expect_axis(mesh.cp(), layout.cp, me.cp, &geometry::Coord::cp);
      EXPECT_EQ(mesh.data().size(), layout.dp * layout.cp);
      EXPECT_EQ(mesh.data().rank(), me.dp * layout.cp + me.cp);
      if (layout.cp == 1)
        expect_axis(mesh.data(), layout.dp, me.dp, &geometry::Coord::dp);
    });
  }
}

TEST(Mesh, RefusesAWorldOfAnotherSize) {
  on_ranks(3, [](Comm& world) {
    const auto made = Mesh::make(world, {.dp = 4});
    ASSERT_FALSE(made.ok());
    EXPECT_EQ(made.status().message(),
              "mesh dp4: needs 4 ranks, the "
              "world has 3");
  });
}

}  // namespace
}  // namespace remesh::comm
