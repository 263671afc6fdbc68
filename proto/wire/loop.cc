#include "proto/wire/loop.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "proto/base/check.h"

namespace remesh::wire {

Loop::Loop(int tick_ms) : tick_ms_(tick_ms) { CHECK(tick_ms > 0); }

Loop::~Loop() {
  if (signal_fd_ >= 0) close(signal_fd_);
}

void Loop::watch(int fd, std::function<void()> handler) {
  CHECK(fd >= 0);
  handlers_[fd] = std::make_shared<std::function<void()>>(std::move(handler));
}

void Loop::unwatch(int fd) { handlers_.erase(fd); }

void Loop::on_tick(std::function<void()> handler) {
  tick_ = std::move(handler);
}

Status Loop::watch_signals(const std::vector<int>& signals,
                           std::function<void(int)> handler) {
  CHECK(signal_fd_ < 0);
  sigset_t set;
  sigemptyset(&set);
  for (const int s : signals) {
    struct sigaction now {};
    const bool ignored =
        sigaction(s, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
    if (!ignored) sigaddset(&set, s);
  }
  if (int err = pthread_sigmask(SIG_BLOCK, &set, nullptr); err != 0)
    return errno_error("loop: pthread_sigmask", err);
  signal_fd_ = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
  if (signal_fd_ < 0) return errno_error("loop: signalfd", errno);
  signal_handler_ = std::move(handler);
  watch(signal_fd_, [this] { read_signals(); });
  return ok_status();
}

void Loop::read_signals() {
  signalfd_siginfo info;
  while (!stopped_ && read(signal_fd_, &info, sizeof(info)) == sizeof(info))
    signal_handler_(static_cast<int>(info.ssi_signo));
}

void Loop::set_tick_ms(int tick_ms) {
  CHECK(tick_ms > 0);
  tick_ms_ = tick_ms;
}

void Loop::poll_once() {
  std::vector<pollfd> fds;
  std::vector<Handler> polled;
  fds.reserve(handlers_.size());
  polled.reserve(handlers_.size());
  for (const auto& [fd, handler] : handlers_) {
    fds.push_back({fd, POLLIN, 0});
    polled.push_back(handler);
  }
  const int n = poll(fds.data(), fds.size(), tick_ms_);
  if (n < 0) {
    CHECK_MSG(errno == EINTR || errno == ENOMEM || errno == EAGAIN,
              "poll failed");
    return;
  }
  for (size_t i = 0; i < fds.size() && !stopped_; ++i) {
    if (fds[i].revents == 0) continue;
    CHECK_MSG((fds[i].revents & POLLNVAL) == 0, "a watched fd was closed");
    // An earlier handler may have removed this one, or replaced it by another
    // on a descriptor with the same number.
    auto it = handlers_.find(fds[i].fd);
    if (it != handlers_.end() && it->second == polled[i]) (*polled[i])();
  }
}

int Loop::run() {
  stopped_ = false;
  while (!stopped_) {
    poll_once();
    if (!stopped_ && tick_) tick_();
  }
  return code_;
}

void Loop::stop(int code) {
  stopped_ = true;
  code_ = code;
}

}  // namespace remesh::wire
