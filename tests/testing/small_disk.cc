#include "tests/testing/small_disk.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <utility>

namespace remesh::testing {
namespace fs = std::filesystem;
namespace {

// Mounts of this program and its children that end with them, however they end.
bool own_mounts() {
  return unshare(CLONE_NEWNS) == 0 &&
         mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

}  // namespace

SmallDisk::SmallDisk(std::string path, int64_t bytes) : path_(std::move(path)) {
  mkdir(path_.c_str(), 0755);
  const std::string size = fmt::format("size={}", bytes);
  mounted_ = own_mounts() &&
             mount("tmpfs", path_.c_str(), "tmpfs", 0, size.c_str()) == 0;
}

SmallDisk::~SmallDisk() {
  if (mounted_) umount2(path_.c_str(), MNT_DETACH);
}

void SmallDisk::fill(int64_t leave) const {
  std::error_code ignored;
  const auto room = static_cast<int64_t>(fs::space(path_, ignored).available);
  if (room <= leave) return;
  std::ofstream(path_ + "/filler", std::ios::app)
      << std::string(static_cast<size_t>(room - leave), 'x');
}

void SmallDisk::free() const {
  std::error_code ignored;
  fs::remove(path_ + "/filler", ignored);
}

}  // namespace remesh::testing
