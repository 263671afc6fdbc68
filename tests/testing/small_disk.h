// A folder on its own small disk (a tmpfs), to be filled up. mounted() is false
// without permission to mount.
#pragma once

#include <cstdint>
#include <string>

namespace remesh::testing {

class SmallDisk {
 public:
  SmallDisk(std::string path, int64_t bytes);
  ~SmallDisk();
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  const std::string& path() const { return path_; }
  bool mounted() const { return mounted_; }
  // Leaves this many bytes free.
  void fill(int64_t leave) const;
  void free() const;

 private:
  std::string path_;
  bool mounted_ = false;
};

}  // namespace remesh::testing
