#include "coordinator/core/admission.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "coordinator/core/announcements.h"
#include "coordinator/core/durable.h"
#include "proto/base/keyed_hash.h"
#include "proto/base/status.h"
#include "proto/limits/plausible.h"

namespace remesh::core {
namespace {

constexpr int64_t kRefusalEventMs = 60'000;
// How many workers of one key, which all may share, may start.
constexpr double kLivesPerS = 64;
constexpr double kLivesAtOnce = 4096;
// States that any worker may report, and all together those that report more.
constexpr int kFewHoldings = 256;
constexpr int64_t kMostHoldings = 1 << 18;

// The most steps that a worker can have made: its ranks may have been started
// for a longer job, and it may have made more before.
int64_t most_steps(const ClusterView& view, const Options& options) {
  const pb::Assignment& a = view.durable.assignment();
  return std::max({options.job.train().steps(), view.last_finished,
                   a.has_job() ? a.job().train().steps() : 0});
}

// False if the report has a later epoch or generation than the journal and does
// not prove that a coordinator of this run used these numbers.
bool believes_numbers(const pb::Report& r, const pb::Durable& d,
                      const Options& options) {
  return (r.generation() <= d.generation() &&
          r.coordinator_epoch() <= d.epoch()) ||
         r.proof() ==
             proof_of(options.secret, r.coordinator_epoch(), r.generation());
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

// A state takes a few hundred bytes here, and a key serves any number of names.
Status check_holdings(const pb::Report& r, const Roster& roster) {
  if (r.holdings_size() <= kFewHoldings) return ok_status();
  int64_t all = r.holdings_size();
  for (const auto& [name, m] : roster.members())
    if (name != r.worker() && m.report.holdings_size() > kFewHoldings)
      all += m.report.holdings_size();
  if (all <= kMostHoldings) return ok_status();
  return exhausted(fmt::format(
      "states: {}, and with those of other workers {}; allowed: {} in all, "
      "without workers that have up to {}",
      r.holdings_size(), all, kMostHoldings, kFewHoldings));
}

// The report without what others' ranks do. Fails if it does not count.
Result<pb::Report> admit(const pb::Report& r, const ClusterView& view,
                         const Options& options) {
  const pb::Durable& d = view.durable;
  const bool believed = believes_numbers(r, d, options);
  // The clock of an earlier coordinator may have been far ahead.
  const uint64_t epoch =
      believed ? std::max(d.epoch(), r.coordinator_epoch()) : d.epoch();
  const limits::Known known = {.generation = d.generation(),
                               .epoch = epoch,
                               .steps = most_steps(view, options)};
  RETURN_IF_ERROR(limits::check(r, known));
  if (view.roster.members().size() >= limits::kMaxWorkers &&
      view.roster.find(r.worker()) == nullptr)
    return exhausted(fmt::format("the job has {} workers; no more are allowed",
                                 limits::kMaxWorkers));
  RETURN_IF_ERROR(check_holdings(r, view.roster));
  if (!believed)
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
  // Nobody can have states of steps that the job does not have, or of
  // generations that did not begin.
  auto& states = *out.mutable_holdings();
  const int64_t last_generation = std::max(d.generation(), r.generation());
  states.erase(std::remove_if(states.begin(), states.end(),
                              [&](const auto& h) {
                                return h.step() > known.steps ||
                                       h.generation() > last_generation;
                              }),
               states.end());
  return out;
}

}  // namespace

uint64_t proof_of(const std::string& secret, uint64_t epoch,
                  int64_t generation) {
  return keyed_hash(secret, fmt::format("{} {}", epoch, generation));
}

bool takes_part(const pb::FenceIn& f, const pb::Durable& d) {
  const auto& places = d.assignment().ranks();
  const auto ranks = static_cast<size_t>(
      std::count_if(places.begin(), places.end(),
                    [&](const auto& p) { return p.worker() == f.worker(); }));
  // Above the numbers of an older journal it is not known who takes part.
  const bool known = d.assignment().generation() == d.generation();
  return f.generation() == d.generation() && ranks > 0 &&
         f.blob().size() <= ranks * limits::kMaxFenceBytes && known &&
         participates(d, f.worker(), f.incarnation());
}

std::vector<const pb::StepMetrics*> metrics_that_count(const pb::Report& r,
                                                       bool keeps_state,
                                                       const pb::Durable& d) {
  const auto may_know = [&](int64_t generation) {
    return may_know_steps(r, generation, keeps_state, d);
  };
  // An older journal does not know who took part.
  const bool anybody = d.phase() == pb::Durable::WAITING ||
                       d.assignment().generation() < d.generation();
  const bool accepted = (anybody && may_know(r.generation())) ||
                        (participates(d, r.worker(), r.incarnation()) &&
                         has_ranks(d, r.worker()));
  std::vector<const pb::StepMetrics*> out;
  for (const pb::StepMetrics& s : r.metrics())
    if ((s.generation() < d.generation() && may_know(s.generation())) ||
        (s.generation() == r.generation() && accepted))
      out.push_back(&s);
  return out;
}

Admission::Admission(const wire::ProtocolRange& protocol)
    : protocol_(protocol), lives_(kLivesPerS, kLivesAtOnce) {}

Admission::Verdict Admission::judge(const pb::Report& r, const std::string& key,
                                    const ClusterView& view,
                                    const Options& options) {
  if (const Status s = check_protocol(r, protocol_); !s.ok())
    return refuse(r.worker(), s.message(), pb::Refusal::PERMANENT, view.now_ms);
  auto admitted = admit(r, view, options);
  if (!admitted.ok())
    return refuse(r.worker(), admitted.status().message(), pb::Refusal::RETRY,
                  view.now_ms);
  if (view.roster.judge(*admitted, view.now_ms) != Roster::Verdict::kTaken) {
    const std::string why = view.roster.refusal(*admitted, view.now_ms);
    if (!why.empty())
      return refuse(admitted->worker(), why, pb::Refusal::RETRY, view.now_ms);
    drop();
    return {};
  }
  // Each life of a worker makes events, and each name a write of the journal.
  // One that comes too early is taken later: its worker repeats what it says.
  const Roster::Member* m = view.roster.find(r.worker());
  const bool known = m != nullptr && m->report.incarnation() == r.incarnation();
  if (!key.empty() && !known && !lives_.admits(key, view.now_ms)) {
    drop();
    return {.event =
                event(r.worker(), "too many new workers of one key at once",
                      view.now_ms)};
  }
  return {.report = std::move(admitted).value()};
}

Admission::Verdict Admission::refuse(const std::string& worker,
                                     const std::string& why,
                                     pb::Refusal::Kind kind, int64_t now_ms) {
  drop();
  pb::Refusal refusal;
  refusal.set_reason(why);
  refusal.set_kind(kind);
  wire::set_protocol(protocol_, &refusal);
  return {.refusal = std::move(refusal), .event = event(worker, why, now_ms)};
}

std::optional<pb::EventRecord> Admission::event(const std::string& worker,
                                                const std::string& why,
                                                int64_t now_ms) {
  ++suppressed_;
  if (last_event_ms_ && now_ms - *last_event_ms_ < kRefusalEventMs)
    return std::nullopt;
  EventFields e{.worker = limits::printable(worker, 64), .cause = why};
  if (last_event_ms_)
    e.detail = fmt::format("{} reports since the last event", suppressed_);
  last_event_ms_ = now_ms;
  suppressed_ = 0;
  return core::event(events::kReportRefused, e);
}

}  // namespace remesh::core
