// ObservedComm: decorates a Comm and notifies an observer of its operations.
// TracedComm (here) records them in a Tracer, TimedComm (worker/engine) sums up
// the seconds.
//
// An Observer has
//   bool listens() const         false: operations are not observed
//   S blocking(const CommOp&)    exists while a blocking operation runs
//   T started(const CommOp&)     exists as long as the request, which owns it
//     S T::waiting()             exists during a wait for the request
//     void T::done()             called once, when the request has completed
//
// Ownership: borrows or owns the inner comm. Threads: as the inner comm.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "parallel/comm/comm.h"

namespace remesh::trace {

// A communication operation. Names are literals.
struct CommOp {
  const char* name;       // "all_reduce"
  const char* wait_name;  // "wait all_reduce"
  size_t bytes = 0;
  int peer = -1;       // of a message: rank in the group; -1: a collective
  bool sends = false;  // the message, to that peer
};

template <typename Started>
class ObservedRequest final : public comm::Request {
 public:
  ObservedRequest(Started started, comm::RequestPtr inner)
      : started_(std::move(started)), inner_(std::move(inner)) {}
  // Destroying an incomplete request waits for it.
  ~ObservedRequest() override {
    if (!done_) ObservedRequest::wait();
  }
  void wait() override {
    if (done_) return inner_->wait();
    {
      [[maybe_unused]] const auto waiting = started_.waiting();
      inner_->wait();
    }
    done_ = true;
    started_.done();
  }
  bool test() override {
    if (!inner_->test()) return false;
    if (!std::exchange(done_, true)) started_.done();
    return true;
  }

 private:
  Started started_;
  comm::RequestPtr inner_;
  bool done_ = false;
};

template <typename Observer>
class ObservedComm : public comm::Comm {
 public:
  ObservedComm(comm::Comm& inner, Observer observer)
      : inner_(&inner), observer_(std::move(observer)) {}
  ObservedComm(std::unique_ptr<comm::Comm> inner, Observer observer)
      : owned_(std::move(inner)),
        inner_(owned_.get()),
        observer_(std::move(observer)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void barrier() override {
    run({"barrier", ""}, [&] { inner_->barrier(); });
  }
  void broadcast(std::span<std::byte> data, int root) override {
    run({"broadcast", "", data.size()}, [&] { inner_->broadcast(data, root); });
  }
  void all_reduce(std::span<float> data, comm::Op op) override {
    run({"all_reduce", "", data.size_bytes()},
        [&] { inner_->all_reduce(data, op); });
  }
  void all_reduce(std::span<double> data, comm::Op op) override {
    run({"all_reduce", "", data.size_bytes()},
        [&] { inner_->all_reduce(data, op); });
  }
  void all_reduce(std::span<int64_t> data, comm::Op op) override {
    run({"all_reduce", "", data.size_bytes()},
        [&] { inner_->all_reduce(data, op); });
  }
  void all_gather(std::span<const std::byte> mine,
                  std::span<std::byte> all) override {
    run({"all_gather", "", all.size()}, [&] { inner_->all_gather(mine, all); });
  }
  void reduce_scatter(std::span<const float> all,
                      std::span<float> mine) override {
    run({"reduce_scatter", "", all.size_bytes()},
        [&] { inner_->reduce_scatter(all, mine); });
  }
  void send(std::span<const std::byte> data, int to, int tag) override {
    run({"send", "", data.size(), to, true},
        [&] { inner_->send(data, to, tag); });
  }
  void recv(std::span<std::byte> data, int from, int tag) override {
    run({"recv", "", data.size(), from},
        [&] { inner_->recv(data, from, tag); });
  }

  comm::RequestPtr start_all_reduce(std::span<float> data,
                                    comm::Op op) override {
    return start({"all_reduce", "wait all_reduce", data.size_bytes()},
                 [&] { return inner_->start_all_reduce(data, op); });
  }
  comm::RequestPtr start_all_gather(std::span<const std::byte> mine,
                                    std::span<std::byte> all) override {
    return start({"all_gather", "wait all_gather", all.size()},
                 [&] { return inner_->start_all_gather(mine, all); });
  }
  comm::RequestPtr start_reduce_scatter(std::span<const float> all,
                                        std::span<float> mine) override {
    return start({"reduce_scatter", "wait reduce_scatter", all.size_bytes()},
                 [&] { return inner_->start_reduce_scatter(all, mine); });
  }
  comm::RequestPtr start_send(std::span<const std::byte> data, int to,
                              int tag) override {
    return start({"send", "wait send", data.size(), to, true},
                 [&] { return inner_->start_send(data, to, tag); });
  }
  comm::RequestPtr start_recv(std::span<std::byte> data, int from,
                              int tag) override {
    return start({"recv", "wait recv", data.size(), from},
                 [&] { return inner_->start_recv(data, from, tag); });
  }
  // The new group is not observed.
  std::unique_ptr<comm::Comm> split(int color, int key) override {
    return inner_->split(color, key);
  }

 protected:
  comm::Comm& inner() { return *inner_; }
  Observer& observer() { return observer_; }
  const Observer& observer() const { return observer_; }

 private:
  template <typename F>
  void run(const CommOp& op, const F& f) {
    if (!observer_.listens()) return f();
    [[maybe_unused]] const auto scope = observer_.blocking(op);
    f();
  }
  template <typename F>
  comm::RequestPtr start(const CommOp& op, const F& f) {
    if (!observer_.listens()) return f();
    auto started = observer_.started(op);
    return std::make_unique<ObservedRequest<decltype(started)>>(
        std::move(started), f());
  }

  std::unique_ptr<comm::Comm> owned_;
  comm::Comm* const inner_;
  Observer observer_;
};

}  // namespace remesh::trace
