#include "tests/sim/hostile.h"

#include <limits>

#include "proto/base/rng.h"
#include "proto/limits/plausible.h"
#include "proto/rundir/events.h"
#include "proto/wire/protocol.h"
#include "tests/sim/cluster.h"
#include "tests/sim/parts.h"
#include "tests/testing/messages.h"

namespace remesh::sim {
namespace {

using Rng = std::mt19937_64;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

int64_t any_of(Rng& rng, std::initializer_list<int64_t> values) {
  return values.begin()[rng() % values.size()];
}

// A number of any size that no correct process would send.
int64_t wild(Rng& rng) {
  return any_of(rng, {-1, std::numeric_limits<int64_t>::min(), kHuge, kHuge - 1,
                      int64_t{1} << 62, limits::kMaxNumber + 1});
}

int wild_int(Rng& rng) {
  return static_cast<int>(
      any_of(rng, {-1, std::numeric_limits<int>::min(),
                   std::numeric_limits<int>::max(), 2'000'000'000, -46341}));
}

// A real message with a few bytes changed that still parses.
template <typename Message>
Message mutated(Rng& rng, const Message& real) {
  std::string bytes = real.SerializeAsString();
  for (uint64_t n = 1 + rng() % 6; n > 0 && !bytes.empty(); --n) {
    const size_t at = rng() % bytes.size();
    if (rng() % 4 == 0)
      bytes.insert(at, bytes.substr(rng() % bytes.size(), rng() % 32));
    else if (rng() % 4 == 0)
      bytes.erase(at, rng() % 4);
    else
      bytes[at] ^= static_cast<char>(1 << (rng() % 8));
  }
  Message out;
  return out.ParseFromString(bytes) ? out : real;
}

void add_wild_holding(Rng& rng, pb::Report* r) {
  pb::StateHolding* h = r->add_holdings();
  pb::Mesh* m = h->mutable_sharding()->mutable_mesh();
  switch (rng() % 4) {
    case 0:  // whose number of ranks does not fit into 32 bits
      m->set_dp(46341);
      m->set_tp(2);
      m->set_cp(46341);
      break;
    case 1:
      m->set_pp(wild_int(rng));
      break;
    case 2:
      h->set_rank(wild_int(rng));
      break;
    default:
      h->set_step(wild(rng));
  }
}

// One field with a value that is refused whatever the other fields are.
void spoil(Rng& rng, const Overheard& o, pb::Report* r) {
  switch (rng() % 14) {
    case 0:
      return r->set_slots(wild_int(rng));
    case 1:
      return r->set_cores(wild_int(rng));
    case 2:
      return r->set_generation(wild(rng));
    case 3:
      return r->set_generation(o.generation + limits::kMaxGenerationLead + 1);
    case 4:
      return r->set_coordinator_epoch(static_cast<uint64_t>(wild(rng)));
    case 5:
      return r->set_coordinator_epoch(~uint64_t{1});
    case 6:
      return r->set_host("\x1b]0;owned\x07");
    case 7:
      return r->set_worker(rng() % 2 == 0 ? "" : "../../etc");
    case 8:
      return r->set_worker(std::string(3 << 10, 'w'));
    case 9:
      return r->add_ranks()->set_rank(wild_int(rng));
    case 10:
      if (rng() % 64 == 0)
        while (r->metrics_size() <= limits::kMaxMetrics) r->add_metrics();
      r->set_slots(static_cast<int>(rng() % 8));
      while (r->ranks_size() <= r->slots()) r->add_ranks();
      return;
    case 11:
      r->add_metrics()->set_step(1);
      return r->mutable_metrics(r->metrics_size() - 1)->set_step_s(kNan);
    case 12:
      return r->set_incarnation(~uint64_t{0} - rng() % 1000);
    default:
      return add_wild_holding(rng, r);
  }
}

// Every field is well-formed and in range, but the content is impossible: a
// number that no coordinator has used, or a checkpoint of a step that the rank
// has not made.
pb::Report well_formed_report(Rng& rng, const Overheard& o) {
  const uint64_t kind = rng() % 4;
  const auto up_to = [&](int64_t most) {
    return static_cast<int64_t>(rng() % static_cast<uint64_t>(most)) + 1;
  };
  pb::Report r;
  r.set_worker("stranger-" + std::to_string(rng() % 100));
  r.set_incarnation(uint64_t{1} << 40);
  if (!o.alive.empty() && rng() % 2 == 0) {
    const auto& life = o.alive[rng() % o.alive.size()];
    r.set_worker(life.worker);
    r.set_incarnation(life.incarnation + (kind == 3 ? rng() % 2 : 1));
  }
  r.set_seq(rng());
  r.set_host("h" + std::to_string(rng() % 4));
  r.set_host_id(hash64(r.host()));  // as the workers there
  r.set_slots(static_cast<int>(rng() % 4));
  r.set_cores(2);
  r.set_generation(o.generation);
  r.set_coordinator_epoch(o.epoch);
  r.set_state(static_cast<pb::Report::State>(rng() % 4));
  if (rng() % 2 == 0) r.set_proof(rng());
  wire::set_protocol({}, &r);
  r.set_has_inventory(rng() % 2 == 0);
  for (uint64_t n = rng() % 3; n > 0; --n) {
    pb::StateHolding* h = r.add_holdings();
    h->set_generation(up_to(o.generation + 1) - 1);
    h->set_step(up_to(1000));
    h->set_rank(static_cast<int>(rng() % 4));
    h->set_elements(64);
  }
  if (kind == 0 || kind == 2) r.set_generation(o.generation + up_to(900'000));
  if (kind == 1 || kind == 2) r.set_coordinator_epoch(o.epoch + up_to(1 << 30));
  if (kind == 3) {
    r.set_slots(1);
    pb::RankStatus* s = r.add_ranks();
    s->set_rank(static_cast<int>(rng() % 2));
    s->set_committed_step(up_to(1000));
    s->set_checkpoint_step(s->committed_step() + 1 + up_to(1'000'000));
    r.set_state(pb::Report::RUNNING);
  }
  return r;
}

pb::Report hostile_report(Rng& rng, const Overheard& o) {
  if (o.epoch > 0 && rng() % 3 == 0) return well_formed_report(rng, o);
  pb::Report r = rng() % 2 == 0 ? mutated(rng, o.report) : o.report;
  r.set_seq(rng());
  if (!o.alive.empty() && rng() % 2 == 0) {
    const auto& life = o.alive[rng() % o.alive.size()];
    r.set_worker(life.worker);
    if (rng() % 2 == 0) {  // of an older incarnation
      r.set_incarnation(life.incarnation - 1 - rng() % life.incarnation);
      if (rng() % 2 == 0) spoil(rng, o, &r);
      return r;
    }
    r.set_incarnation(life.incarnation + rng() % 2);
  } else {
    r.set_worker("stranger");
  }
  spoil(rng, o, &r);
  return r;
}

pb::FenceIn hostile_fence(Rng& rng, const Overheard& o) {
  pb::FenceIn f;
  f.set_generation(rng() % 2 == 0 ? o.generation : wild(rng));
  f.set_index(static_cast<int64_t>(rng() % 3));
  f.set_blob(std::string(rng() % 64, 'b'));
  f.set_worker("stranger");
  if (o.alive.empty()) return f;
  const auto& life = o.alive[rng() % o.alive.size()];
  f.set_worker(life.worker);
  f.set_incarnation(life.incarnation - 1);
  if (rng() % 2 == 0) return f;
  f.set_incarnation(life.incarnation);
  if (rng() % 64 == 0)
    f.set_blob(std::string(limits::kMaxFenceBytes * 8, 'b'));
  else
    f.set_index(rng() % 2 == 0 ? 3 : wild(rng));
  return f;
}

pb::Command hostile_command(Rng& rng) {
  pb::Command c;
  c.set_id(rng());
  switch (rng() % 5) {
    case 0:
      c.set_kind(pb::Command::STATUS);
      break;
    case 1:
      c.set_kind(pb::Command::DRAIN);
      c.set_worker(std::string(rng() % 4096, '\x1b'));
      break;
    case 2:
      c.set_kind(pb::Command::MESH);
      c.set_layout("dp65536,pp65536,tp65536,cp65536");
      break;
    case 3:
      c.set_kind(pb::Command::SCALE);
      c.set_slots(wild_int(rng) | std::numeric_limits<int>::min());
      break;
    default:
      c.set_kind(pb::Command::UNKNOWN);
  }
  return c;
}

void spoil(Rng& rng, pb::Directive* d) {
  pb::Assignment* a = d->mutable_assignment();
  switch (rng() % 6) {
    case 0:
      return d->set_epoch(limits::kMaxNumber + 1 + rng() % 1000);
    case 1:
      return d->set_generation(wild(rng));
    case 2:
      return d->set_metrics_acked(wild(rng));
    case 3:
      return a->add_ranks()->set_rank(wild_int(rng));
    case 4:
      return a->set_run_dir("/run/\x1b[2J");
    default:
      a->mutable_mesh()->set_dp(wild_int(rng));
      a->mutable_mesh()->set_tp(1 << 20);
      a->mutable_mesh()->set_pp(2);
  }
}

}  // namespace

core::Input hostile_input(Rng& rng, const Overheard& o) {
  switch (rng() % 8) {
    case 0:
      return core::received(hostile_fence(rng, o));
    case 1:
      return core::CommandReceived{kHostileClient, hostile_command(rng)};
    default:
      return core::received(hostile_report(rng, o));
  }
}

agent::Event hostile_event(Rng& rng, const std::string& worker,
                           uint64_t incarnation, const Overheard& o) {
  if (rng() % 4 == 0) {
    pb::FenceOut f;
    f.set_generation(rng() % 2 == 0 ? o.generation : wild(rng));
    f.set_index(rng() % 2 == 0 ? 3 : wild(rng));
    f.set_blob(std::string(rng() % 64, 'b'));
    return agent::FenceOutReceived{f};
  }
  pb::Directive d = mutated(rng, o.directive);
  d.set_worker(worker);
  d.set_goal(pb::Directive::SHUTDOWN);
  if (rng() % 2 == 0) {  // for an older incarnation, or for another worker
    const bool stranger = rng() % 2 == 0;
    if (stranger) d.set_worker("stranger");
    d.set_incarnation(stranger ? incarnation : incarnation - 1);
    d.set_epoch(o.epoch);
    d.set_seq(~uint64_t{0});
    d.set_generation(o.generation);
    return agent::DirectiveReceived{d};
  }
  d.set_incarnation(incarnation);
  d.set_epoch(o.epoch + rng() % 2);
  d.set_seq(~uint64_t{0});
  d.set_generation(o.generation);
  spoil(rng, &d);
  return agent::DirectiveReceived{d};
}

bool answers_hostile(const core::Action& action) {
  if (const auto* e = std::get_if<core::EmitEvent>(&action))
    return e->record.event() == events::kReportRefused.name;
  if (const auto* r = std::get_if<core::Respond>(&action))
    return r->client == kHostileClient;
  return std::holds_alternative<core::Refuse>(action);
}

// ------------------------------------------------------------- the cluster

void Cluster::attack_coordinator() {
  for (int i = 0; i < hostile_; ++i) {
    if (!coordinator_ || coordinator_->ended() || done_) return;
    overheard_.alive.clear();
    for (const auto& [name, w] : workers_)
      if (considers_live(*w))
        overheard_.alive.push_back({name, w->incarnation});
    overheard_.generation = coordinator_->durable().generation();
    overheard_.epoch = coordinator_->durable().epoch();
    core::Input input = hostile_input(hostile_rng_, overheard_);
    if (options_.calm)
      input = waits_to_settle(input) ? core::Input(core::MessageReceived{})
                                     : core::Input(core::Tick{});
    ++stats_.hostile;
    drive_coordinator(input);
  }
}

void Cluster::attack_worker(Worker& w) {
  const uint64_t life = w.incarnation;
  for (int i = 0; i < hostile_; ++i) {
    overheard_.generation = w.agent->generation();
    overheard_.epoch = w.epoch_seen;
    agent::Event event = hostile_event(hostile_rng_, w.name, life, overheard_);
    if (options_.calm) event = agent::DirectiveReceived{};
    ++stats_.hostile;
    drive_worker(w, event);
    if (!w.agent || w.incarnation != life) return;
  }
}

}  // namespace remesh::sim
