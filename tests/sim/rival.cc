// Two coordinators of one run at once: the lock was lost while the older one
// was suspended or cut off. The run's files refuse writes of the older one,
// which also checks its lock twice a second.
#include <fmt/format.h>

#include <utility>

#include "tests/sim/cluster.h"
#include "tests/sim/hostile.h"
#include "tests/sim/parts.h"

namespace remesh::sim {
namespace {

constexpr int64_t kTickMs = 50;
constexpr int64_t kLockMs = 500;

}  // namespace

void Cluster::start_rival() {
  if (!coordinator_ || coordinator_->ended() || rival_ || done_ ||
      !faults_on_ || disk_ == Disk::kStalled)
    return;
  trace("a second coordinator is started");
  ++stats_.faults;
  if (unwritten_.empty()) rival_ = std::move(coordinator_);
  rival_lines_ = lines_;
  rival_frozen_until_ = std::max(now_, coordinator_frozen_until_);
  rival_ends_ms_ = rival_frozen_until_ + later_random_.uniform(0, kLockMs);
  ++coordinator_life_;
  start_coordinator();
  rival_tick();
}

void Cluster::end_rival(const std::string& why) {
  if (!rival_) return;
  say("the older coordinator exits with 75: " + why);
  rival_.reset();
}

void Cluster::rival_tick() {
  if (!rival_) return;
  if (now_ >= rival_ends_ms_) return end_rival("its lock is another file");
  if (now_ >= rival_frozen_until_) drive_rival(core::Tick{});
  at(kTickMs, [this] { rival_tick(); });
}

// Some reports still reach it: workers switch to the newer one at different
// times.
void Cluster::tell_rival(const std::string& from, const core::Input& event) {
  if (!rival_ || !(rival_hears_.contains(from) || later_random_.chance(0.5)))
    return;
  at(std::max<int64_t>(rival_frozen_until_ - now_, 0) +
         later_random_.uniform(0, 5),
     [this, event] { drive_rival(event); });
}

// The lock is checked before a state is written, and writes that wait for the
// disk are refused, too.
std::string Cluster::refuses_rival(const core::Action& action) const {
  const bool writes = std::holds_alternative<core::Persist>(action) ||
                      std::holds_alternative<core::AppendMetrics>(action) ||
                      std::holds_alternative<core::EmitEvent>(action);
  if (writes && disk_ != Disk::kWorks) return "its write waits for the disk";
  if (const auto* p = std::get_if<core::Persist>(&action))
    return p->durable.epoch() < epoch_ ? "the journal has a larger epoch"
                                       : "its lock is another file";
  return std::holds_alternative<core::AppendMetrics>(action) &&
                 rival_lines_ != metrics_.size()
             ? "somebody else has written to metrics.jsonl"
             : "";
}

// The newer one is refused, too, if the older one has written; it then
// restarts.
bool Cluster::finds_lines_of_rival() {
  if (lines_ == metrics_.size()) return false;
  trace("the older coordinator has written to metrics.jsonl");
  crash_coordinator();
  return true;
}

void Cluster::drive_rival(const core::Input& event) {
  if (!rival_ || now_ < rival_frozen_until_) return;
  for (const core::Action& a : rival_->on(event, now_)) {
    if (answers_hostile(a)) continue;
    if (const std::string why = refuses_rival(a); !why.empty())
      return end_rival(why);
    if (const auto* m = std::get_if<core::AppendMetrics>(&a)) {
      say(fmt::format("metrics step {} g{}, by the older coordinator",
                      m->metrics.step(), m->metrics.generation()));
      check_metrics(m->metrics);
      metrics_.push_back(m->metrics);
      ++rival_lines_;
    } else if (const auto* s = std::get_if<core::SendDirective>(&a)) {
      pb::Directive d = s->with_assignment();
      d.set_seq(++mail_seq_);
      deliver_to_worker(d.worker(), agent::DirectiveReceived{d});
    } else if (const auto* f = std::get_if<core::SendFence>(&a)) {
      deliver_to_worker(f->worker, agent::FenceOutReceived{f->fence});
    }
  }
}

}  // namespace remesh::sim
