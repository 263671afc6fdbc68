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
#include <vector>

#include "proto/base/check.h"

namespace remesh {

// Removes the shared memory of workers whose own folders are below `folder`
// (worker/agent/shell/scratch.h): they leave their states there for a later
// run.
inline void remove_shared_memory_of(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<fs::path> left;
  for (fs::directory_iterator it("/dev/shm", error), end; !error && it != end;
       it.increment(error)) {
    std::ifstream in(it->path() / "owner");
    std::string owner;
    std::getline(in, owner);
    if (owner.starts_with(folder + "/")) left.push_back(it->path());
  }
  for (const fs::path& path : left) fs::remove_all(path, error);
}

// A new folder BASE/remesh-test-XXXXXX without symbolic links in its path,
// removed with its contents by the destructor unless REMESH_KEEP is set, and
// with the shared memory of the workers that had their folders in it.
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
    remove_shared_memory_of(path_);
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
