#include "tests/testing/temp_dir.h"

#include <gtest/gtest.h>

#include <filesystem>

namespace remesh {
namespace {

// Workers of a job that was interrupted leave their states in shared memory,
// where they outlive the test's own folder.
TEST(TempDirTest, TakesTheSharedMemoryOfItsWorkersWithIt) {
  const ShmDir mine;
  const ShmDir of_another;
  {
    const TempDir dir;
    mine.write("owner", dir / "scratch/w1\n");
    of_another.write("owner", dir.path() + "x/scratch/w1\n");
  }
  EXPECT_FALSE(std::filesystem::exists(mine.path()));
  EXPECT_TRUE(std::filesystem::exists(of_another.path()));
}

}  // namespace
}  // namespace remesh
