// A Comm that forwards to another one; tests override parts of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "parallel/comm/comm.h"

namespace remesh::exchange {

class WrappedComm : public comm::Comm {
 public:
  using Op = comm::Op;
  using RequestPtr = comm::RequestPtr;
  explicit WrappedComm(comm::Comm& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  void barrier() override { inner_.barrier(); }
  void broadcast(std::span<std::byte> d, int root) override {
    inner_.broadcast(d, root);
  }
  void all_reduce(std::span<float> d, Op op) override {
    inner_.all_reduce(d, op);
  }
  void all_reduce(std::span<double> d, Op op) override {
    inner_.all_reduce(d, op);
  }
  void all_reduce(std::span<int64_t> d, Op op) override {
    inner_.all_reduce(d, op);
  }
  void all_gather(std::span<const std::byte> m,
                  std::span<std::byte> a) override {
    inner_.all_gather(m, a);
  }
  void reduce_scatter(std::span<const float> a, std::span<float> m) override {
    inner_.reduce_scatter(a, m);
  }
  void send(std::span<const std::byte> d, int to, int tag) override {
    start_send(d, to, tag)->wait();
  }
  void recv(std::span<std::byte> d, int from, int tag) override {
    start_recv(d, from, tag)->wait();
  }
  RequestPtr start_all_reduce(std::span<float> d, Op op) override {
    return inner_.start_all_reduce(d, op);
  }
  RequestPtr start_all_gather(std::span<const std::byte> m,
                              std::span<std::byte> a) override {
    return inner_.start_all_gather(m, a);
  }
  RequestPtr start_reduce_scatter(std::span<const float> a,
                                  std::span<float> m) override {
    return inner_.start_reduce_scatter(a, m);
  }
  RequestPtr start_send(std::span<const std::byte> d, int to,
                        int tag) override {
    return inner_.start_send(d, to, tag);
  }
  RequestPtr start_recv(std::span<std::byte> d, int from, int tag) override {
    return inner_.start_recv(d, from, tag);
  }
  std::unique_ptr<comm::Comm> split(int color, int key) override {
    return inner_.split(color, key);
  }

 protected:
  comm::Comm& inner_;
};

// Flips a bit in the number-th message sent.
class FlippingComm final : public WrappedComm {
 public:
  FlippingComm(comm::Comm& inner, int number)
      : WrappedComm(inner), number_(number) {}
  RequestPtr start_send(std::span<const std::byte> d, int to,
                        int tag) override {
    if (sent_++ != number_) return inner_.start_send(d, to, tag);
    copy_.assign(d.begin(), d.end());
    copy_[std::min<size_t>(copy_.size() / 2, 40)] ^= std::byte{4};
    return inner_.start_send(copy_, to, tag);
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
      : WrappedComm(inner), looks_(looks), messages_(messages) {}
  RequestPtr start_send(std::span<const std::byte> d, int to,
                        int tag) override {
    return over_link(inner_.start_send(d, to, tag));
  }
  RequestPtr start_recv(std::span<std::byte> d, int from, int tag) override {
    return over_link(inner_.start_recv(d, from, tag));
  }

 private:
  class Request final : public comm::Request {
   public:
    Request(RequestPtr inner, int* looks)
        : inner_(std::move(inner)), looks_(looks) {}
    void wait() override { inner_->wait(); }
    bool test() override { return --*looks_ < 0 && inner_->test(); }

   private:
    const RequestPtr inner_;
    int* const looks_;
  };
  RequestPtr over_link(RequestPtr inner) {
    ++*messages_;
    return std::make_unique<Request>(std::move(inner), &looks_);
  }

  int looks_;
  int* const messages_;
};

}  // namespace remesh::exchange
