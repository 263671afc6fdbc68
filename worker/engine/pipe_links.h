// PipeLinks: exchanges activations and their gradients between neighbouring
// pipeline stages, and waits only for data that a pass needs.
//
// Receives are posted ahead, in the order in which the passes consume them.
// A send of the caller's memory never blocks; a send of a copy waits for the
// copy before it, so that a rank holds one, however far its neighbour is
// behind. What a rank waits for does not depend on timing, so whether a
// schedule can finish does not either; pipe_links_test runs all of them.
//
// Messages are fp32 and carry (stream_rows, dim) elements. Ownership: owns its
// buffers, three to receive into and one copy, allocated when they are first
// needed. Threads: one.
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

  // No message has more than max_elements. Adds the seconds it waits for
  // neighbours to `waited_s`. Both references must outlive this object.
  PipeLinks(kernels::Backend& backend, int64_t max_elements, double& waited_s)
      : backend_(backend), max_elements_(max_elements), waited_s_(waited_s) {}
  void connect(comm::Comm& pp) { pp_ = &pp; }

  // The messages that will be received, in order. Starts to receive the first
  // ones. REQUIRES: all messages expected before have been received. Fails when
  // memory is short.
  Status expect(std::vector<Message> messages);
  // Waits for the next of them; readable until the next receive().
  Result<const float*> receive();

  // Sends from the caller's memory, which must not change until sent(key) has
  // been called. REQUIRES: no send is in progress under that key.
  void send(int key, std::span<const float> data, int to, int tag);
  void sent(int key);
  // Sends a copy, once the one before it is sent.
  Status send_copy(std::span<const float> data, int to, int tag);
  // Waits until everything is sent.
  void finish();
  // Advances operations in progress.
  void poll() {
    if (copy_.request != nullptr) copy_.request->test();
    for (Buffer* const b : posted_) b->request->test();
  }

  uint64_t bytes() const;

 private:
  struct Buffer {
    FlatBuffer memory;
    comm::RequestPtr request;
  };
  static constexpr size_t kAhead = 2;

  Status post();
  Status allocate(Buffer& buffer);
  Result<Buffer*> free_buffer();

  kernels::Backend& backend_;
  const int64_t max_elements_;
  double& waited_s_;
  comm::Comm* pp_ = nullptr;
  std::deque<Message> expected_;  // not posted yet
  std::deque<Buffer*> posted_;
  Buffer* current_ = nullptr;  // that receive() returned last
  std::vector<std::unique_ptr<Buffer>> in_;
  Buffer copy_;
  std::map<int, comm::RequestPtr> sending_;  // by key
};

}  // namespace remesh::engine
