// What of a worker's message counts. Whoever reaches the port can send one, so
// each is checked before it changes anything, and a worker speaks only for the
// ranks and steps that it has a part in.
#include <fmt/format.h>

#include <algorithm>

#include "coordinator/core/coordinator.h"
#include "coordinator/core/durable.h"
#include "proto/limits/plausible.h"

namespace remesh::core {

constexpr int64_t kRefusalToldMs = 60'000;

// The report without what others' ranks do; nothing if it is refused.
std::optional<pb::Report> Coordinator::admit(const pb::Report& r) {
  const wire::ProtocolRange theirs = wire::protocol_of(r);
  if (!options_.protocol.meets(theirs)) {
    refuse(r.worker(),
           fmt::format("the worker speaks {} of the protocol and this "
                       "coordinator {}; install releases of remesh on both "
                       "that have a version in common",
                       theirs.to_string(), options_.protocol.to_string()),
           /*permanent=*/true);
    return std::nullopt;
  }
  Status s = limits::check(r, {.generation = durable_.generation(),
                               .epoch = durable_.epoch(),
                               .steps = most_steps()});
  if (s.ok() && roster_.members().size() >= limits::kMaxWorkers &&
      roster_.find(r.worker()) == nullptr)
    s = exhausted(fmt::format("the job has {} workers; no more are allowed",
                              limits::kMaxWorkers));
  if (s.ok() && !believes_numbers(r))
    s = invalid_argument(fmt::format(
        "generation = {}, coordinator_epoch = {}: later than {} and {} here, "
        "and the worker does not prove that this run used them; restart it",
        r.generation(), r.coordinator_epoch(), durable_.generation(),
        durable_.epoch()));
  if (!s.ok()) {
    refuse(r.worker(), s.message(), /*permanent=*/false);
    return std::nullopt;
  }
  pb::Report out = r;
  limits::clean(&out);
  out.set_host(roster_.host_of(r));
  const pb::Assignment& a = durable_.assignment();
  const bool part =
      r.generation() == a.generation() &&
      (durable_.phase() == pb::Durable::WAITING || terminal(durable_.phase()) ||
       participates(durable_, r.worker(), r.incarnation()));
  auto& ranks = *out.mutable_ranks();
  const auto foreign =
      std::remove_if(ranks.begin(), ranks.end(), [&](const auto& rank) {
        return !part || rank.rank() >= a.ranks_size() ||
               a.ranks(rank.rank()).worker() != r.worker();
      });
  ranks.erase(foreign, ranks.end());
  return out;
}

// The most steps that a worker can have made: its ranks may have been started
// for a longer job, and it may have made more before.
int64_t Coordinator::most_steps() const {
  const pb::Assignment& a = durable_.assignment();
  return std::max({total_steps(), ledger_.last_finished(),
                   a.has_job() ? a.job().train().steps() : 0});
}

Status Coordinator::check_fence(const pb::FenceIn& f) const {
  RETURN_IF_ERROR(limits::check(f));
  const auto& places = durable_.assignment().ranks();
  const auto ranks = static_cast<size_t>(
      std::count_if(places.begin(), places.end(),
                    [&](const auto& p) { return p.worker() == f.worker(); }));
  // Above the numbers of an older journal it is not known who takes part.
  const bool known =
      durable_.assignment().generation() == durable_.generation();
  if (f.generation() == durable_.generation() && ranks > 0 &&
      f.blob().size() <= ranks * limits::kMaxFenceBytes && known &&
      participates(durable_, f.worker(), f.incarnation()))
    return ok_status();
  return invalid_argument("the worker has no part in this fence");
}

// Metrics of a step are taken from workers that had a part in it. For older
// generations, and if the journal was lost, the only evidence of that is the
// state that the worker holds.
bool Coordinator::may_know_steps(const pb::Report& r,
                                 int64_t generation) const {
  if (!keeps_state() || durable_.assignment().workers().empty()) return true;
  return is_assigned(durable_.assignment(), r.worker()) ||
         std::any_of(
             r.holdings().begin(), r.holdings().end(),
             [&](const auto& h) { return h.generation() == generation; });
}

void Coordinator::refuse(const std::string& worker, const std::string& why,
                         bool permanent) {
  ++dropped_;
  pb::Refusal refusal;
  refusal.set_reason(why);
  refusal.set_permanent(permanent);
  wire::set_protocol(options_.protocol, &refusal);
  act(Refuse{std::move(refusal)});
  tell_refused(worker, why);
}

void Coordinator::tell_refused(const std::string& worker,
                               const std::string& why) {
  ++refused_;
  if (refusal_told_ms_ && now_ms_ - *refusal_told_ms_ < kRefusalToldMs) return;
  pb::EventRecord e = event(events::kReportRefused);
  e.set_worker(limits::printable(worker, 64));
  e.set_cause(why);
  if (refusal_told_ms_)
    e.set_detail(fmt::format("{} reports since the last event", refused_));
  refusal_told_ms_ = now_ms_;
  refused_ = 0;
  emit(std::move(e));
}

}  // namespace remesh::core
