// One run over many meshes: workers join and are killed, and meshes are
// requested; the losses equal those of an undisturbed run.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tests/e2e/e2e.h"

namespace remesh::e2e {
namespace {

class MeshTest : public E2e {
 protected:
  // A step finished on that mesh, after `after`.
  bool wait_for_mesh(int dp, int pp, int tp, int64_t after) {
    return testing::wait_until(
        [&] {
          for (const Json& m : c().metrics())
            if (m["step"] > after && m["mesh"]["dp"] == dp &&
                m["mesh"]["pp"] == pp && m["mesh"]["tp"] == tp)
              return true;
          return false;
        },
        30'000);
  }
  void ask_for(const std::string& layout) {
    const Finished f = c().remesh({"mesh", layout, c().run_dir()});
    ASSERT_EQ(f.exit.code, 0) << f.output;
  }
};

TEST_F(MeshTest, ARunGoesThroughFourMeshesByJoinsAndKills) {
  const Settings job =
      endless({{"elastic.max_slots", "3"}, {"checkpoint.interval", "5"}});
  make(job);
  c().start_coordinator();
  for (const char* name : {"w1", "w2"}) c().start_worker({.name = name});
  ASSERT_TRUE(wait_for_mesh(2, 1, 1, 5));
  ask_for("dp1,tp2");
  ASSERT_TRUE(wait_for_mesh(1, 1, 2, 0));
  const auto pids = c().rank_pids(2);
  ASSERT_EQ(pids.size(), 2U);
  testing::send_signal(pids.at(1), SIGKILL);
  ASSERT_TRUE(c().wait_for_event("failure"));
  ASSERT_TRUE(wait_for_mesh(1, 1, 2, c().last_step()));
  ask_for("pp2");
  ASSERT_TRUE(wait_for_mesh(1, 2, 1, 0));
  c().worker("w2").kill(SIGKILL);
  ASSERT_TRUE(c().wait_for_event("failure", 2));
  c().start_worker({.name = "w2"});
  c().start_worker({.name = "w3"});
  // One slot is left: pp2 is released and the mesh is selected automatically.
  ASSERT_TRUE(wait_for_mesh(3, 1, 1, 0));
  stop_in_order();
  expect_sequence(c().last_step());
  const auto disturbed = raw_losses(c().metric_lines());
  const auto undisturbed = raw_losses(undisturbed_lines(job, 1));
  ASSERT_EQ(disturbed.size(), undisturbed.size());
  for (size_t i = 0; i < disturbed.size(); ++i)
    EXPECT_NEAR(std::stod(disturbed[i]) / std::stod(undisturbed[i]), 1, 1e-4)
        << "step " << i + 1;
}

}  // namespace
}  // namespace remesh::e2e
