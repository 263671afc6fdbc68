// Which generation made which steps, read back from metrics.jsonl.
#include "coordinator/rundir/first_steps.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "coordinator/rundir/lines.h"

namespace remesh::rundir {
namespace {

std::string line(int64_t step, int64_t generation) {
  pb::StepMetrics m;
  m.set_step(step);
  m.set_loss(1.5);
  m.set_generation(generation);
  return rundir::metrics_line(m) + "\n";
}

TEST(FirstSteps, AreTheFirstOfEachGeneration) {
  const std::string path =
      testing::TempDir() + "first-steps-" + std::to_string(getpid());
  std::ofstream(path) << line(1, 2) << line(2, 2) << "torn{\"generation\":9\n"
                      << line(3, 5) << line(4, 5) << line(5, 11);
  const auto found = first_steps(path);
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0].generation, 2);
  EXPECT_EQ(found[0].step, 1);
  EXPECT_EQ(found[1].generation, 5);
  EXPECT_EQ(found[1].step, 3);
  EXPECT_EQ(found[2].generation, 11);
  EXPECT_EQ(found[2].step, 5);
  unlink(path.c_str());
  EXPECT_TRUE(first_steps(path).empty());
}

// As another program, or another release, may write them.
TEST(FirstSteps, OrderAndSpacingDoNotMatter) {
  const std::string path =
      testing::TempDir() + "first-steps-order-" + std::to_string(getpid());
  std::ofstream(path) << line(1, 1)
                      << "{ \"generation\" : 2, \"loss\" : 1, \"step\" : 2 }\n"
                      << "{\"loss\":1,\"step\":3,\"generation\":2} \n"
                      << "{\"step\":4,\"loss\":1,\"generation\":3\n"
                      << "{\"step\":4,\"loss\":1}\n";
  int64_t damaged = 0;
  const auto found = first_steps(path, &damaged);
  unlink(path.c_str());
  EXPECT_EQ(damaged, 1) << "the cut line";
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[1].generation, 2);
  EXPECT_EQ(found[1].step, 2);
}

}  // namespace
}  // namespace remesh::rundir
