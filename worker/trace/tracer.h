// Tracer: what one rank did when, for people to look at: spans with a name, a
// category and some numbers, written as Chrome trace JSON ("Trace Event
// Format", Google 2016), which Perfetto and chrome://tracing open.
//
// Costs nothing where nobody asked for a trace: a Tracer that is not on
// records and allocates nothing, and a Span of it is two comparisons. While it
// is on, at most `max_spans` are kept (88 bytes each); what comes after is
// counted and left out.
//
// One file a rank and generation. pid is the rank; lanes are tids: 0 what the
// training thread does, spans inside each other; then operations that run
// beside it, as many lanes as run at once. Times are microseconds of unix
// time, whole, so that ranks of one clock fit together.
//
// Threads: add() and what uses it may be called by any; a Span lives in one.
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

namespace remesh::trace {

enum class Category : uint8_t {
  kStep,     // a whole step, around all others
  kForward,  // passes of a microbatch
  kBackward,
  kWeight,
  kCollective,  // a blocking operation on a group: exposed
  kWait,        // for an operation started before: exposed
  kBubble,      // for a neighbouring pipeline stage
  kOptimizer,
  kCheckpoint,
  kData,
};
inline constexpr int kNumCategories = 10;
// "forward", "collective" ...: also the name of a span without one.
const char* category_name(Category category);

enum class Lane : uint8_t {
  kCompute,        // the training thread
  kCommunication,  // under way beside it
  kBackground,     // other threads
};

// A number of a span. The key must outlive the tracer (a literal).
struct Arg {
  const char* key = nullptr;
  int64_t value = 0;
};
inline constexpr size_t kMaxArgs = 3;

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
  Tracer() = default;  // never on
  explicit Tracer(TracerOptions options);
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  bool on() const { return on_; }
  // Begins or ends to record. A default-made tracer stays off.
  void set_on(bool on) { on_ = on && able_; }

  // Nanoseconds of the monotonic clock, 0 when off.
  int64_t now() const { return on_ ? monotonic_ns() : 0; }
  // A span [begin, end] by now(). Names and groups are literals or from keep().
  // Does nothing when off, or when the span began while it was (begin 0).
  void add(Lane lane, Category category, const char* name, int64_t begin_ns,
           int64_t end_ns, std::initializer_list<Arg> args = {},
           const char* group = nullptr);
  // The text for as long as the tracer lives.
  const char* keep(const std::string& text);

  size_t num_spans() const;
  size_t dropped() const;
  std::string to_json() const;
  // Writes `folder`/gen-G-rank-R.json at once (a file beside it is renamed);
  // makes the folder. Fails with the path.
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

  struct Shown;
  static int place(std::vector<Shown>& shown, Lane lane, int first_tid);
  static std::string span_line(int pid, const Shown& shown);

  TracerOptions options_;
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
  // tracer: nullptr is one that is off. name: nullptr is the category's.
  Span(Tracer* tracer, Category category, std::initializer_list<Arg> args = {},
       const char* name = nullptr)
      : tracer_(tracer != nullptr && tracer->on() ? tracer : nullptr) {
    if (tracer_ == nullptr) return;
    category_ = category;
    name_ = name != nullptr ? name : category_name(category);
    size_t i = 0;
    for (const Arg& a : args)
      if (i < kMaxArgs) args_[i++] = a;
    begin_ns_ = tracer_->now();
  }
  ~Span() {
    if (tracer_ == nullptr) return;
    tracer_->add(Lane::kCompute, category_, name_, begin_ns_, tracer_->now(),
                 {args_[0], args_[1], args_[2]});
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  Tracer* const tracer_;
  Category category_ = Category::kStep;
  const char* name_ = nullptr;
  std::array<Arg, kMaxArgs> args_{};
  int64_t begin_ns_ = 0;
};

}  // namespace remesh::trace
