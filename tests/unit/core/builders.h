// Small reports and durable states for the tests of the core's values.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "coordinator/core/api.h"
#include "coordinator/core/cluster_view.h"
#include "coordinator/core/roster.h"
#include "parallel/geometry/param_table.h"
#include "proto/control.pb.h"
#include "tests/testing/llama.h"
#include "tests/testing/messages.h"
#include "tests/testing/text_message.h"

namespace remesh::core {

inline constexpr int64_t kSilentMs = 500;

// The actions of one kind.
template <typename A>
std::vector<A> all_of(const std::vector<Action>& actions) {
  std::vector<A> out;
  for (const Action& a : actions)
    if (const auto* x = std::get_if<A>(&a)) out.push_back(*x);
  return out;
}

inline pb::Cause cause(const std::string& text) {
  return text_message<pb::Cause>(text);
}

inline geometry::ParamTable small_model() {
  return geometry::ParamTable::make(
      geometry::llama(8, 2, 2, 1, 9, 17, /*tied=*/true));
}

inline pb::Job small_job() {
  return text_message<pb::Job>(R"(
      train { steps: 100 global_batch_size: 8 local_batch_size: 1 }
      elastic {
        join_window_ms: 1000 rejoin_wait_ms: 5000 max_same_failures: 3
      })");
}

inline void set_small_model(pb::Job* job) {
  merge_text(
      "dim: 64 n_layers: 2 n_heads: 4 n_kv_heads: 4 hidden_dim: 128 "
      "vocab_size: 257",
      job->mutable_model());
}

inline pb::Report report(const std::string& worker, uint64_t seq,
                         uint64_t incarnation = 1) {
  pb::Report r;
  r.set_worker(worker);
  r.set_incarnation(incarnation);
  r.set_seq(seq);
  r.set_host("host-" + worker);
  r.set_slots(1);
  r.set_cores(1);
  return r;
}

// Adds a rank that has committed `step`.
inline pb::RankStatus* add_rank(pb::Report* r, int rank, int64_t step = 0,
                                uint64_t progress = 0) {
  pb::RankStatus* s = r->add_ranks();
  s->set_rank(rank);
  s->set_phase(pb::RankStatus::STARTING);
  s->set_committed_step(step);
  s->set_progress(progress);
  return s;
}

// Generation 1 with one rank on each worker, in that phase.
inline pb::Durable running(const std::vector<std::string>& workers,
                           pb::Durable::Phase phase = pb::Durable::RUNNING) {
  pb::Durable d;
  d.set_phase(phase);
  d.set_generation(1);
  d.mutable_assignment()->set_generation(1);
  d.mutable_assignment()->mutable_mesh()->set_dp(
      static_cast<int>(workers.size()));
  for (const std::string& w : workers) {
    pb::Durable::Member* p = d.add_participants();
    p->set_name(w);
    p->set_incarnation(1);
    p->set_host("host-" + w);
    p->set_slots(1);
    pb::RankPlace* place = d.mutable_assignment()->add_ranks();
    place->set_rank(d.assignment().ranks_size() - 1);
    place->set_worker(w);
    d.mutable_assignment()->add_workers(w);
    d.mutable_assignment()->add_hosts("host-" + w);
  }
  return d;
}

// The report of a worker that runs one rank of generation 1.
inline pb::Report running_report(const std::string& worker, uint64_t seq,
                                 int rank, int64_t step,
                                 uint64_t progress = 0) {
  pb::Report r = report(worker, seq);
  r.set_generation(1);
  r.set_state(pb::Report::RUNNING);
  add_rank(&r, rank, step, progress);
  return r;
}

// A roster, the journal, and reports of workers in the order of the calls.
struct RosterFixture {
  Roster roster;
  pb::Durable durable;
  uint64_t seq = 0;

  void hear(pb::Report r, int64_t now_ms = 0) {
    r.set_seq(++seq);
    roster.on_report(r, durable, kSilentMs, now_ms);
  }
  void hear_on(const std::string& host, const std::string& worker) {
    pb::Report r = report(worker, 0);
    r.set_host(host);
    hear(r);
  }
  void hear_all(const std::vector<std::string>& workers, int64_t now_ms = 0) {
    for (const std::string& w : workers) hear(report(w, 0), now_ms);
  }
  ClusterView view(int64_t now_ms = 0) const {
    return {.roster = roster, .durable = durable, .now_ms = now_ms};
  }
};

}  // namespace remesh::core
