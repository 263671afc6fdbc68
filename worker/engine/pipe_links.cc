#include "worker/engine/pipe_links.h"

#include "proto/base/check.h"
#include "worker/engine/timer.h"

namespace remesh::engine {

Status PipeLinks::expect(std::vector<Message> messages) {
  CHECK(expected_.empty() && posted_.empty());
  expected_.assign(messages.begin(), messages.end());
  current_ = nullptr;
  return post();
}

Status PipeLinks::allocate(Buffer& buffer) {
  ASSIGN_OR_RETURN(buffer.memory,
                   FlatBuffer::make(backend_, max_elements_,
                                    "activations between pipeline stages"));
  return ok_status();
}

// A buffer is free when it has no request and receive() did not return it last.
Result<PipeLinks::Buffer*> PipeLinks::free_buffer() {
  for (const auto& b : in_)
    if (b.get() != current_ && b->request == nullptr) return b.get();
  auto made = std::make_unique<Buffer>();
  RETURN_IF_ERROR(allocate(*made));
  in_.push_back(std::move(made));
  return in_.back().get();
}

Status PipeLinks::post() {
  while (!expected_.empty() && posted_.size() < kAhead) {
    const Message m = expected_.front();
    CHECK(m.elements <= max_elements_);
    ASSIGN_OR_RETURN(Buffer* const b, free_buffer());
    b->request =
        pp_->start_recv(std::as_writable_bytes(std::span(
                            b->memory.data(), static_cast<size_t>(m.elements))),
                        m.from, m.tag);
    posted_.push_back(b);
    expected_.pop_front();
  }
  return ok_status();
}

Result<const float*> PipeLinks::receive() {
  CHECK_MSG(!posted_.empty(), "no message is expected");
  current_ = posted_.front();
  posted_.pop_front();
  {
    const Timer timer(waited_s_);
    current_->request->wait();
  }
  current_->request.reset();
  RETURN_IF_ERROR(post());
  return static_cast<const float*>(current_->memory.data());
}

void PipeLinks::send(int key, std::span<const float> data, int to, int tag) {
  CHECK(!sending_.contains(key));
  sending_[key] = pp_->start_send(std::as_bytes(data), to, tag);
}

void PipeLinks::sent(int key) {
  const auto it = sending_.find(key);
  if (it == sending_.end()) return;
  const Timer timer(waited_s_);
  it->second->wait();
  sending_.erase(it);
}

Status PipeLinks::send_copy(std::span<const float> data, int to, int tag) {
  CHECK(static_cast<int64_t>(data.size()) <= max_elements_);
  if (copy_.memory.size() == 0) RETURN_IF_ERROR(allocate(copy_));
  if (copy_.request != nullptr) {
    const Timer timer(waited_s_);
    copy_.request->wait();
  }
  backend_.copy(copy_.memory.data(), data.data(), data.size_bytes());
  copy_.request = pp_->start_send(
      std::as_bytes(std::span<const float>(copy_.memory.data(), data.size())),
      to, tag);
  return ok_status();
}

void PipeLinks::finish() {
  const Timer timer(waited_s_);
  for (const auto& [key, request] : sending_) request->wait();
  sending_.clear();
  if (copy_.request != nullptr) copy_.request->wait();
  copy_.request.reset();
}

uint64_t PipeLinks::bytes() const {
  uint64_t bytes = copy_.memory.bytes();
  for (const auto& b : in_) bytes += b->memory.bytes();
  return bytes;
}

}  // namespace remesh::engine
