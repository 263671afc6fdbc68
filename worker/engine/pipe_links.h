// PipeLinks: activations and their gradients between neighbouring pipeline
// stages, never waiting for a neighbour longer than the data need.
//
// Receives are posted ahead, in the order the passes want them. Sends do not
// block and need no buffer of the receiver's: a schedule that simulate()
// (geometry/schedule.h) can finish cannot deadlock here, as nothing is waited
// for but data that a pass needs.
//
// Messages are fp32 and carry (stream_rows, dim) elements. Ownership: owns its
// buffers, which are made as the first step needs them. Threads: one.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "parallel/comm/comm.h"
#include "worker/engine/flat_buffer.h"

namespace remesh::engine {

class PipeLinks {
 public:
  struct Message {
    int from = 0;  // rank in the pipeline
    int tag = 0;
    int64_t elements = 0;
  };

  // No message has more than max_elements. `backend` must outlive it.
  PipeLinks(kernels::Backend& backend, int64_t max_elements);
  void connect(comm::Comm& pp) { pp_ = &pp; }

  // What will be received, in this order. Starts to receive the first ones.
  // REQUIRES: all that was expected before was received. Fails when memory is
  // short.
  Status expect(std::vector<Message> messages);
  // The next of them, once it is here; readable until the next receive().
  Result<const float*> receive();

  // Sends from the caller's memory, which must stay as it is until
  // sent(key) was called. REQUIRES: nothing is being sent under that key.
  void send(int key, std::span<const float> data, int to, int tag);
  void sent(int key);
  // Sends a copy.
  Status send_copy(std::span<const float> data, int to, int tag);
  // Waits until everything is sent.
  void finish();
  // Lets what is under way move on.
  void poll();

  // Seconds spent waiting for neighbours so far.
  double waited_s() const { return waited_s_; }
  uint64_t bytes() const;

 private:
  struct Buffer {
    FlatBuffer memory;
    comm::RequestPtr request;
  };
  static constexpr size_t kAhead = 2;

  Status post();
  Result<Buffer*> free_buffer(std::vector<std::unique_ptr<Buffer>>& buffers);

  kernels::Backend& backend_;
  const int64_t max_elements_;
  comm::Comm* pp_ = nullptr;
  std::deque<Message> expected_;  // not posted yet
  std::deque<Buffer*> posted_;
  Buffer* current_ = nullptr;  // what receive() gave
  std::vector<std::unique_ptr<Buffer>> in_, out_;
  std::map<int, comm::RequestPtr> sending_;  // by key
  double waited_s_ = 0;
};

}  // namespace remesh::engine
