#include "worker/train/state_home.h"

#include <fmt/format.h>

#include <chrono>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "checkpoint/exchange/exchange.h"
#include "checkpoint/manifest/conversions.h"
#include "checkpoint/memory/replica_placement.h"
#include "proto/base/check.h"
#include "proto/base/exit_code.h"

namespace remesh::train {

using memory::StateSegment;

// Numbers hosts and workers in order of appearance, the same on every rank.
void MemorySource::read_assignment(const pb::Assignment& assignment) {
  std::map<std::string, int> hosts, workers;
  const auto number = [](std::map<std::string, int>& of, const std::string& s) {
    return of.try_emplace(s, static_cast<int>(of.size())).first->second;
  };
  for (const memory::RankHost& p : memory::places_of(assignment))
    processes_.push_back(
        {.host = number(hosts, p.host), .worker = number(workers, p.worker)});
  for (const pb::StateHolding& s : assignment.source().states()) {
    sources_.push_back({.rank = s.rank(),
                        .host = number(hosts, s.host()),
                        .worker = number(workers, s.worker())});
    files_.push_back(s.segment());
    states_.paths.insert(s.segment());
  }
}

Result<std::unique_ptr<MemorySource>> MemorySource::make(
    const geometry::ParamTable& table, const pb::Assignment& assignment,
    const geometry::Sharding& to, int rank, const Segments& segments) {
  auto source = std::unique_ptr<MemorySource>(new MemorySource());
  MemorySource& m = *source;
  m.read_assignment(assignment);
  if (m.sources_.empty())
    return invalid_argument("the source in memory lists no state");
  const pb::StateHolding& first = assignment.source().states(0);
  ASSIGN_OR_RETURN(m.from_, manifest::parse_sharding(first.sharding()));
  m.model_ = geometry::model_id(table);
  m.states_.step = assignment.source().step();
  m.states_.generation = first.generation();
  m.tokens_ = first.tokens();
  ASSIGN_OR_RETURN(m.plan_, exchange::plan_exchange(table, m.from_, m.sources_,
                                                    to, m.processes_, rank));
  for (const int a : m.plan_.reuses)
    if (a >= 0) m.states_.reused.insert(m.files_[static_cast<size_t>(a)]);
  if (m.plan_.reuse >= 0) {
    m.reused_ = m.files_[static_cast<size_t>(m.plan_.reuse)];
    m.reused_rank_ = m.sources_[static_cast<size_t>(m.plan_.reuse)].rank;
  }
  RETURN_IF_ERROR(m.open_sources(table, segments));
  return source;
}

Result<StateSegment::Committed> MemorySource::find(const StateSegment& segment,
                                                   int rank) const {
  for (const auto& c : segment.contents().states)
    if (c.info.step == states_.step &&
        c.info.generation == states_.generation && c.info.rank == rank &&
        c.info.sharding == from_ && c.info.model == model_)
      return c;
  return not_found(fmt::format(
      "{}: has no state of this model for step {} of generation {}, rank {} of "
      "{}",
      segment.path(), states_.step, states_.generation, rank,
      from_.layout.to_string()));
}

// Opens and verifies the states that this rank reads.
Status MemorySource::open_sources(const geometry::ParamTable& table,
                                  const Segments& all) {
  std::set<int> read;
  for (const exchange::Copy& c : plan_.local) read.insert(c.source);
  for (const exchange::Stream& s : plan_.send)
    for (const exchange::Copy& c : s.copies) read.insert(c.source);
  views_.resize(sources_.size());
  for (const int i : read) {
    const auto at = static_cast<size_t>(i);
    ASSIGN_OR_RETURN(auto segment,
                     all.open(files_[at], StateSegment::Mode::kRead));
    const int rank = sources_[at].rank;
    ASSIGN_OR_RETURN(const auto c, find(*segment, rank));
    ASSIGN_OR_RETURN(const geometry::RankShard shard,
                     geometry::make_rank_shard(table, from_, rank));
    if (shard.zero.state_elements() != c.info.elements)
      return corrupt(fmt::format("{}: {} elements of rank {}, expected {}",
                                 files_[at], c.info.elements, rank,
                                 shard.zero.state_elements()));
    RETURN_IF_ERROR(segment->verify_content(c));
    views_[at] = segment->read(c.buffer, c.info.elements);
    opened_.push_back(std::move(segment));
  }
  return ok_status();
}

Status MemorySource::run(comm::Comm& world, const geometry::StateView& target,
                         const std::function<void()>& tick) {
  return exchange::run_exchange(world, plan_, views_, target, ok_status(),
                                {.tick = tick});
}

StateHome::StateHome(const geometry::ParamTable& table,
                     const pb::RankSpec& spec, int rank,
                     const std::function<void()>& tick)
    : table_(table),
      spec_(spec),
      rank_(rank),
      model_(geometry::model_id(table)),
      tick_(tick),
      segments_(spec.state_folder(), spec.state_job(), tick) {}

Status StateHome::reserve(const geometry::Sharding& sharding,
                          int64_t elements) {
  CHECK(segment_ == nullptr);
  sharding_ = sharding;
  elements_ = elements;
  const pb::Assignment& a = spec_.assignment();
  std::set<std::string> kept;
  if (a.source().kind() == pb::Source::MEMORY) {
    auto source = MemorySource::make(table_, a, sharding, rank_, segments_);
    if (!source.ok()) return fail(kExitBadSource, source.status());
    source_ = std::move(source).value();
    kept = source_->states().paths;
    set_position(source_->states().step, source_->tokens());
    roomy_ = has_room_for_all();
    if (!source_->reused().empty()) {
      Status reused = reuse();
      if (reused.code() == Code::kExhausted)
        return fail_allocation(std::move(reused));
      if (!reused.ok()) return fail(kExitBadSource, std::move(reused));
      return ok_status();
    }
  }
  auto taken = roomy_ ? segments_.take(elements, kept, kept)
                      : segments_.take_beside(elements, source_->states());
  if (!taken.ok()) return fail_allocation(taken.status());
  segment_ = std::move(taken).value();
  whole_ = roomy_;
  return ok_status();
}

// Beside what is there. Otherwise a rank that is fast would take what others
// need.
bool StateHome::has_room_for_all() const {
  const pb::Elastic& e = spec_.assignment().job().elastic();
  const bool replicates = e.replicate_every() > 0;
  const auto segments = static_cast<uint64_t>(
      1 + (replicates ? e.replicas() : 0) + (e.replicate_every() > 1 ? 1 : 0));
  const auto places = memory::places_of(spec_.assignment());
  uint64_t bytes = 0;
  for (size_t r = 0; r < places.size(); ++r) {
    if (places[r].host != places[static_cast<size_t>(rank_)].host) continue;
    const auto shard =
        geometry::make_rank_shard(table_, sharding_, static_cast<int>(r));
    if (!shard.ok()) return false;
    bytes += segments * memory::segment_bytes(shard->zero.state_elements());
  }
  return segments_.check_room(bytes).ok();
}

Status StateHome::complete() {
  if (whole_) return ok_status();
  Status s = segment_->complete(tick_);
  if (s.code() == Code::kExhausted) {
    segments_.sweep({}, &source_->states());
    s = segment_->complete(tick_);
  }
  if (!s.ok()) return fail_allocation(std::move(s));
  whole_ = true;
  return ok_status();
}

Status StateHome::fail_allocation(Status status) {
  const ExitCode code = status.code() == Code::kExhausted ? kExitNoRoom
                        : status.code() == Code::kDenied  ? kExitFailed
                                                          : kExitInternal;
  return fail(code, std::move(status));
}

Status StateHome::reuse() {
  // The previous owner is dead, but the kernel may not have released its lock
  // yet.
  constexpr int kTries = 100;
  auto opened = segments_.open(source_->reused(), StateSegment::Mode::kWrite);
  for (int i = 0; i < kTries && !opened.ok() &&
                  opened.status().code() == Code::kUnavailable;
       ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    opened = segments_.open(source_->reused(), StateSegment::Mode::kWrite);
  }
  // What a generation that did not begin has allocated may be in the way.
  if (!opened.ok() && opened.status().code() == Code::kExhausted &&
      segments_.sweep(source_->states().paths) > 0)
    opened = segments_.open(source_->reused(), StateSegment::Mode::kWrite);
  if (!opened.ok()) return opened.status();
  segment_ = std::move(opened).value();
  ASSIGN_OR_RETURN(const auto c,
                   source_->find(*segment_, source_->reused_rank()));
  if (c.info.elements != elements_)
    return corrupt(segment_->path() +
                   ": does not have the size of this rank's state");
  RETURN_IF_ERROR(segment_->verify_content(c));
  committed_ = c;
  buffer_ = c.buffer;
  return ok_status();
}

engine::StateView StateHome::begin() {
  begun_ = committed_ ? 1 - buffer_ : 0;
  segment_->begin(begun_);
  return segment_->write(begun_, elements_);
}

void StateHome::commit(int64_t step) {
  CHECK(begun_ >= 0);
  committed_ = segment_->commit(info(step));
  buffer_ = std::exchange(begun_, -1);
}

memory::StateInfo StateHome::info(int64_t step) const {
  const pb::Train& t = spec_.assignment().job().train();
  return {.step = step,
          .generation = spec_.assignment().generation(),
          .rank = rank_,
          .sharding = sharding_,
          .model = model_,
          .elements = elements_,
          .tokens = first_tokens_ +
                    (step - first_step_) * t.global_batch_size() * t.seq_len(),
          .sequences = spec_.assignment().job().data().sequence_offset() +
                       step * t.global_batch_size()};
}

Status StateHome::restore(comm::Comm& world,
                          const std::function<void()>& tick) {
  const bool reuses = !source_->reused().empty();
  geometry::StateView target;
  if (!reuses) target = begin();
  RETURN_IF_ERROR(source_->run(world, target, tick));
  if (reuses)
    committed_ =
        segment_->redescribe(*committed_, info(source_->states().step));
  else
    commit(source_->states().step);
  source_->release();
  return ok_status();
}

}  // namespace remesh::train
