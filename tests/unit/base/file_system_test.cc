// write_file_atomically(): old or new bytes, whatever fails.
#include "proto/base/file_system.h"

#include <filesystem>
#include <fstream>
#include <set>

#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/testing/hooked_file_system.h"
#include "tests/testing/memory_file_system.h"

namespace remesh {
namespace {

using Fault = MemoryFileSystem::Fault;
using Survives = MemoryFileSystem::Survives;

constexpr char kPath[] = "dir/file";

std::unique_ptr<MemoryFileSystem> with_old_file() {
  auto fs = std::make_unique<MemoryFileSystem>();
  EXPECT_OK(fs->create_dirs("dir"));
  EXPECT_OK(fs->sync_dir(""));
  EXPECT_OK(write_file_atomically(*fs, kPath, "old"));
  return fs;
}

TEST(WriteFileAtomically, ACrashAtAnyCallLeavesTheOldOrTheNewBytes) {
  std::mt19937_64 rng(4711);
  std::set<std::string> seen;
  int64_t call = 0;
  for (bool reached = true; reached; ++call)
    for (const Survives survives :
         {Survives::kSyncedOnly, Survives::kAll, Survives::kSome}) {
      const auto fs = with_old_file();
      fs->fail_at(call, Fault::kCrash);
      const Status done = write_file_atomically(*fs, kPath, "new bytes");
      reached = fs->calls() > call;
      fs->recover(survives, rng);
      const auto text = read_file(*fs, kPath, 100);
      ASSERT_OK(text) << call;
      EXPECT_TRUE(*text == "new bytes" || (!done.ok() && *text == "old"))
          << call << ": " << *text;
      seen.insert(*text);
    }
  EXPECT_EQ(call, 7);  // create, write, sync, close, rename, sync of the folder
  EXPECT_EQ(seen.size(), 2u);
}

TEST(WriteFileAtomically, AFailureIsReportedAndLeavesNoTemporaryFile) {
  for (const Fault fault : {Fault::kIoOnce, Fault::kFull})
    for (auto [call, reached] = std::pair(int64_t{0}, true); reached; ++call) {
      const auto fs = with_old_file();
      fs->fail_at(call, fault);
      const Status done = write_file_atomically(*fs, kPath, "new bytes");
      reached = fs->calls() > call;
      fs->fail_at(0, Fault::kNone);
      EXPECT_EQ(*read_file(*fs, kPath, 100) == "new bytes" && done.ok(),
                done.ok())
          << call;
      EXPECT_EQ(fs->list("dir")->size(), 1u) << call;
    }
}

// Somebody may have moved a checkpoint to an archive and left a link.
TEST(RemoveAll, RemovesLinksAndNotWhatTheyLeadTo) {
  namespace fs = std::filesystem;
  const testing::TempDir dir;
  const fs::path archive = fs::path(dir.path()) / "archive";
  const fs::path folder = fs::path(dir.path()) / "folder";
  fs::create_directories(archive / "inner");
  fs::create_directories(folder / "deep" / "deeper");
  std::ofstream(archive / "file") << "kept";
  fs::create_directory_symlink(archive, folder / "deep" / "link");
  fs::create_symlink(archive / "nothing", folder / "dangling");
  fs::create_directory_symlink(archive, fs::path(dir.path()) / "top");
  const auto posix = posix_file_system();
  EXPECT_OK(remove_all(*posix, folder.string()));
  EXPECT_OK(remove_all(*posix, dir.path() + "/top"));
  EXPECT_OK(remove_all(*posix, dir.path() + "/never"));
  EXPECT_FALSE(fs::exists(folder));
  EXPECT_FALSE(fs::is_symlink(fs::path(dir.path()) / "top"));
  EXPECT_TRUE(fs::exists(archive / "file"));
  EXPECT_TRUE(fs::exists(archive / "inner"));
}

// As in a folder that others may not write to, or on a server that fails.
TEST(RemoveAll, DoesNotFollowALinkThatCannotBeRemoved) {
  namespace fs = std::filesystem;
  const testing::TempDir dir;
  const fs::path archive = fs::path(dir.path()) / "archive";
  const fs::path folder = fs::path(dir.path()) / "folder";
  fs::create_directories(archive / "inner");
  fs::create_directory(folder);
  fs::create_directory_symlink(archive, folder / "link");
  HookedFileSystem disk([](const std::string& call, const std::string& path) {
    return call == "remove" && path.ends_with("/link") ? io_error(path)
                                                       : ok_status();
  });
  EXPECT_EQ(remove_all(disk, folder.string()).code(), Code::kIo);
  EXPECT_TRUE(fs::exists(archive / "inner"));
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
}

// Another member of the group that owns the folder may put a link there.
TEST(WriteFileAtomically, DoesNotWriteThroughSymbolicLinks) {
  namespace fs = std::filesystem;
  const testing::TempDir dir;
  const std::string path = dir.path() + "/file", mine = dir.path() + "/mine";
  std::ofstream(mine) << "kept";
  fs::create_symlink(mine, path);
  const auto posix = posix_file_system();
  ASSERT_OK(write_file_atomically(*posix, path, "new"));
  EXPECT_EQ(*read_file(*posix, mine, 100), "kept");
  EXPECT_EQ(*read_file(*posix, path, 100), "new");
  EXPECT_FALSE(fs::is_symlink(path));
}

// As the shell's redirection does.
TEST(WriteOutput, WritesThroughALinkThatTheUserNames) {
  namespace fs = std::filesystem;
  const testing::TempDir dir;
  const std::string path = dir.path() + "/link", file = dir.path() + "/file";
  std::ofstream(file) << "old and longer";
  fs::create_symlink(file, path);
  ASSERT_OK(write_output(path, "new"));
  EXPECT_TRUE(fs::is_symlink(path));
  EXPECT_EQ(*read_file(*posix_file_system(), file, 100), "new");
  EXPECT_SAYS(write_output(dir.path() + "/none/file", ""), "No such file");
  EXPECT_SAYS(write_output(dir.path(), ""), "Is a directory");
}

// Nor can somebody else occupy the name, in a folder where only its owner may
// remove a file.
TEST(WriteFileAtomically, WritesToAnUnpredictableNameFirst) {
  const testing::TempDir dir;
  const std::string path = dir.path() + "/file";
  std::set<std::string> names;
  HookedFileSystem fs([&](const std::string& call, const std::string& at) {
    if (call.starts_with("create")) names.insert(at);
    return ok_status();
  });
  for (const char* text : {"1", "2", "3"})
    ASSERT_OK(write_file_atomically(fs, path, text));
  EXPECT_EQ(names.size(), 3U);
  EXPECT_FALSE(names.contains(path + ".tmp"));
  EXPECT_EQ(*fs.list(dir.path()), std::vector<std::string>{"file"});
}

TEST(WriteFileAtomically, RemovesWhatAKilledWriterLeft) {
  const testing::TempDir dir;
  const std::vector<std::string> others = {
      "afile.0123456789abcdef.tmp", "file.tmp", "other.0123456789abcdef.tmp"};
  for (const std::string& name : others)
    std::ofstream(dir.path() + "/" + name) << "kept";
  std::ofstream(dir.path() + "/file.0123456789abcdef.tmp") << "left";
  const auto fs = posix_file_system();
  ASSERT_OK(write_file_atomically(*fs, dir.path() + "/file", "new"));
  EXPECT_EQ(
      *fs->list(dir.path()),
      (std::vector<std::string>{others[0], "file", others[1], others[2]}));
}

TEST(FileSystem, WritesNothingThroughALink) {
  namespace fs = std::filesystem;
  const testing::TempDir dir;
  const std::string path = dir.path() + "/file", mine = dir.path() + "/mine";
  std::ofstream(mine) << "kept";
  fs::create_symlink(mine, path);
  const auto posix = posix_file_system();
  EXPECT_SAYS(posix->create(path), "through a link");
  EXPECT_FALSE(posix->create_streamed(path, {}).ok());
  EXPECT_FALSE(posix->open_to_write(path).ok());
  EXPECT_EQ(*read_file(*posix, mine, 100), "kept");
  EXPECT_EQ(*read_file(*posix, path, 100), "kept");  // may be read
}

TEST(ParentPath, IsTheFolderOfAName) {
  EXPECT_EQ(parent_path("a/b"), "a");
  EXPECT_EQ(parent_path("/a"), "/");
  EXPECT_EQ(parent_path("a"), ".");
}

}  // namespace
}  // namespace remesh
