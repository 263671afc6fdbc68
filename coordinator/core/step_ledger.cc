#include "coordinator/core/step_ledger.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "coordinator/core/state_choice.h"

namespace remesh::core {

StepLedger::StepLedger(int64_t last_finished,
                       const std::vector<pb::StepMetrics>& recent,
                       std::vector<FirstStep> first_steps,
                       const pb::Branches& branches)
    : last_finished_(last_finished), first_steps_(std::move(first_steps)) {
  for (const pb::Branches::Abandoned& a : branches.abandoned())
    first_steps_.push_back({a.generation(), a.step(), a.after()});
  for (const pb::StepMetrics& m : recent) remember(m);
  for (const pb::Branches::Origin& o : branches.origins())
    if (o.from() < o.generation())
      origins_[o.generation()] = {o.from(), o.step()};
}

void StepLedger::continue_from_source(const pb::Assignment& a,
                                      pb::Branches* branches) {
  std::erase_if(origins_,
                [&](auto& o) { return o.second.step <= last_finished_; });
  const pb::Source& source = a.source();
  if (!source.states().empty() && source.step() > last_finished_)
    origins_[a.generation()] = {source.states(0).generation(), source.step()};
  branches->clear_origins();
  for (const auto& [generation, from] : origins_) {
    pb::Branches::Origin* o = branches->add_origins();
    o->set_generation(generation);
    o->set_from(from.generation);
    o->set_step(from.step);
  }
}

std::optional<StepLedger::Origin> StepLedger::origin(int64_t generation,
                                                     int64_t step) const {
  const auto it = origins_.find(generation);
  if (it == origins_.end() || it->second.step > step ||
      it->second.step <= last_finished_)
    return std::nullopt;
  return it->second;
}

void StepLedger::remember(const pb::StepMetrics& m) {
  recent_.push_back(m);
  if (!m.skipped()) ++recent_updates_;
  while (recent_updates_ > kRecentUpdates || recent_.size() > kMostRecent) {
    if (!recent_.front().skipped()) --recent_updates_;
    recent_.pop_front();
  }
}

void StepLedger::report(const pb::StepMetrics& m) {
  constexpr size_t kMaxAhead = 1 << 17;  // finished, but not by all ranks
  if (m.step() <= last_finished_) return redo(m);
  Steps& steps = reported_[m.generation()];
  steps.emplace(m.step(), m);
  if (steps.size() > kMaxAhead) steps.erase(std::prev(steps.end()));
  size_t all = 0;
  for (const auto& of_generation : reported_)
    all += of_generation.second.size();
  if (reported_.size() > kMostGenerations || all > 4 * kMaxAhead)
    reported_.erase(reported_.begin());
}

void StepLedger::report(const pb::Branches::Origin& o) {
  if (o.step() > last_finished_)
    origins_.try_emplace(o.generation(), Origin{o.from(), o.step()});
  if (origins_.size() > kMostGenerations) origins_.erase(origins_.begin());
}

int64_t StepLedger::finisher(int64_t step) const {
  const auto f =
      std::find_if(first_steps_.rbegin(), first_steps_.rend(),
                   [&](auto& x) { return x.after == 0 && x.step <= step; });
  return f == first_steps_.rend() ? 0 : f->generation;
}

// A generation that continued from an older state makes steps once more. The
// other ranks of the one that finished a step report it later, too.
void StepLedger::redo(const pb::StepMetrics& m) {
  if (m.generation() <= finisher(m.step())) return;
  const auto [it, is_new] = redone_.emplace(m.step(), m);
  if (!is_new && it->second.generation() < m.generation()) it->second = m;
  if (redone_.size() > kMostRecent) redone_.erase(redone_.begin());
}

bool StepLedger::abandon_between(int64_t generation, int64_t step, int64_t next,
                                 pb::Branches* branches) {
  const int64_t first = last_finished_ + 1;
  if (first > step || generation <= 0 || generation + 1 >= next) return false;
  first_steps_.push_back(
      {.generation = next, .step = first, .after = generation});
  pb::Branches::Abandoned* a = branches->add_abandoned();
  a->set_generation(next);
  a->set_step(first);
  a->set_after(generation);
  return true;
}

std::vector<pb::StepMetrics> StepLedger::before(
    int64_t generation, int64_t step,
    const std::vector<CheckpointInfo>& checkpoints) const {
  const CheckpointInfo* newest = nullptr;
  for (const CheckpointInfo& c : checkpoints)
    if (c.step <= step && (newest == nullptr || c.step > newest->step) &&
        abandoned_by(first_steps_, c.generation, c.step) == 0)
      newest = &c;
  Steps known;
  const auto add = [&](const pb::StepMetrics& m) {
    if (m.step() <= step) known.insert_or_assign(m.step(), m);
  };
  if (newest != nullptr)
    for (const pb::StepMetrics& m : newest->recent) add(m);
  for (const pb::StepMetrics& m : recent_) add(m);
  for (const auto& [s, m] : redone_)
    if (const auto it = known.find(s);
        it == known.end() || it->second.generation() < m.generation())
      add(m);
  for (int64_t s = last_finished_ + 1; s <= step; ++s) {
    const pb::StepMetrics* m = find(generation, s);
    if (m == nullptr) break;
    add(*m);
  }
  std::vector<pb::StepMetrics> out;
  int64_t updates = 0;
  for (auto it = known.rbegin();
       it != known.rend() && updates < kRecentUpdates &&
       out.size() < kMostRecent;
       ++it) {
    if (!it->second.skipped()) ++updates;
    out.push_back(it->second);
  }
  std::ranges::reverse(out);
  return out;
}

void StepLedger::prove(const std::vector<CheckpointInfo>& checkpoints) {
  proven_.clear();
  for (const CheckpointInfo& c : checkpoints)
    for (const pb::StepMetrics& m : c.recent)
      if (m.step() > last_finished_)
        proven_[m.generation()].emplace(m.step(), m);
}

// The metrics of a step in the history of the generation. The generation made
// the step itself, unless it continued from a later one that was not finished.
// If that is not known, a checkpoint may show which earlier one made it.
const pb::StepMetrics* StepLedger::find(int64_t generation,
                                        int64_t step) const {
  const auto found = [step](const auto& by_generation, int64_t g) {
    const auto steps = by_generation.find(g);
    const pb::StepMetrics* none = nullptr;
    if (steps == by_generation.end()) return none;
    const auto m = steps->second.find(step);
    return m == steps->second.end() ? none : &m->second;
  };
  if (const auto* m = found(reported_, generation)) return m;
  if (const auto from = origins_.find(generation);
      from != origins_.end() && step <= from->second.step)
    if (const auto* m = find(from->second.generation, step)) return m;
  for (auto g = proven_.upper_bound(generation); g != proven_.begin();) {
    --g;
    if (const auto* m = found(proven_, g->first)) {
      const bool in_history = g->first == generation ||
                              abandoned_by(first_steps_, g->first, step) == 0;
      return in_history ? m : nullptr;
    }
    if (!g->second.empty() && g->second.begin()->first < step) break;
  }
  return nullptr;
}

StepLedger::Entry StepLedger::finish(const pb::StepMetrics& m) {
  Entry e{.metrics = m};
  if (m.step() > last_finished_ + 1) {
    e.gap_first = last_finished_ + 1;
    e.gap_last = m.step() - 1;
  }
  if (std::ranges::none_of(first_steps_, [&](auto& f) {
        return f.generation == m.generation() && f.after == 0;
      }))
    first_steps_.push_back({m.generation(), m.step()});
  last_finished_ = m.step();
  remember(m);
  return e;
}

StepLedger::Entries StepLedger::advance(int64_t generation, int64_t committed) {
  Entries out;
  const auto reported = reported_.find(generation);
  if (reported == reported_.end()) return out;
  Steps& steps = reported->second;
  while (!steps.empty() && steps.begin()->first <= committed) {
    const pb::StepMetrics m = std::move(steps.begin()->second);
    steps.erase(steps.begin());
    if (m.step() > last_finished_) out.push_back(finish(m));
  }
  return out;
}

StepLedger::Entries StepLedger::restore(int64_t generation, int64_t step) {
  Entries out;
  while (last_finished_ < step) {
    const pb::StepMetrics* m = find(generation, last_finished_ + 1);
    if (m == nullptr) {
      out.push_back({.gap_first = last_finished_ + 1, .gap_last = step});
      last_finished_ = step;
      return out;
    }
    out.push_back(finish(*m));
  }
  return out;
}

void StepLedger::forget_finished() {
  for (auto& [generation, steps] : reported_)
    steps.erase(steps.begin(), steps.upper_bound(last_finished_));
  std::erase_if(reported_, [](const auto& g) { return g.second.empty(); });
}

int64_t StepLedger::last_known(int64_t generation) const {
  int64_t known = last_finished_;
  while (find(generation, known + 1) != nullptr) ++known;
  return known;
}

}  // namespace remesh::core
