// Which free segment a rank reuses.
#include "worker/train/segments.h"

#include <filesystem>
#include <set>
#include <string>

#include "checkpoint/memory/segment_directory.h"
#include "tests/testing/expect.h"
#include "tests/testing/temp_dir.h"

namespace remesh::train {
namespace {

using memory::StateSegment;

constexpr uint64_t kJob = 0x1234;

TEST(Segments, TakesTheSmallestFreeOneOfAboutTheSize) {
  const ShmDir dir;
  int number = 0;
  for (const int64_t elements : {1000, 60000, 40000, 50000}) {
    const auto made = StateSegment::create(
        memory::segment_path(dir.path(), kJob, number++), kJob, elements);
    ASSERT_OK(made);
  }
  const Segments segments(dir.path(), kJob);
  // The number of the segment for `elements`: 4 if it is a new one.
  const auto taken = [&](int64_t elements, const std::set<std::string>& avoid) {
    const auto s = segments.take(elements, avoid, {});
    if (!s.ok()) return -1;
    for (const auto& f : memory::list_segments(dir.path(), kJob))
      if (f.path == (*s)->path()) {
        if (f.number == 4) std::filesystem::remove(f.path);
        return f.number;
      }
    return -1;
  };
  EXPECT_EQ(taken(38000, {}), 2);
  EXPECT_EQ(taken(46000, {}), 3);
  EXPECT_EQ(taken(58000, {}), 1);
  EXPECT_EQ(taken(62000, {}), 4);
  EXPECT_EQ(taken(30000, {}), 4);  // the others would waste memory
  const auto smallest = memory::segment_path(dir.path(), kJob, 2);
  EXPECT_EQ(taken(39900, {smallest}), 4);
  const auto owned = segments.open(smallest, StateSegment::Mode::kWrite);
  ASSERT_OK(owned);
  EXPECT_EQ(taken(39900, {}), 4);
}

}  // namespace
}  // namespace remesh::train
