#include "worker/train/replication.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

#include "proto/base/check.h"

namespace remesh::train {

using memory::StateSegment;

namespace {

// Work per poll; small enough to stay in the cache between hash and copy.
constexpr int64_t kPieceBytes = int64_t{1} << 19;

// A path as a message of fixed size.
using PathMessage = std::array<char, 512>;

}  // namespace

Result<std::unique_ptr<Replication>> Replication::prepare(
    const geometry::ParamTable& table, const pb::RankSpec& spec, int rank,
    StateHome& home) {
  const pb::Elastic& e = spec.assignment().job().elastic();
  const geometry::Sharding& sharding = home.sharding();
  auto r = std::unique_ptr<Replication>(new Replication(table, rank, home));
  if (e.replicate_every() <= 0) return std::unique_ptr<Replication>();
  r->every_ = e.replicate_every();
  r->places_ = memory::places_of(spec.assignment());
  if (r->places_.size() != static_cast<size_t>(sharding.layout.world()))
    return invalid_argument("the assignment does not place every rank");
  std::vector<int> groups;
  for (size_t i = 0; i < r->places_.size(); ++i)
    groups.push_back(geometry::replica_group(sharding, static_cast<int>(i)));
  r->placement_ = memory::place_replicas(r->places_, groups,
                                         static_cast<int>(e.replicas()));
  const auto& kept = r->placement_.kept;
  if (std::all_of(kept.begin(), kept.end(),
                  [](const auto& k) { return k.empty(); }))
    return std::unique_ptr<Replication>();
  // Where room is short, others may not have reserved their own states yet.
  if (home.source() != nullptr && !home.roomy()) return r;
  Status s = r->take_segments(/*beside_source=*/true);
  if (!s.ok() && (home.source() == nullptr || s.code() != Code::kExhausted))
    return home.fail_allocation(std::move(s));
  return r;
}

// Never reuses a segment whose state a rank restores in place. Of other
// segments of the source, only the buffer without the source may be used
// (drop_old).
Status Replication::take_segments(bool beside_source) {
  kept_.clear();
  std::set<std::string> avoid, keep;
  if (const MemorySource* source = home_.source();
      source != nullptr && beside_source) {
    avoid = source->states().reused;
    keep = source->states().paths;
  }
  for (const int owner : placement_.kept[static_cast<size_t>(rank_)]) {
    ASSIGN_OR_RETURN(
        const geometry::RankShard shard,
        geometry::make_rank_shard(table_, home_.sharding(), owner));
    Kept k{.rank = owner, .elements = shard.zero.state_elements()};
    ASSIGN_OR_RETURN(k.segment, home_.segments().take(k.elements, avoid, keep));
    kept_.push_back(std::move(k));
  }
  if (lags()) {
    ASSIGN_OR_RETURN(
        own_copy_,
        home_.segments().take(
            static_cast<int64_t>(home_.current().weights.size()), avoid, keep));
  }
  taken_ = true;
  return ok_status();
}

// Invalidates all states in the segment but the initial state of this
// generation, which other ranks may still need.
void Replication::drop_old(StateSegment& segment) const {
  int source = -1;
  const auto states = segment.contents().states;
  for (const auto& c : states)
    if (home_.source() != nullptr &&
        c.info.step == home_.source()->states().step &&
        c.info.generation == home_.source()->states().generation)
      source = c.buffer;
  for (const int buffer : {0, 1})
    if (buffer != source) segment.begin(buffer);
}

// Maps the segments of the kept ranks that are on this host.
std::vector<bool> Replication::map_owners(comm::Comm& world) {
  const auto n = static_cast<size_t>(world.size());
  PathMessage mine{};
  const std::string& path = home_.segment().path();
  if (path.size() < mine.size())
    std::copy(path.begin(), path.end(), mine.begin());
  std::vector<PathMessage> all(n);
  world.all_gather(std::as_bytes(std::span(mine)),
                   std::as_writable_bytes(std::span(all)));
  const int64_t step = home_.committed().info.step;
  const int64_t generation = home_.committed().info.generation;
  std::vector<bool> mapped(kept_.size(), false);
  for (size_t i = 0; i < kept_.size(); ++i) {
    const auto owner = static_cast<size_t>(kept_[i].rank);
    if (places_[owner].host != places_[static_cast<size_t>(rank_)].host)
      continue;
    const char* const at = all[owner].data();
    auto segment =
        home_.segments().open(std::string(at, strnlen(at, all[owner].size())),
                              StateSegment::Mode::kRead);
    if (!segment.ok()) continue;
    // In containers the same path may be a different file.
    for (const auto& c : (*segment)->contents().states)
      if (c.info.rank == kept_[i].rank && c.info.step == step &&
          c.info.generation == generation)
        mapped[i] = true;
    if (mapped[i])
      mapped_.push_back(std::make_unique<exchange::MappedReplica>(
          kept_[i].rank, std::move(segment).value(), *kept_[i].segment,
          kept_[i].elements, kPieceBytes));
  }
  return mapped;
}

Status Replication::connect(comm::Comm& world) {
  if (!taken_)
    if (Status s = take_segments(/*beside_source=*/false); !s.ok())
      return home_.fail_allocation(std::move(s));
  for (Kept& k : kept_) drop_old(*k.segment);
  if (own_copy_ != nullptr) {
    drop_old(*own_copy_);
    local_ = std::make_unique<exchange::LocalReplica>(home_.segment(),
                                                      *own_copy_, kPieceBytes);
  }
  const std::vector<bool> mapped = map_owners(world);
  // All ranks learn which replicas are copied without a message.
  const auto n = static_cast<size_t>(world.size());
  std::vector<char> mine(n, 0);
  for (size_t i = 0; i < kept_.size(); ++i)
    if (mapped[i]) mine[static_cast<size_t>(kept_[i].rank)] = 1;
  std::vector<char> all(n * n);
  world.all_gather(std::as_bytes(std::span(mine)),
                   std::as_writable_bytes(std::span(all)));
  bool any = false;
  for (size_t keeper = 0; keeper < n; ++keeper)
    for (const int owner : placement_.kept[keeper])
      any = any || all[keeper * n + static_cast<size_t>(owner)] == 0;
  if (!any) return ok_status();
  comm_ = world.split(0, world.rank());
  std::vector<int> holders;
  for (const int h : placement_.holders[static_cast<size_t>(rank_)])
    if (all[static_cast<size_t>(h) * n + static_cast<size_t>(rank_)] == 0)
      holders.push_back(h);
  std::vector<exchange::KeptReplica> kept;
  for (size_t i = 0; i < kept_.size(); ++i)
    if (!mapped[i])
      kept.push_back({.rank = kept_[i].rank,
                      .elements = kept_[i].elements,
                      .segment = kept_[i].segment.get()});
  messages_ = std::make_unique<exchange::Replicator>(
      *comm_, home_.segment(), holders, kept,
      exchange::ReplicaOptions{.piece_bytes = kPieceBytes});
  return ok_status();
}

void Replication::start() {
  CHECK(done());
  const StateSegment::Committed& c = home_.committed();
  step_ = c.info.step;
  under_way_ = true;
  told_ = false;
  for (auto& m : mapped_) m->start(c.info.step, c.info.generation);
  if (messages_ != nullptr) messages_->start(c);
  if (local_ != nullptr) local_->start(c);
  (void)poll();
}

bool Replication::poll() {
  if (!under_way_) return true;
  bool all = messages_ == nullptr || messages_->poll();
  for (auto& m : mapped_) all = m->poll() && all;
  if (local_ != nullptr) all = local_->poll() && all;
  if (!all) return false;
  under_way_ = false;
  const bool complete = status().ok();
  failures_ = complete ? 0 : failures_ + 1;
  if (complete) done_step_ = step_;
  return true;
}

uint64_t Replication::moved() const {
  uint64_t n = messages_ != nullptr ? messages_->messages() : 0;
  for (const auto& m : mapped_) n += m->pieces();
  return n;
}

Status Replication::status() const {
  for (const auto& m : mapped_) RETURN_IF_ERROR(m->status());
  return messages_ != nullptr ? messages_->status() : ok_status();
}

Status Replication::lasting_failure() const {
  constexpr int kLasting = 3;
  if (under_way_ || failures_ < kLasting) return ok_status();
  return status().with_context(
      fmt::format("the replicas of {} steps in a row are damaged", failures_));
}

Status Replication::finish(const std::function<void()>& tick) {
  uint64_t before = moved();
  while (!poll()) {
    const uint64_t now = moved();
    if (now != before) tick();
    if (now == before) std::this_thread::yield();
    before = now;
  }
  return std::exchange(told_, true) ? ok_status() : status();
}

Status Replication::finish_newest(const std::function<void()>& tick) {
  // Of an older state it does not matter whether it succeeds.
  Status finished = finish(tick);
  if (step_ == home_.committed().info.step) return finished;
  start();
  return finish(tick);
}

uint64_t Replication::bytes() const {
  uint64_t n = own_copy_ != nullptr ? own_copy_->bytes() : 0;
  for (const Kept& k : kept_) n += k.segment->bytes();
  return n;
}

}  // namespace remesh::train
