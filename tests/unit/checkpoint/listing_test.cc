// What the coordinator finds where the file system shows an older listing.

#include <algorithm>
#include <string>
#include <vector>

#include "coordinator/server/scanner.h"
#include "tests/testing/expect.h"
#include "tests/testing/hooked_file_system.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/checkpoint/fixture.h"

namespace remesh::store {
namespace {

std::vector<int64_t> steps_of(const core::CheckpointsScanned& scan) {
  std::vector<int64_t> steps;
  for (const core::CheckpointInfo& c : scan.valid) steps.push_back(c.step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

TEST(Listing, ACommittedCheckpointThatIsNotListedIsFoundByName) {
  const TempDir dir;
  const std::string folder = dir / "checkpoints";
  const auto table = geometry::ParamTable::make(tiny_model());
  const State state = random_state(table.num_elements(), 5);
  const auto plain = posix_file_system();
  for (const int64_t step : {2, 4})
    ASSERT_OK(save(*plain, folder, {step, 1}, table, state, 1));
  std::vector<std::string> calls;
  HookedFileSystem late(
      [&](const std::string& call, const std::string& path) {
        if (call == "list" || path == folder + "/.listing")
          calls.push_back(call);
        return ok_status();
      },
      {manifest::step_name(4)});
  using Steps = std::vector<int64_t>;
  const auto steps = [&](int64_t saved_step) {
    const auto scan = server::scan_checkpoints(late, folder, saved_step);
    return scan.ok() ? steps_of(*scan) : Steps{};
  };
  EXPECT_EQ(steps(0), (Steps{2}));
  ASSERT_GE(calls.size(), 3u);
  EXPECT_EQ(calls[0], "create") << "a change makes the client list it again";
  EXPECT_EQ(calls[1], "remove");
  EXPECT_EQ(steps(2), (Steps{2}));
  EXPECT_EQ(steps(4), (Steps{2, 4}));
  EXPECT_EQ(steps(6), (Steps{2}));
  EXPECT_FALSE(plain->exists(folder + "/.listing"));
}

}  // namespace
}  // namespace remesh::store
