#include "worker/train/memory_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "checkpoint/exchange/exchange.h"
#include "checkpoint/manifest/sharding.h"

namespace remesh::train {

using memory::StateSegment;

// Numbers hosts and workers in order of appearance, the same on every rank.
void MemorySource::read_facts(const pb::Assignment& assignment) {
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
    paths_.insert(s.segment());
  }
}

Result<std::unique_ptr<MemorySource>> MemorySource::make(
    const geometry::ParamTable& table, const pb::Assignment& assignment,
    const geometry::Sharding& to, int rank, const Segments& segments) {
  auto source = std::unique_ptr<MemorySource>(new MemorySource());
  MemorySource& m = *source;
  m.read_facts(assignment);
  if (m.sources_.empty())
    return invalid_argument("the source in memory lists no state");
  const pb::StateHolding& first = assignment.source().states(0);
  ASSIGN_OR_RETURN(m.from_, manifest::parse_sharding(first.sharding()));
  m.model_ = geometry::model_id(table);
  m.step_ = assignment.source().step();
  m.generation_ = first.generation();
  m.tokens_ = first.tokens();
  ASSIGN_OR_RETURN(m.plan_, exchange::plan_exchange(table, m.from_, m.sources_,
                                                    to, m.processes_, rank));
  for (const int a : m.plan_.reuses)
    if (a >= 0) m.reused_paths_.insert(m.files_[static_cast<size_t>(a)]);
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
    if (c.info.step == step_ && c.info.generation == generation_ &&
        c.info.rank == rank && c.info.sharding == from_ &&
        c.info.model == model_)
      return c;
  return not_found(fmt::format(
      "{}: has no state of this model for step {} of generation {}, rank {} of "
      "{}",
      segment.path(), step_, generation_, rank, from_.layout.to_string()));
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

}  // namespace remesh::train
