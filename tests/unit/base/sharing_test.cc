#include "proto/base/sharing.h"

#include <grp.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/file_system.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"

namespace remesh {
namespace {

class SharingTest : public ::testing::Test {
 protected:
  SharingTest() : umask_(umask(022)) {}
  ~SharingTest() override { umask(umask_); }
  mode_t mode(const std::string& name) const {
    struct stat st {};
    EXPECT_EQ(stat((dir_.path() + "/" + name).c_str(), &st), 0) << name;
    return st.st_mode & 07777;
  }
  void create(const std::string& folder) {
    const auto fs = posix_file_system();
    const std::string path = dir_.path() + "/" + folder;
    ASSERT_OK(fs->create_dirs(path + "/inner"));
    ASSERT_OK(write_file_atomically(*fs, path + "/inner/file", "x"));
  }

  const testing::TempDir dir_;
  const mode_t umask_;
};

TEST_F(SharingTest, FilesAreTheUsersAlone) {
  ASSERT_OK(share_new_files(""));
  create("run");
  EXPECT_EQ(mode("run"), 0700U);
  EXPECT_EQ(mode("run/inner"), 0700U);
  EXPECT_EQ(mode("run/inner/file"), 0600U);
}

TEST_F(SharingTest, APrivateFileIsNotForTheGroup) {
  umask(0007);
  const std::string path = dir_.path() + "/secret";
  ASSERT_OK(create_private_file(path, "abc"));
  EXPECT_EQ(mode("secret"), 0600U);
  EXPECT_EQ(read_file(*posix_file_system(), path, 10).value(), "abc");
  EXPECT_EQ(create_private_file(path, "def").code(), Code::kAlreadyExists);
  // Nor is anything written through a link.
  ASSERT_EQ(symlink((dir_.path() + "/target").c_str(),
                    (dir_.path() + "/link").c_str()),
            0);
  EXPECT_FALSE(create_private_file(dir_.path() + "/link", "abc").ok());
  EXPECT_FALSE(posix_file_system()->exists(dir_.path() + "/target"));
}

TEST_F(SharingTest, AGroupMayReadAndWrite) {
  // Another group than the process has, where that is permitted.
  const gid_t gid = geteuid() == 0 ? getegid() + 1 : getegid();
  const struct group* const g = getgrgid(gid);
  if (g == nullptr) GTEST_SKIP() << "needs named_group: " << gid;
  const std::string name = g->gr_name, run = dir_.path() + "/run";
  ASSERT_OK(share_new_files(name));
  ASSERT_OK(give_to_group(run, name));
  create("run");
  EXPECT_EQ(mode("run"), 03770U);
  // As an administrator may have prepared it.
  ASSERT_EQ(chmod(run.c_str(), 02770), 0);
  EXPECT_OK(give_to_group(run, name));
  EXPECT_EQ(mode("run"), 02770U);
  EXPECT_EQ(mode("run/inner"), 02770U);
  EXPECT_EQ(mode("run/inner/file"), 0660U);
  struct stat st {};
  ASSERT_EQ(stat((run + "/inner/file").c_str(), &st), 0);
  EXPECT_EQ(st.st_gid, gid);
}

TEST_F(SharingTest, AGroupThatDoesNotExistIsNamed) {
  const Status s = share_new_files("no-such-group");
  EXPECT_EQ(s.code(), Code::kNotFound);
  EXPECT_SAYS(s, "no-such-group");
}

}  // namespace
}  // namespace remesh
