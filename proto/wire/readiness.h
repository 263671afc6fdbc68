// Readiness: a descriptor that is readable while one of several others is, or
// while it is armed. ZeroMQ's descriptor becomes unreadable once any call,
// including a send, has processed the socket's events; arming preserves that
// there is input.
#pragma once

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

#include "proto/base/check.h"

namespace remesh::wire {

class Readiness {
 public:
  Readiness() {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (ok()) add(event_);
  }
  ~Readiness() {
    if (epoll_ >= 0) close(epoll_);
    if (event_ >= 0) close(event_);
  }
  Readiness(const Readiness&) = delete;
  Readiness& operator=(const Readiness&) = delete;
  bool ok() const { return epoll_ >= 0 && event_ >= 0; }
  void add(int fd) {
    epoll_event e{};
    e.events = EPOLLIN;
    CHECK(epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &e) == 0);
  }
  void arm() {
    if (armed_) return;
    armed_ = true;
    const uint64_t one = 1;
    CHECK(write(event_, &one, sizeof(one)) == sizeof(one));
  }
  void disarm() {
    if (!armed_) return;
    armed_ = false;
    uint64_t n = 0;
    CHECK(read(event_, &n, sizeof(n)) == sizeof(n));
  }
  int fd() const { return epoll_; }

 private:
  int epoll_ = -1;
  int event_ = -1;
  bool armed_ = false;
};

}  // namespace remesh::wire
