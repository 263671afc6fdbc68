// A Comm that forwards to another one; tests override parts of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "worker/trace/observed_comm.h"

namespace remesh::exchange {

// The observer of a comm that is not observed.
struct Deaf {
  struct Started {
    int waiting() const { return 0; }
    void done() const {}
  };
  bool listens() const { return false; }
  int blocking(const trace::CommOp& /*op*/) const { return 0; }
  Started started(const trace::CommOp& /*op*/) const { return {}; }
};
using WrappedComm = trace::ObservedComm<Deaf>;

// Flips a bit in the number-th message sent, or in every message.
class FlippingComm final : public WrappedComm {
 public:
  static constexpr int kEvery = -1;
  FlippingComm(comm::Comm& inner, int number)
      : ObservedComm(inner, {}), number_(number) {}
  void send(std::span<const std::byte> d, int to, int tag) override {
    start_send(d, to, tag)->wait();
  }
  comm::RequestPtr start_send(std::span<const std::byte> d, int to,
                              int tag) override {
    if (sent_++ != number_ && number_ != kEvery)
      return inner().start_send(d, to, tag);
    copy_.assign(d.begin(), d.end());
    copy_[std::min<size_t>(copy_.size() / 2, 40)] ^= std::byte{4};
    return inner().start_send(copy_, to, tag);
  }

 private:
  const int number_;
  int sent_ = 0;
  std::vector<std::byte> copy_;
};

// Over a link that is dead for the first `looks` tests of messages.
class DeadLinkComm final : public WrappedComm {
 public:
  DeadLinkComm(comm::Comm& inner, int looks, int* messages)
      : ObservedComm(inner, {}), looks_(looks), messages_(messages) {}
  comm::RequestPtr start_send(std::span<const std::byte> d, int to,
                              int tag) override {
    return over_link(inner().start_send(d, to, tag));
  }
  comm::RequestPtr start_recv(std::span<std::byte> d, int from,
                              int tag) override {
    return over_link(inner().start_recv(d, from, tag));
  }

 private:
  class Request final : public comm::Request {
   public:
    Request(comm::RequestPtr inner, int* looks)
        : inner_(std::move(inner)), looks_(looks) {}
    void wait() override { inner_->wait(); }
    bool test() override { return --*looks_ < 0 && inner_->test(); }

   private:
    const comm::RequestPtr inner_;
    int* const looks_;
  };
  comm::RequestPtr over_link(comm::RequestPtr inner) {
    ++*messages_;
    return std::make_unique<Request>(std::move(inner), &looks_);
  }

  int looks_;
  int* const messages_;
};

}  // namespace remesh::exchange
