// Tracer: records the operations of one rank. It has two outputs:
//
//   - the flight record (worker/board), if there is one, always and
//   immediately:
//     what the rank was doing when it died;
//   - spans with a name, a category and a few numbers, while the tracer is on,
//     written as Chrome trace JSON (trace_file.h), one file per rank and
//     generation.
//
// Without an output it costs nothing: a Tracer that is off and has no flight
// record allocates nothing, and a Span makes two comparisons. While it is on,
// it keeps at most `max_spans` (88 bytes each); later ones are counted as
// dropped.
//
// Threads: any thread may call add() and the functions built on it. A Span
// belongs to the training thread.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <mutex>
#include <set>
#include <string>

#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "worker/board/flight.h"

namespace remesh::trace {

using Category = board::OpKind;
using Lane = board::Lane;

// A named number of a span. The key must outlive the tracer (a literal).
struct Arg {
  const char* key = nullptr;
  int64_t value = 0;
};
inline constexpr size_t kMaxArgs = 3;

// An operation in progress.
struct Ticket {
  int64_t begin_ns = 0;  // 0: not recorded
  bool traced = false;   // becomes a span
  board::FlightTicket flight;
};

struct TracerOptions {
  int64_t generation = 0;
  int rank = 0;
  // What `remesh trace` compares the trace with: "dp2,pp2", "1f1b", model
  // chunks per rank, microbatches in the schedule.
  std::string mesh;
  std::string schedule;
  int chunks = 1;
  int64_t microbatches = 0;
  size_t max_spans = size_t{1} << 18;
};

class Tracer {
 public:
  explicit Tracer(TracerOptions options = {});
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  // Also records operations in `flight` (nullptr: none), which must outlive the
  // tracer. Set it before the first operation.
  void set_flight(board::FlightRecord* flight) { flight_ = flight; }
  board::FlightRecord* flight() const { return flight_; }

  bool on() const { return on_; }
  // Starts or stops keeping spans.
  void set_on(bool on) { on_ = on; }
  // Whether there is an output.
  bool listens() const { return on_ || flight_ != nullptr; }

  // Nanoseconds of the monotonic clock, or 0 without an output.
  int64_t now() const { return listens() ? monotonic_ns() : 0; }
  // The begin and end of an operation; end() returns the time. The caller adds
  // the span.
  Ticket begin(const board::Op& op) {
    Ticket t{.begin_ns = now(), .traced = on_};
    if (flight_ != nullptr) t.flight = flight_->begin(op, t.begin_ns);
    return t;
  }
  int64_t end(const Ticket& ticket) {
    if (ticket.begin_ns == 0) return 0;
    const int64_t now_ns = monotonic_ns();
    if (flight_ != nullptr) flight_->end(ticket.flight, now_ns);
    return now_ns;
  }

  // Adds a span [begin, end] in units of now(). Names and groups are literals
  // or from keep(). Does nothing if the tracer is off or begin_ns is 0.
  void add(Lane lane, Category category, const char* name, int64_t begin_ns,
           int64_t end_ns, std::initializer_list<Arg> args = {},
           const char* group = nullptr);
  // A copy of the text that lives as long as the tracer.
  const char* keep(const std::string& text) {
    const std::lock_guard lock(mutex_);
    return kept_.insert(text).first->c_str();
  }

  size_t num_spans() const {
    const std::lock_guard lock(mutex_);
    return records_.size();
  }
  size_t dropped() const {
    const std::lock_guard lock(mutex_);
    return dropped_;
  }
  std::string to_json() const;
  // Atomically writes `folder`/gen-G-rank-R.json and creates the folder. Errors
  // name the path.
  Status write(const std::string& folder) const;

 private:
  struct Record {
    const char* name;
    const char* group;
    int64_t begin_ns, end_ns;
    std::array<Arg, kMaxArgs> args;
    Category category;
    Lane lane;
  };

  TracerOptions options_;
  board::FlightRecord* flight_ = nullptr;
  bool on_ = false;
  int64_t unix_minus_monotonic_ns_ = 0;
  mutable std::mutex mutex_;
  std::deque<Record> records_;
  std::set<std::string> kept_;
  size_t dropped_ = 0;
};

// Records the time until the end of the scope, on the compute lane.
//   trace::Span span(tracer, Category::kForward, {{"microbatch", i}});
class Span {
 public:
  // A nullptr `tracer` has no output. Names and groups as in Tracer::add().
  Span(Tracer* tracer, const board::Op& op, std::initializer_list<Arg> args,
       const char* group = nullptr)
      : tracer_(tracer != nullptr && tracer->listens() ? tracer : nullptr),
        op_(op),
        group_(group) {
    if (tracer_ == nullptr) return;
    size_t i = 0;
    for (const Arg& a : args)
      if (i < kMaxArgs) args_[i++] = a;
    ticket_ = tracer_->begin(op_);
  }
  Span(Tracer* tracer, Category category, std::initializer_list<Arg> args = {})
      : Span(tracer,
             board::Op{.kind = category, .name = board::op_kind_name(category)},
             args) {}
  ~Span() {
    if (tracer_ == nullptr) return;
    const int64_t end_ns = tracer_->end(ticket_);
    if (ticket_.traced)
      tracer_->add(Lane::kCompute, op_.kind, op_.name, ticket_.begin_ns, end_ns,
                   {args_[0], args_[1], args_[2]}, group_);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  Tracer* const tracer_;
  const board::Op op_;
  const char* const group_;
  std::array<Arg, kMaxArgs> args_{};
  Ticket ticket_;
};

}  // namespace remesh::trace
