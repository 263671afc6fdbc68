// A folder that is removed with the test, and helpers to check that nothing
// else is left behind.
#pragma once

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "proto/base/check.h"

namespace remesh::agent {

class TempDir {
 public:
  TempDir() {
    char name[] = "/tmp/remesh-test-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const {
    return path_ + "/" + name;
  }

 private:
  std::string path_;
};

inline int num_entries(const std::string& folder) {
  int n = 0;
  std::error_code ignored;
  for (const auto& e : std::filesystem::directory_iterator(folder, ignored)) {
    (void)e;
    ++n;
  }
  return n;
}

inline int num_open_fds() { return num_entries("/proc/self/fd"); }

}  // namespace remesh::agent
