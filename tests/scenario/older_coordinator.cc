// Two coordinators of one run: the lock was lost while the older one was
// stopped.
#include <fmt/format.h>

#include "tests/scenario/scripted_cluster.h"

namespace remesh::scenario {

Status ScriptedCluster::freeze_coordinator(const Command&) {
  older_ = std::move(coordinator_);
  older_lines_ = metrics_.size();
  return ok_status();
}

Status ScriptedCluster::thaw_coordinator(const Command& c) {
  older_hears_ = {c.words.begin(), c.words.end()};
  const auto mail = std::move(older_mail_);
  older_mail_.clear();
  for (const core::Input& event : mail) drive_older(event);
  drive_older(core::Tick{});
  return ok_status();
}

// What the files of the run do not let a coordinator do that they do not belong
// to any more; "" if they let it.
std::string ScriptedCluster::refuses_older(const core::Action& action) const {
  if (const auto* p = std::get_if<core::Persist>(&action))
    return p->durable.epoch() < journal_->epoch()
               ? "the journal has a larger epoch"
               : "";
  return std::holds_alternative<core::AppendMetrics>(action) &&
                 older_lines_ != metrics_.size()
             ? "somebody else has written to metrics.jsonl"
             : "";
}

// Both write to the same files. What the older one says reaches the workers.
void ScriptedCluster::drive_older(const core::Input& event) {
  if (!older_) return;
  for (const core::Action& a : older_->on(event, now_)) {
    if (const std::string why = refuses_older(a); !why.empty()) {
      say("the older coordinator exits with 75: " + why);
      older_.reset();
      return;
    }
    if (const auto* m = std::get_if<core::AppendMetrics>(&a)) {
      metrics_.push_back(m->metrics);
      ++older_lines_;
      say(fmt::format("metrics step {} g{}, by the older coordinator",
                      m->metrics.step(), m->metrics.generation()));
    } else if (const auto* s = std::get_if<core::SendDirective>(&a)) {
      to_worker(*s);
    }
  }
}

}  // namespace remesh::scenario
