// A directory in shared memory that is removed at the end of the test.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

#include "proto/base/check.h"

namespace remesh::memory {

class ShmDir {
 public:
  ShmDir() {
    char name[] = "/dev/shm/remesh-test-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~ShmDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ShmDir(const ShmDir&) = delete;
  ShmDir& operator=(const ShmDir&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const {
    return path_ + "/" + name;
  }

 private:
  std::string path_;
};

}  // namespace remesh::memory
