#include "worker/trace/traced_comm.h"

#include <numeric>
#include <utility>

namespace remesh::trace {
namespace {

std::vector<int> all_ranks(int size) {
  std::vector<int> out(static_cast<size_t>(size));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

}  // namespace

std::vector<std::string> mesh_group_names() {
  return {"pp", "tp", "cp", "data"};
}

// ------------------------------------------------------------- the observer

void TraceObserver::Started::done() {
  const int64_t end_ns = tracer_->end(ticket_);
  if (ticket_.traced)
    tracer_->add(Lane::kCommunication, op_.kind, op_.name, ticket_.begin_ns,
                 end_ns, {{"bytes", op_.bytes}}, group_);
}

TraceObserver::TraceObserver(Tracer& tracer, const std::string& group,
                             std::vector<int> ranks)
    : tracer_(&tracer),
      group_(tracer.keep(group)),
      pipeline_(group == "pp"),
      ranks_(std::move(ranks)) {
  if (board::FlightRecord* const flight = tracer.flight())
    id_ = flight->add_group(group, ranks_);
}

board::Op TraceObserver::to_op(const CommOp& op) {
  board::Op out{.kind = pipeline_ ? Category::kBubble : Category::kCollective,
                .name = op.name,
                .group = id_,
                .sends = op.sends,
                .bytes = static_cast<int64_t>(op.bytes)};
  if (op.peer >= 0)
    out.peer = ranks_[static_cast<size_t>(op.peer)];
  else
    out.number = ++collectives_;
  return out;
}

Span TraceObserver::blocking(const CommOp& op) {
  const board::Op blocking = to_op(op);
  return {tracer_,
          blocking,
          {{"bytes", blocking.bytes},
           {"ranks", static_cast<int64_t>(ranks_.size())}},
          group_};
}

TraceObserver::Started TraceObserver::started(const CommOp& op) {
  board::Op under_way = to_op(op);
  board::Op wait = under_way;
  wait.name = op.wait_name;
  wait.kind = pipeline_ ? Category::kBubble : Category::kWait;
  under_way.kind = Category::kCollective;
  under_way.lane = Lane::kCommunication;
  return {*tracer_, under_way, wait, group_};
}

// ----------------------------------------------------------------- the comm

TracedComm::TracedComm(comm::Comm& world, Tracer& tracer,
                       const std::string& group,
                       const std::vector<std::string>& split_names)
    : ObservedComm(world,
                   TraceObserver(tracer, group, all_ranks(world.size()))),
      group_(group),
      split_names_(split_names.begin(), split_names.end()) {}

TracedComm::TracedComm(std::unique_ptr<comm::Comm> inner, Tracer& tracer,
                       const std::string& group, std::vector<int> ranks)
    : ObservedComm(std::move(inner),
                   TraceObserver(tracer, group, std::move(ranks))),
      group_(group) {}

std::unique_ptr<comm::Comm> TracedComm::split(int color, int key) {
  std::string name = group_;
  if (!split_names_.empty()) {
    name = split_names_.front();
    split_names_.pop_front();
  }
  auto part = inner().split(color, key);
  if (part == nullptr) return nullptr;
  Tracer& tracer = observer().tracer();
  std::vector<int> ranks = all_ranks(part->size());
  if (tracer.flight() != nullptr) {
    const int me = observer().ranks()[static_cast<size_t>(inner().rank())];
    part->all_gather(std::as_bytes(std::span(&me, 1)),
                     std::as_writable_bytes(std::span(ranks)));
  }
  return std::unique_ptr<TracedComm>(
      new TracedComm(std::move(part), tracer, name, std::move(ranks)));
}

}  // namespace remesh::trace
