// Outbox: what has to be on disk, written by a thread of its own, in the order
// given, and what may happen only then.
//
// A write that fails is tried again for as long as it takes, and the owner goes
// on meanwhile: on a full disk or on one that does not answer it still hears
// the workers and answers `remesh status`.
//
// A write that fails with Cancelled is not tried again, and none after it is
// made: somebody else has taken over the files.
//
// What is on disk is at any time the result of a prefix of what was given, and
// perhaps of a state beyond it. A process that ends loses the rest, and nothing
// that depends on the rest has happened. Only lines may be missing in the
// prefix: where they do not fit on the disk, nothing waits for them, the others
// are written without them, and they follow when there is room.
//
// However long nothing can be written, little memory is taken: states replace
// each other, and lines are dropped once full().
//
// Threads: the functions are for the owner's thread. A write runs in the
// Outbox's thread, and must own what it uses: the destructor does not wait for
// a write that does not return, which then ends after the Outbox, or with the
// process.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "proto/base/status.h"
#include "proto/control.pb.h"

namespace remesh::server {

class Outbox {
 public:
  using Write = std::function<Status()>;
  struct Options {
    int64_t retry_ms = 100;  // after a failed write
    // A write without an answer for so long is a problem().
    int64_t stalled_ms = 5000;
    size_t full_bytes = size_t{64} << 20;
    // How long the destructor waits for the write in progress.
    int64_t patience_ms = 2000;
    // In the Outbox's thread: a write failed for the first time since one
    // succeeded; OK: it succeeded after all.
    std::function<void(const Status&)> note;
  };
  explicit Outbox(Options options);
  ~Outbox();
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  // `file` is for messages. `bytes`: that the write keeps in memory. `state`,
  // unless it is 0: the write replaces all of the file, so the last one given
  // is not made, but this one in its place, if it has the same number, has not
  // begun, and only lines of write_line() were given in between.
  void write(std::string file, Write write, size_t bytes = 0,
             uint64_t state = 0);
  // A write that nothing waits for while lines fail, and that is dropped while
  // full(). One that is to be kept is not dropped, and is always waited for.
  void write_line(std::string file, Write write, size_t bytes,
                  bool keep = false);
  // How many were dropped since the last call; 0 until the others are written.
  int64_t take_dropped();
  // What waits takes Options::full_bytes or more: nothing should be added that
  // somebody else can keep.
  bool full() const;
  // Calls `act` when everything given so far is written, except for lines that
  // fail: in deliver(), or now.
  void then(std::function<void()> act);

  // The number of the newest write, and whether it and all before are done,
  // except for such lines.
  uint64_t newest() const { return newest_; }
  bool written(uint64_t number) const;

  int fd() const;  // readable when deliver() has something to do
  void deliver();

  struct Waited {
    // The oldest write was not done: later actions were held back.
    int64_t unwritten_ms = 0;
    // The storage did not even answer.
    int64_t stalled_ms = 0;
  };
  // Since the last call.
  Waited take_waited();
  // The write that failed with Cancelled.
  std::optional<Status> refused() const;
  // Why nothing has been written for a while.
  std::optional<pb::JobStatus::Problem> problem() const;

  // Waits until everything is written, at most for that long.
  void finish(int64_t patience_ms);

 private:
  struct Shared;
  struct Job;
  void add(Job job);
  struct Waiting {
    uint64_t after = 0;
    std::function<void()> act;
  };

  std::shared_ptr<Shared> shared_;  // with the thread
  uint64_t newest_ = 0;
  int64_t dropped_ = 0;
  std::deque<Waiting> waiting_;
};

}  // namespace remesh::server
