// remove_all() while somebody else changes the folder.
#include <dirent.h>
#include <dlfcn.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <utility>

#include "proto/base/file_system.h"
#include "tests/testing/expect.h"
#include "tests/testing/temp_dir.h"

namespace {
std::function<void()> g_at_end_of_folder;
}  // namespace

// Takes precedence over that of the C library (ELF symbol interposition): calls
// the function once when the entries of a folder have been read.
extern "C" dirent* readdir(DIR* folder) {
  static const auto real =
      reinterpret_cast<dirent* (*)(DIR*)>(dlsym(RTLD_NEXT, "readdir"));
  dirent* const entry = real(folder);
  if (entry == nullptr && g_at_end_of_folder)
    std::exchange(g_at_end_of_folder, nullptr)();
  return entry;
}

namespace remesh {
namespace {

namespace fs = std::filesystem;

// As another member of the group can that shares a run directory.
TEST(RemoveAll, DoesNotFollowALinkThatTakesThePlaceOfAFolder) {
  const TempDir dir;
  const fs::path own = dir / "own", step = dir / "step", moved = dir / "moved";
  for (const fs::path& folder : {own, step}) {
    fs::create_directories(folder / "inner");
    std::ofstream(folder / "file") << "text";
  }
  bool replaced = false;
  g_at_end_of_folder = [&] {
    fs::rename(step, moved);
    fs::create_directory_symlink(own, step);
    replaced = true;
  };
  (void)remove_all(*posix_file_system(), step.string()).ok();
  EXPECT_TRUE(replaced);
  EXPECT_TRUE(fs::exists(own / "file"));
  EXPECT_TRUE(fs::exists(own / "inner"));
  EXPECT_TRUE(fs::is_empty(moved));
}

}  // namespace
}  // namespace remesh
