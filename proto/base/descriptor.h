// Descriptor: closes a file descriptor at the end of its scope.
#pragma once

#include <unistd.h>

#include <utility>

namespace remesh {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}  // negative: there is none
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  // For somebody else to close.
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

}  // namespace remesh
