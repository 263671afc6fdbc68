// A temporary folder of a test.
//
// In namespace remesh: a namespace remesh::testing would hide GoogleTest's in
// the files that include this one.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>

#include "proto/base/check.h"

namespace remesh {

// A new folder BASE/remesh-test-XXXXXX without symbolic links in its path,
// removed with its contents by the destructor unless REMESH_KEEP is set.
class TempDir {
 public:
  TempDir() : TempDir("/tmp") {}
  explicit TempDir(const std::string& base)
      : path_(base + "/remesh-test-XXXXXX") {
    CHECK(mkdtemp(path_.data()) != nullptr);
    path_ = std::filesystem::canonical(path_).string();
  }
  ~TempDir() {
    if (std::getenv("REMESH_KEEP") != nullptr) return;
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const {
    return path_ + "/" + name;
  }
  // Writes a file and returns its path.
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(*this / name, std::ios::binary) << text;
    return *this / name;
  }

 private:
  std::string path_;
};

// In shared memory.
class ShmDir : public TempDir {
 public:
  ShmDir() : TempDir("/dev/shm") {}
};

// "" if it cannot be read.
inline std::string read_whole(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

}  // namespace remesh
