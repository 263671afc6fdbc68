// TimedComm: a Comm that adds up the seconds a rank waits in it. What tensor
// and context parallelism wait for happens inside a stage's passes, where
// nobody else could tell it from computing.
//
// Borrows the Comm it stands for. Threads: as that one.
#pragma once

#include <memory>

#include "parallel/comm/comm.h"

namespace remesh::engine {

class TimedComm final : public comm::Comm {
 public:
  explicit TimedComm(comm::Comm& inner) : inner_(inner) {}
  // So far.
  double waited_s() const { return waited_s_; }

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  void barrier() override;
  void broadcast(std::span<std::byte> data, int root) override;
  void all_reduce(std::span<float> data, comm::Op op) override;
  void all_reduce(std::span<double> data, comm::Op op) override;
  void all_reduce(std::span<int64_t> data, comm::Op op) override;
  void all_gather(std::span<const std::byte> mine,
                  std::span<std::byte> all) override;
  void reduce_scatter(std::span<const float> all,
                      std::span<float> mine) override;
  void send(std::span<const std::byte> data, int to, int tag) override;
  void recv(std::span<std::byte> data, int from, int tag) override;
  comm::RequestPtr start_all_reduce(std::span<float> data,
                                    comm::Op op) override;
  comm::RequestPtr start_all_gather(std::span<const std::byte> mine,
                                    std::span<std::byte> all) override;
  comm::RequestPtr start_reduce_scatter(std::span<const float> all,
                                        std::span<float> mine) override;
  comm::RequestPtr start_send(std::span<const std::byte> data, int to,
                              int tag) override;
  comm::RequestPtr start_recv(std::span<std::byte> data, int from,
                              int tag) override;
  // The new group is not timed.
  std::unique_ptr<comm::Comm> split(int color, int key) override {
    return inner_.split(color, key);
  }

 private:
  comm::RequestPtr timed(comm::RequestPtr request);

  comm::Comm& inner_;
  double waited_s_ = 0;
};

}  // namespace remesh::engine
