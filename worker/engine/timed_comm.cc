#include "worker/engine/timed_comm.h"

#include "worker/engine/timer.h"

namespace remesh::engine {
namespace {

class TimedRequest final : public comm::Request {
 public:
  TimedRequest(comm::RequestPtr inner, double& seconds)
      : inner_(std::move(inner)), seconds_(seconds) {}
  ~TimedRequest() override { TimedRequest::wait(); }
  void wait() override {
    const Timer timer(seconds_);
    inner_->wait();
  }
  bool test() override { return inner_->test(); }

 private:
  comm::RequestPtr inner_;
  double& seconds_;
};

}  // namespace

comm::RequestPtr TimedComm::timed(comm::RequestPtr request) {
  return std::make_unique<TimedRequest>(std::move(request), waited_s_);
}

void TimedComm::barrier() {
  const Timer timer(waited_s_);
  inner_.barrier();
}
void TimedComm::broadcast(std::span<std::byte> data, int root) {
  const Timer timer(waited_s_);
  inner_.broadcast(data, root);
}
void TimedComm::all_reduce(std::span<float> data, comm::Op op) {
  const Timer timer(waited_s_);
  inner_.all_reduce(data, op);
}
void TimedComm::all_reduce(std::span<double> data, comm::Op op) {
  const Timer timer(waited_s_);
  inner_.all_reduce(data, op);
}
void TimedComm::all_reduce(std::span<int64_t> data, comm::Op op) {
  const Timer timer(waited_s_);
  inner_.all_reduce(data, op);
}
void TimedComm::all_gather(std::span<const std::byte> mine,
                           std::span<std::byte> all) {
  const Timer timer(waited_s_);
  inner_.all_gather(mine, all);
}
void TimedComm::reduce_scatter(std::span<const float> all,
                               std::span<float> mine) {
  const Timer timer(waited_s_);
  inner_.reduce_scatter(all, mine);
}
void TimedComm::send(std::span<const std::byte> data, int to, int tag) {
  const Timer timer(waited_s_);
  inner_.send(data, to, tag);
}
void TimedComm::recv(std::span<std::byte> data, int from, int tag) {
  const Timer timer(waited_s_);
  inner_.recv(data, from, tag);
}
comm::RequestPtr TimedComm::start_all_reduce(std::span<float> data,
                                             comm::Op op) {
  return timed(inner_.start_all_reduce(data, op));
}
comm::RequestPtr TimedComm::start_all_gather(std::span<const std::byte> mine,
                                             std::span<std::byte> all) {
  return timed(inner_.start_all_gather(mine, all));
}
comm::RequestPtr TimedComm::start_reduce_scatter(std::span<const float> all,
                                                 std::span<float> mine) {
  return timed(inner_.start_reduce_scatter(all, mine));
}
comm::RequestPtr TimedComm::start_send(std::span<const std::byte> data, int to,
                                       int tag) {
  return timed(inner_.start_send(data, to, tag));
}
comm::RequestPtr TimedComm::start_recv(std::span<std::byte> data, int from,
                                       int tag) {
  return timed(inner_.start_recv(data, from, tag));
}

}  // namespace remesh::engine
