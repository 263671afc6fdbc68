#include "worker/trace/traced_comm.h"

#include <utility>

namespace remesh::trace {
namespace {

class TracedRequest final : public comm::Request {
 public:
  struct About {
    const char* name;
    const char* wait_name;
    const char* group;
    Category waiting;
    int64_t bytes;
  };
  TracedRequest(comm::RequestPtr inner, Tracer& tracer, const About& about,
                int64_t begin_ns)
      : inner_(std::move(inner)),
        tracer_(tracer),
        about_(about),
        begin_ns_(begin_ns) {}
  // Destroying an unfinished request waits.
  ~TracedRequest() override {
    if (!done_) TracedRequest::wait();
  }

  void wait() override {
    const int64_t from = tracer_.now();
    inner_->wait();
    const int64_t to = tracer_.now();
    if (!done_)
      tracer_.add(Lane::kCompute, about_.waiting, about_.wait_name, from, to,
                  {{"bytes", about_.bytes}}, about_.group);
    finished(to);
  }

  bool test() override {
    if (!inner_->test()) return false;
    finished(tracer_.now());
    return true;
  }

 private:
  void finished(int64_t now_ns) {
    if (std::exchange(done_, true)) return;
    tracer_.add(Lane::kCommunication, Category::kCollective, about_.name,
                begin_ns_, now_ns, {{"bytes", about_.bytes}}, about_.group);
  }

  comm::RequestPtr inner_;
  Tracer& tracer_;
  const About about_;
  const int64_t begin_ns_;
  bool done_ = false;
};

}  // namespace

std::vector<std::string> mesh_group_names() {
  return {"dp", "pp", "tp", "cp", "data"};
}

TracedComm::TracedComm(comm::Comm& inner, Tracer& tracer,
                       const std::string& group,
                       const std::vector<std::string>& split_names)
    : inner_(&inner),
      tracer_(tracer),
      group_(group),
      kept_group_(tracer.keep(group)),
      split_names_(split_names.begin(), split_names.end()) {}

TracedComm::TracedComm(std::unique_ptr<comm::Comm> inner, Tracer& tracer,
                       const std::string& group)
    : owned_(std::move(inner)),
      inner_(owned_.get()),
      tracer_(tracer),
      group_(group),
      kept_group_(tracer.keep(group)) {}

Category TracedComm::waiting() const {
  return group_ == "pp" ? Category::kBubble : Category::kWait;
}

template <typename F>
void TracedComm::blocking(const char* name, size_t bytes, const F& f) {
  const int64_t from = tracer_.now();
  f();
  tracer_.add(
      Lane::kCompute,
      group_ == "pp" ? Category::kBubble : Category::kCollective, name, from,
      tracer_.now(),
      {{"bytes", static_cast<int64_t>(bytes)}, {"ranks", inner_->size()}},
      kept_group_);
}

template <typename F>
comm::RequestPtr TracedComm::started(const char* name, const char* wait_name,
                                     size_t bytes, const F& f) {
  if (!tracer_.on()) return f();
  const int64_t from = tracer_.now();
  return std::make_unique<TracedRequest>(
      f(), tracer_,
      TracedRequest::About{.name = name,
                           .wait_name = wait_name,
                           .group = kept_group_,
                           .waiting = waiting(),
                           .bytes = static_cast<int64_t>(bytes)},
      from);
}

void TracedComm::barrier() {
  blocking("barrier", 0, [&] { inner_->barrier(); });
}
void TracedComm::broadcast(std::span<std::byte> data, int root) {
  blocking("broadcast", data.size(), [&] { inner_->broadcast(data, root); });
}
void TracedComm::all_reduce(std::span<float> data, comm::Op op) {
  blocking("all_reduce", data.size_bytes(),
           [&] { inner_->all_reduce(data, op); });
}
void TracedComm::all_reduce(std::span<double> data, comm::Op op) {
  blocking("all_reduce", data.size_bytes(),
           [&] { inner_->all_reduce(data, op); });
}
void TracedComm::all_reduce(std::span<int64_t> data, comm::Op op) {
  blocking("all_reduce", data.size_bytes(),
           [&] { inner_->all_reduce(data, op); });
}
void TracedComm::all_gather(std::span<const std::byte> mine,
                            std::span<std::byte> all) {
  blocking("all_gather", all.size(), [&] { inner_->all_gather(mine, all); });
}
void TracedComm::reduce_scatter(std::span<const float> all,
                                std::span<float> mine) {
  blocking("reduce_scatter", all.size_bytes(),
           [&] { inner_->reduce_scatter(all, mine); });
}
void TracedComm::send(std::span<const std::byte> data, int to, int tag) {
  blocking("send", data.size(), [&] { inner_->send(data, to, tag); });
}
void TracedComm::recv(std::span<std::byte> data, int from, int tag) {
  blocking("recv", data.size(), [&] { inner_->recv(data, from, tag); });
}

comm::RequestPtr TracedComm::start_all_reduce(std::span<float> data,
                                              comm::Op op) {
  return started("all_reduce", "wait all_reduce", data.size_bytes(),
                 [&] { return inner_->start_all_reduce(data, op); });
}
comm::RequestPtr TracedComm::start_all_gather(std::span<const std::byte> mine,
                                              std::span<std::byte> all) {
  return started("all_gather", "wait all_gather", all.size(),
                 [&] { return inner_->start_all_gather(mine, all); });
}
comm::RequestPtr TracedComm::start_reduce_scatter(std::span<const float> all,
                                                  std::span<float> mine) {
  return started("reduce_scatter", "wait reduce_scatter", all.size_bytes(),
                 [&] { return inner_->start_reduce_scatter(all, mine); });
}
comm::RequestPtr TracedComm::start_send(std::span<const std::byte> data, int to,
                                        int tag) {
  return started("send", "wait send", data.size(),
                 [&] { return inner_->start_send(data, to, tag); });
}
comm::RequestPtr TracedComm::start_recv(std::span<std::byte> data, int from,
                                        int tag) {
  return started("recv", "wait recv", data.size(),
                 [&] { return inner_->start_recv(data, from, tag); });
}

std::unique_ptr<comm::Comm> TracedComm::split(int color, int key) {
  std::string name = group_;
  if (!split_names_.empty()) {
    name = split_names_.front();
    split_names_.pop_front();
  }
  auto part = inner_->split(color, key);
  if (part == nullptr) return nullptr;
  return std::make_unique<TracedComm>(std::move(part), tracer_, name);
}

}  // namespace remesh::trace
