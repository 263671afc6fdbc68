#include "coordinator/core/admission.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "coordinator/core/durable.h"
#include "proto/base/keyed_hash.h"
#include "proto/limits/plausible.h"

namespace remesh::core {
namespace {

constexpr int64_t kRefusalToldMs = 60'000;

// The most steps that a worker can have made: its ranks may have been started
// for a longer job, and it may have made more before.
int64_t most_steps(const ClusterView& view, const Options& options) {
  const pb::Assignment& a = view.durable.assignment();
  return std::max({options.job.train().steps(), view.last_finished,
                   a.has_job() ? a.job().train().steps() : 0});
}

// False if the report has a later epoch or generation than the journal and
// nothing shows that a coordinator of this run used these numbers. A worker of
// a release without proofs is believed while all workers find this coordinator,
// if it takes part in the journal's generation, which it could end anyway.
bool believes_numbers(const pb::Report& r, const ClusterView& view,
                      const Options& options, int64_t started_ms) {
  return (r.generation() <= view.durable.generation() &&
          r.coordinator_epoch() <= view.durable.epoch()) ||
         r.proof() ==
             proof_of(options.secret, r.coordinator_epoch(), r.generation()) ||
         (options.restored && view.now_ms - started_ms < kReconnectSlackMs &&
          participates(*options.restored, r.worker(), r.incarnation()));
}

}  // namespace

uint64_t proof_of(const std::string& secret, uint64_t epoch,
                  int64_t generation) {
  return keyed_hash(secret, fmt::format("{} {}", epoch, generation));
}

Status check_protocol(const pb::Report& r,
                      const wire::ProtocolRange& protocol) {
  const wire::ProtocolRange theirs = wire::protocol_of(r);
  if (protocol.meets(theirs)) return ok_status();
  return invalid_argument(fmt::format(
      "the worker speaks {} of the protocol and this coordinator {}; install "
      "releases of remesh on both that have a version in common",
      theirs.to_string(), protocol.to_string()));
}

Result<pb::Report> admit(const pb::Report& r, const ClusterView& view,
                         const Options& options, int64_t started_ms) {
  const pb::Durable& d = view.durable;
  RETURN_IF_ERROR(limits::check(r, {.generation = d.generation(),
                                    .epoch = d.epoch(),
                                    .steps = most_steps(view, options)}));
  if (view.roster.members().size() >= limits::kMaxWorkers &&
      view.roster.find(r.worker()) == nullptr)
    return exhausted(fmt::format("the job has {} workers; no more are allowed",
                                 limits::kMaxWorkers));
  if (!believes_numbers(r, view, options, started_ms))
    return invalid_argument(fmt::format(
        "generation = {}, coordinator_epoch = {}: later than {} and {} here, "
        "and the worker does not prove that this run used them; restart it",
        r.generation(), r.coordinator_epoch(), d.generation(), d.epoch()));
  pb::Report out = r;
  limits::clean(&out);
  out.set_host(view.roster.host_of(r));
  const pb::Assignment& a = d.assignment();
  const bool part = r.generation() == a.generation() &&
                    (d.phase() == pb::Durable::WAITING || terminal(d.phase()) ||
                     participates(d, r.worker(), r.incarnation()));
  auto& ranks = *out.mutable_ranks();
  const auto foreign =
      std::remove_if(ranks.begin(), ranks.end(), [&](const auto& rank) {
        return !part || rank.rank() >= a.ranks_size() ||
               a.ranks(rank.rank()).worker() != r.worker();
      });
  ranks.erase(foreign, ranks.end());
  return out;
}

Status check_fence(const pb::FenceIn& f, const pb::Durable& d) {
  RETURN_IF_ERROR(limits::check(f));
  const auto& places = d.assignment().ranks();
  const auto ranks = static_cast<size_t>(
      std::count_if(places.begin(), places.end(),
                    [&](const auto& p) { return p.worker() == f.worker(); }));
  // Above the numbers of an older journal it is not known who takes part.
  const bool known = d.assignment().generation() == d.generation();
  if (f.generation() == d.generation() && ranks > 0 &&
      f.blob().size() <= ranks * limits::kMaxFenceBytes && known &&
      participates(d, f.worker(), f.incarnation()))
    return ok_status();
  return invalid_argument("the worker has no part in this fence");
}

// For older generations, and if the journal was lost, the only evidence of a
// part in it is the state that the worker holds.
bool may_know_steps(const pb::Report& r, int64_t generation, bool keeps_state,
                    const pb::Durable& d) {
  if (!keeps_state || d.assignment().workers().empty()) return true;
  return is_assigned(d.assignment(), r.worker()) ||
         std::any_of(
             r.holdings().begin(), r.holdings().end(),
             [&](const auto& h) { return h.generation() == generation; });
}

std::optional<int64_t> RefusalCount::add(int64_t now_ms) {
  ++since_;
  if (told_ms_ && now_ms - *told_ms_ < kRefusalToldMs) return std::nullopt;
  told_ms_ = now_ms;
  return std::exchange(since_, 0);
}

}  // namespace remesh::core
