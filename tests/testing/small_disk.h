// A folder that is a small disk of its own (a tmpfs), to be filled up. Needs
// the right to mount: mounted() says whether it was granted.
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
  // Takes all room but this much.
  void fill(int64_t leave) const;
  void free() const;

 private:
  std::string path_;
  bool mounted_ = false;
};

}  // namespace remesh::testing
