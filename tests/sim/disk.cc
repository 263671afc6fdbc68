// The coordinator's disk, which in some runs stalls, is full or is slow for a
// while, and everything that waits for it. The coordinator's shell never
// blocks: writes, and actions that must follow them, go through a queue like
// server::Outbox, and directives through one like server::DirectiveSender. Both
// queues are lost with the process, so the disk has a prefix of what was
// queued.
#include <fmt/format.h>

#include <utility>

#include "tests/sim/cluster.h"
#include "tests/sim/parts.h"
#include "tests/testing/sentences.h"

namespace remesh::sim {
namespace {

// The same as in coordinator/server.
constexpr int64_t kKeepAliveMs = 300;
constexpr int64_t kProbeMs = 500;

}  // namespace

// ------------------------------------------------------------------ faults

void Cluster::choose_disk() {
  constexpr int64_t kLongMs = 40'000;
  if (disk_random_.uniform(0, 3) != 0) return;
  if (disk_random_.uniform(0, 7) == 0) {
    options_.fault_ms += kLongMs;
    options_.end_ms += kLongMs;
  }
  schedule_disk_fault();
}

void Cluster::schedule_disk_fault() {
  at(disk_random_.uniform(0, 4000), [this] {
    if (faults_on_) break_disk();
  });
}

// Faults may last for tens of seconds. Meanwhile the coordinator may be killed.
void Cluster::break_disk() {
  disk_ = static_cast<Disk>(disk_random_.uniform(1, 3));
  broke_ms_ = now_;
  const int64_t ms =
      disk_random_.uniform(50, disk_random_.uniform(0, 3) == 0 ? 45'000 : 3000);
  trace(fmt::format("the disk {} for {} ms",
                    disk_ == Disk::kStalled ? "stalls"
                    : disk_ == Disk::kFull  ? "is full"
                                            : "is slow",
                    ms));
  ++stats_.faults;
  if (disk_ == Disk::kSlow) slow_disk();
  if (disk_random_.uniform(0, 1) == 0)
    at(disk_random_.uniform(0, ms), [this] {
      if (faults_on_ && !unwritten_.empty() && coordinator_runs())
        crash_coordinator();
    });
  at(ms, [this] {
    if (!faults_on_) return;
    repair_disk();
    schedule_disk_fault();
  });
}

void Cluster::slow_disk() {
  at(disk_random_.uniform(10, 800), [this] {
    if (disk_ != Disk::kSlow) return;
    if (!unwritten_.empty() && now_ >= coordinator_frozen_until_) {
      write_one();
      deliver_written();
    }
    slow_disk();
  });
}

// A suspended coordinator writes when it continues.
void Cluster::repair_disk() {
  if (disk_ == Disk::kWorks) return;
  if (now_ < coordinator_frozen_until_)
    return at(coordinator_frozen_until_ - now_, [this] { repair_disk(); });
  trace(fmt::format("the disk works again: {} writes were waiting",
                    unwritten_.size()));
  // The coordinator extends every worker's time by as much.
  for (auto& [name, w] : workers_)
    if (disk_ != Disk::kFull && w->trouble_until > broke_ms_)
      w->trouble_until += now_ - broke_ms_;
  disk_ = Disk::kWorks;
  while (!unwritten_.empty()) write_one();
  deliver_written();
}

// Reads wait, too.
void Cluster::when_disk_answers(std::function<void()> what) {
  if (disk_ != Disk::kStalled) return what();
  at(50, [this, what = std::move(what)] { when_disk_answers(what); });
}

// ------------------------------------------------------------------ writes

void Cluster::write(std::function<void()> effect) {
  ++given_;
  unwritten_.push_back(std::move(effect));
  if (disk_ == Disk::kWorks) return write_one();
  if (unwritten_.size() > 1) return;
  first_waits_.begin(now_);
  if (disk_ != Disk::kFull)
    call_lasts_.begin(now_);  // a full disk returns an error at once
}

void Cluster::write_one() {
  first_waits_.end(now_);
  call_lasts_.end(now_);
  const auto effect = std::move(unwritten_.front());
  unwritten_.pop_front();
  effect();
  ++written_;
  if (unwritten_.empty()) return;
  first_waits_.begin(now_);
  if (disk_ != Disk::kFull) call_lasts_.begin(now_);
}

void Cluster::then(std::function<void()> act) {
  if (unwritten_.empty()) return act();
  acts_.push_back([this, act = std::move(act), after = given_] {
    if (written_ < after) return false;
    act();
    return true;
  });
}

void Cluster::deliver_written() {
  poll_mail();
  while (!acts_.empty() && acts_.front()()) acts_.pop_front();
}

// A coordinator that has exited is started by resume().
bool Cluster::coordinator_runs() const {
  return coordinator_ && (!coordinator_->ended() || !acts_.empty());
}

// Lost with the process, except that the call in progress may have completed.
void Cluster::lose_unwritten() {
  if (!unwritten_.empty() && disk_ != Disk::kFull &&
      disk_random_.uniform(0, 1) == 0)
    write_one();
  if (!unwritten_.empty())
    trace(fmt::format("{} writes are lost", unwritten_.size()));
  unwritten_.clear();
  written_ = given_;
  first_waits_ = call_lasts_ = {};
  acts_.clear();
  places_.clear();
  cut_metrics(metrics_.size() - std::exchange(unwritten_lines_, 0));
}

void Cluster::put_into_journal(const pb::Durable& d) {
  note_written(d);
  journal_ = d;
  if (options_.reword) for_each_sentence(&*journal_, reworded);
  resuming_ = false;
  synced_lines_ = metrics_.size() - unwritten_lines_;
  constexpr size_t kBackups = 40;
  backups_.push_back(*journal_);
  if (backups_.size() > kBackups) backups_.pop_front();
  stats_.generations = std::max(stats_.generations, d.generation());
}

void Cluster::cut_metrics(size_t lines) {
  metrics_.resize(lines);
  for (; after_loss_.size() > lines; after_loss_.pop_back())
    lost_since_record_ = lost_since_record_ || after_loss_.back();
}

// Checks the lock periodically, because a stalled disk is noticed only when it
// is used.
core::Tick Cluster::tick_of_disk() {
  if (coordinator_runs() && unwritten_.empty() &&
      now_ - probed_ms_ >= kProbeMs) {
    probed_ms_ = now_;
    if (disk_ != Disk::kFull) write([] {});
  }
  return {.unwritten_ms = first_waits_.take_ms(now_),
          .stalled_ms = call_lasts_.take_ms(now_),
          .synced_step = sync_metrics()};
}

// -------------------------------------------------------------- directives

void Cluster::note_place(const pb::Report& r) {
  Place& place = places_[r.worker()];
  if (r.incarnation() != place.incarnation) place = {};
  place.incarnation = r.incarnation();
}

void Cluster::hold(const pb::Directive& d) {
  const auto place = places_.find(d.worker());
  if (place == places_.end()) return;
  place->second.held = d;
  place->second.held_after = given_;
  release(place->second);
}

void Cluster::poll_mail() {
  for (auto& [worker, place] : places_) {
    release(place);
    if (place.held && place.sent && now_ - place.sent_ms >= kKeepAliveMs)
      send_again(place);
  }
}

void Cluster::release(Place& place) {
  if (!place.held || written_ < place.held_after) return;
  place.sent = std::exchange(place.held, std::nullopt);
  send_again(place);
}

void Cluster::send_again(Place& place) {
  place.sent->set_seq(++mail_seq_);
  place.sent_ms = now_;
  check_sent(*place.sent);
  overheard_.directive = *place.sent;
  deliver_to_worker(place.sent->worker(),
                    agent::DirectiveReceived{*place.sent});
}

}  // namespace remesh::sim
