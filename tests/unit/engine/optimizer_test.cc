#include "worker/engine/optimizer.h"

#include <gtest/gtest.h>

namespace remesh::engine {
namespace {

TEST(Clip, ShortensOnlyWhatIsTooLong) {
  EXPECT_DOUBLE_EQ(clip_coefficient(1.0, 0.5), 1.0);
  EXPECT_DOUBLE_EQ(clip_coefficient(1.0, 4.0), 1.0 / (4.0 + 1e-6));
  EXPECT_DOUBLE_EQ(clip_coefficient(0.0, 1e9), 1.0);
}

}  // namespace
}  // namespace remesh::engine
