// Comm: a group of ranks that exchange bytes; all communication of ranks.
//
// Implementations: mpi_comm (Open MPI, the only file that includes <mpi.h>) and
// tests/testing/local_comm (N ranks are N threads of one process). Every rank
// of the group calls collectives in the same order. No global state: a Comm can
// be destroyed and a new one made.
//
// Threads: one thread at a time uses a Comm and those split from it.
// Reductions are deterministic: every element is ((x_0 + x_1) + x_2) + ... by
// rank, so the result has the same bits every time and on every rank, whatever
// the element count, and a vector may be reduced at once or in pieces.
//
// Errors: a dead peer is not reported (Open MPI 4.1 cannot); the daemon ends
// all ranks instead. Sizes that differ between ranks are a programmer's
// error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "proto/base/status.h"

namespace remesh::comm {

enum class Op { kSum, kMax };

// A non-blocking operation in progress. wait() returns once the caller may use
// the buffers again; test() makes progress and returns whether it is done.
// Destroying an unfinished request waits.
class Request {
 public:
  virtual ~Request() = default;
  virtual void wait() = 0;
  virtual bool test() = 0;
};
using RequestPtr = std::unique_ptr<Request>;

class Comm {
 public:
  virtual ~Comm() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  virtual void barrier() = 0;
  virtual void broadcast(std::span<std::byte> data, int root) = 0;
  // In place, element-wise over the group.
  virtual void all_reduce(std::span<float> data, Op op) = 0;
  virtual void all_reduce(std::span<double> data, Op op) = 0;
  virtual void all_reduce(std::span<int64_t> data, Op op) = 0;
  // Every rank's `mine` (same length) concatenated by rank into `all`. In place
  // when `mine` is this rank's part of `all`.
  virtual void all_gather(std::span<const std::byte> mine,
                          std::span<std::byte> all) {
    start_all_gather(mine, all)->wait();
  }
  // `mine` (length n) = rank's n-element part of the sum over ranks of `all`
  // (length n * size()). `mine` may be that part of `all`.
  virtual void reduce_scatter(std::span<const float> all,
                              std::span<float> mine) {
    start_reduce_scatter(all, mine)->wait();
  }
  virtual void send(std::span<const std::byte> data, int to, int tag) {
    start_send(data, to, tag)->wait();
  }
  virtual void recv(std::span<std::byte> data, int from, int tag) {
    start_recv(data, from, tag)->wait();
  }

  // Non-blocking; the buffers must stay until wait().
  virtual RequestPtr start_all_reduce(std::span<float> data, Op op) = 0;
  virtual RequestPtr start_all_gather(std::span<const std::byte> mine,
                                      std::span<std::byte> all) = 0;
  virtual RequestPtr start_reduce_scatter(std::span<const float> all,
                                          std::span<float> mine) = 0;
  virtual RequestPtr start_send(std::span<const std::byte> data, int to,
                                int tag) = 0;
  virtual RequestPtr start_recv(std::span<std::byte> data, int from,
                                int tag) = 0;

  // The sub-group of ranks that give the same color, ordered by (key, rank).
  // color < 0: this rank gets nullptr.
  virtual std::unique_ptr<Comm> split(int color, int key) = 0;
};

}  // namespace remesh::comm
