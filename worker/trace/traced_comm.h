// TracedComm: a Comm that tells a Tracer what is done on another one. Each
// operation becomes a span with its bytes and the name of the group; waiting
// for one that was started before becomes a span of its own on the compute
// lane, the time from start to end another on a communication lane. On the
// pipeline's group ("pp") waiting is the bubble.
//
// While the tracer is off it only passes on. Groups split from it are traced,
// too. Ownership: borrows or owns the other comm; borrows the tracer, which
// must outlive it and everything split from it. Threads: as the comm's.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "parallel/comm/comm.h"
#include "worker/trace/tracer.h"

namespace remesh::trace {

// The names of the groups that comm::Mesh::make() splits off, in its order.
std::vector<std::string> mesh_group_names();

class TracedComm final : public comm::Comm {
 public:
  // split_names: of the groups that the next splits make; those after them
  // keep this group's name.
  TracedComm(comm::Comm& inner, Tracer& tracer, const std::string& group,
             const std::vector<std::string>& split_names = {});
  TracedComm(std::unique_ptr<comm::Comm> inner, Tracer& tracer,
             const std::string& group);

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
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
  std::unique_ptr<comm::Comm> split(int color, int key) override;

 private:
  template <typename F>
  void blocking(const char* name, size_t bytes, const F& f);
  template <typename F>
  comm::RequestPtr started(const char* name, const char* wait_name,
                           size_t bytes, const F& f);
  Category waiting() const;

  std::unique_ptr<comm::Comm> owned_;
  comm::Comm* const inner_;
  Tracer& tracer_;
  const std::string group_;
  const char* const kept_group_;
  std::deque<std::string> split_names_;
};

}  // namespace remesh::trace
