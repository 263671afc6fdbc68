// Tracer: what one rank does when. Whoever computes or communicates tells it,
// and it tells those who want to know:
//
//   the flight record (worker/board), if there is one, always and at once: what
//     the rank was at when it died;
//   spans with a name, a category and some numbers, while it is on, for people
//     to look at: written as Chrome trace JSON (trace_file.h), one file a rank
//     and generation.
//
// Costs nothing where nobody listens: a Tracer that is not on and has no flight
// record keeps and allocates nothing, and a Span of it is two comparisons.
// While it is on, at most `max_spans` are kept (88 bytes each); what comes
// after is counted and left out.
//
// Threads: add() and what uses it may be called by any; a Span lives in the
// training thread.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "proto/base/clock.h"
#include "proto/base/status.h"
#include "worker/board/flight.h"

namespace remesh::trace {

using Category = board::OpKind;
using Lane = board::Lane;

// A number of a span. The key must outlive the tracer (a literal).
struct Arg {
  const char* key = nullptr;
  int64_t value = 0;
};
inline constexpr size_t kMaxArgs = 3;

// An operation under way.
struct Ticket {
  int64_t begin_ns = 0;  // 0: nobody listens
  bool traced = false;   // becomes a span
  board::FlightTicket flight;
};

struct TracerOptions {
  int64_t generation = 0;
  int rank = 0;
  // What `remesh trace` compares with: "dp2,pp2,tp1", "1f1b", model chunks a
  // rank, microbatches in the schedule.
  std::string mesh;
  std::string schedule;
  int chunks = 1;
  int64_t microbatches = 0;
  size_t max_spans = size_t{1} << 18;
};

class Tracer {
 public:
  Tracer() = default;  // keeps no spans, ever
  explicit Tracer(TracerOptions options);
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  // Who else is told; nullptr: nobody. It must outlive the tracer. Set before
  // anything is told.
  void set_flight(board::FlightRecord* flight) { flight_ = flight; }
  board::FlightRecord* flight() const { return flight_; }

  bool on() const { return on_; }
  // Begins or ends to keep spans. A default-made tracer stays off.
  void set_on(bool on) { on_ = on && able_; }
  // Whether anybody wants to know.
  bool listens() const { return on_ || flight_ != nullptr; }

  // Nanoseconds of the monotonic clock, 0 when nobody listens.
  int64_t now() const { return listens() ? monotonic_ns() : 0; }
  // An operation begins, and is over; the latter gives the time. A span is the
  // caller's to add, with what it knows by then.
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

  // A span [begin, end] by now(). Names and groups are literals or from keep().
  // Does nothing when off, or when the span began while nobody listened.
  void add(Lane lane, Category category, const char* name, int64_t begin_ns,
           int64_t end_ns, std::initializer_list<Arg> args = {},
           const char* group = nullptr);
  // The text for as long as the tracer lives.
  const char* keep(const std::string& text);

  size_t num_spans() const;
  size_t dropped() const;
  std::string to_json() const;
  // Writes `folder`/gen-G-rank-R.json at once; makes the folder. Fails with
  // the path.
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
  bool able_ = false;
  bool on_ = false;
  int64_t unix_minus_monotonic_ns_ = 0;
  mutable std::mutex mutex_;
  std::deque<Record> records_;
  std::set<std::string> kept_;
  size_t dropped_ = 0;
};

// The time from here to the end of the scope, on the compute lane.
//   trace::Span span(tracer, Category::kForward, {{"microbatch", i}});
class Span {
 public:
  // tracer: nullptr is one that nobody listens to. name: nullptr is the
  // category's.
  Span(Tracer* tracer, Category category, std::initializer_list<Arg> args = {},
       const char* name = nullptr)
      : tracer_(tracer != nullptr && tracer->listens() ? tracer : nullptr) {
    if (tracer_ == nullptr) return;
    category_ = category;
    name_ = name != nullptr ? name : board::op_kind_name(category);
    size_t i = 0;
    for (const Arg& a : args)
      if (i < kMaxArgs) args_[i++] = a;
    ticket_ = tracer_->begin({.kind = category, .name = name_});
  }
  ~Span() {
    if (tracer_ == nullptr) return;
    const int64_t end_ns = tracer_->end(ticket_);
    if (ticket_.traced)
      tracer_->add(Lane::kCompute, category_, name_, ticket_.begin_ns, end_ns,
                   {args_[0], args_[1], args_[2]});
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  Tracer* const tracer_;
  Category category_ = Category::kStep;
  const char* name_ = nullptr;
  std::array<Arg, kMaxArgs> args_{};
  Ticket ticket_;
};

}  // namespace remesh::trace
