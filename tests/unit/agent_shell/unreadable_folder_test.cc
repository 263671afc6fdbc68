// Folders of storage that fails while they are read must not end the daemon.
#include <dirent.h>
#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <filesystem>

#include "proto/rundir/paths.h"
#include "tests/testing/expect.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/agent_shell/num_entries.h"
#include "worker/agent/shell/rank_logs.h"
#include "worker/agent/shell/scratch.h"

namespace {
std::atomic<bool> g_fails{false};
}  // namespace

// The C++ library calls this one instead of the C library's (ELF symbol
// interposition). The entries of a folder can be read, its end cannot.
extern "C" dirent* readdir(DIR* folder) {
  static const auto real =
      reinterpret_cast<dirent* (*)(DIR*)>(dlsym(RTLD_NEXT, "readdir"));
  dirent* const entry = real(folder);
  if (entry == nullptr && g_fails) errno = EIO;
  return entry;
}

namespace remesh::agent {
namespace {

namespace fs = std::filesystem;

class UnreadableFolderTest : public ::testing::Test {
 protected:
  ~UnreadableFolderTest() override {
    g_fails = false;
    std::error_code ignored;
    fs::remove_all(shared_root_of(root() + "/a"), ignored);
  }
  std::string root() const { return dir_ / "s"; }

  TempDir dir_;
};

TEST_F(UnreadableFolderTest, TheTestMakesReadingFail) {
  fs::create_directories(root() + "/x");
  g_fails = true;
  EXPECT_THROW(num_entries(root()), fs::filesystem_error);
}

TEST_F(UnreadableFolderTest, OldLogsStay) {
  for (int g = 1; g <= 3; ++g)
    fs::create_directories(rundir::rank_logs_path(dir_.path(), g));
  g_fails = true;
  EXPECT_NO_THROW(remove_old_logs(dir_.path(), 4, 9));
  g_fails = false;
  EXPECT_EQ(num_entries(dir_ / "logs"), 3);
}

TEST_F(UnreadableFolderTest, AWorkerStartsRefreshesItsStatesAndEnds) {
  fs::create_directories(root() + "/other");
  g_fails = true;
  ASSERT_OK_AND(auto scratch, Scratch::open(root(), "a"));
  ASSERT_OK(scratch->make_generation(1, 1));
  (void)scratch->refresh_states(0);
  scratch->remove_generation(1);
  scratch.reset();
}

}  // namespace
}  // namespace remesh::agent
