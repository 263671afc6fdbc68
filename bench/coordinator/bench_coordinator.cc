// bench_coordinator: what a large job costs the coordinator. The decisions of
// the real core (coordinator/core), for workers that do what they are told at
// once and report every elastic.report_every_ms, each with the ranks of eight
// slots, their steps and, when they have ended, the states that are left in
// memory. Without sockets and disks.
//
// Prints CPU time by the size of the job: of the first start, of an input (a
// report or a tick) while the job trains, and of a change that a lost worker
// causes; and the share of a core that training takes. Target: half a core is
// enough for the largest job.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "bench/options.h"
#include "bench/process_use.h"
#include "bench/targets.h"
#include "checkpoint/manifest/conversions.h"
#include "checkpoint/memory/replica_placement.h"
#include "coordinator/core/coordinator.h"
#include "coordinator/core/survival.h"
#include "coordinator/server/pace.h"
#include "parallel/geometry/sharding.h"
#include "parallel/jobfile/jobfile.h"
#include "proto/base/check.h"
#include "proto/base/exit_code.h"

namespace remesh::bench {
namespace {

constexpr int kSlots = 8;
constexpr int64_t kReportMs = 100;
constexpr int64_t kTickMs = 20;
constexpr int64_t kStepMs = 1000;
constexpr int64_t kMostMs = 120'000;  // of a start

Result<pb::Job> job_for(int workers) {
  const std::string toml = fmt::format(
      "[model]\nflavor = \"8b\"\nvocab_size = 32000\n[data]\npath = "
      "\"tokens\"\n"
      "[train]\nsteps = 1000000\nglobal_batch_size = {}\n"
      "[parallel]\ntensor_parallel_degree = 8\nzero_stage = 1\n"
      "[elastic]\nmin_slots = 8\nreport_every_ms = {}\n",
      workers * kSlots, kReportMs);
  ASSIGN_OR_RETURN(const pb::Job job, jobfile::parse_job(toml, {}));
  return jobfile::resolve(job, {.vocab_size = 32000});
}

class Cluster {
 public:
  Cluster(const pb::Job& job, int workers)
      : core_({.job = job, .run_id = 1, .secret = "bench"}),
        table_(geometry::ParamTable::make(jobfile::model_config(job))) {
    for (int i = 0; i < workers; ++i) {
      Worker& w = workers_.emplace_back();
      w.report.set_worker(fmt::format("worker-{:05}", i));
      w.report.set_incarnation(1);
      w.report.set_host(fmt::format("host-{:05}", i));
      w.report.set_slots(kSlots);
      w.report.set_cores(kSlots);
      w.report.set_memory_bytes(uint64_t{1} << 40);
      w.report.set_state_room(uint64_t{1} << 39);
      w.report.set_has_inventory(true);
      w.report.set_state(pb::Report::IDLE);
      by_name_[w.report.worker()] = i;
    }
    take(core_.start(now_));
  }

  pb::Durable::Phase phase() const { return core_.durable().phase(); }
  int ranks() const { return core_.durable().assignment().ranks_size(); }
  bool from_memory() const {
    return core_.durable().assignment().source().kind() == pb::Source::MEMORY;
  }
  int64_t finished() const { return finished_; }
  int64_t inputs() const { return inputs_; }
  void lose_last() {
    workers_.back().dead = true;
    take(core_.on(core::PeerLost{workers_.back().report.worker(), "lost"},
                  now_));
  }
  // CPU seconds of the core for that time, or until the phase is reached.
  double run(int64_t ms, pb::Durable::Phase until = pb::Durable::DONE) {
    double spent = 0;
    for (const int64_t end = now_ + ms; now_ < end && phase() != until;) {
      ++now_;
      std::vector<core::Input> inputs;
      for (size_t i = 0; i < workers_.size(); ++i)
        if (!workers_[i].dead &&
            static_cast<int64_t>(i) % kReportMs == now_ % kReportMs)
          inputs.emplace_back(message_of(i));
      if (now_ % kTickMs == 0)
        inputs.emplace_back(core::Tick{.synced_step = finished_});
      if (scan_) inputs.emplace_back(core::CheckpointsScanned{});
      scan_ = false;
      const double began = thread_cpu_s();
      std::vector<core::Action> all;
      const auto add = [&](std::vector<core::Action> actions) {
        std::move(actions.begin(), actions.end(), std::back_inserter(all));
      };
      for (const core::Input& input : inputs)
        add(std::holds_alternative<core::MessageReceived>(input)
                ? core_.take(input, now_)
                : core_.on(input, now_));
      // As the daemon does it. Of settle() only its CPU time passes.
      const int64_t now_ns = now_ * 1'000'000;
      if (pacer_.is_due(now_ns)) {
        const double settling = thread_cpu_s();
        add(core_.settle(now_));
        pacer_.done(now_ns +
                    static_cast<int64_t>((thread_cpu_s() - settling) * 1e9));
      }
      spent += thread_cpu_s() - began;
      inputs_ += static_cast<int64_t>(inputs.size());
      take(all);
    }
    return spent;
  }

 private:
  struct Worker {
    pb::Report report;
    int64_t began_ms = 0;
    int64_t step = 0;   // that its ranks have finished
    int64_t acked = 0;  // steps whose metrics it need not send any more
    bool dead = false;
  };

  core::MessageReceived message_of(size_t i) {
    core::MessageReceived out;
    *out.message.mutable_report() = report_of(i);
    return out;
  }
  const pb::Report& report_of(size_t i) {
    Worker& w = workers_[i];
    const bool runs = w.report.state() == pb::Report::RUNNING;
    w.report.set_seq(w.report.seq() + 1);
    w.report.clear_metrics();
    if (!runs && w.report.state() != pb::Report::QUIESCED) return w.report;
    if (runs) advance(w);
    const pb::Assignment& a = core_.durable().assignment();
    for (int64_t k = w.acked + 1; k <= w.step; ++k) {
      pb::StepMetrics* m = w.report.add_metrics();
      m->set_generation(w.report.generation());
      m->set_step(k);
      m->set_loss(1);
      m->set_grad_norm(1);
      m->set_lr(1e-4);
      m->set_tokens(tokens_of(k));
      m->set_tokens_per_s(1e6);
      m->set_step_s(1);
      *m->mutable_mesh() = a.mesh();
      m->set_time(static_cast<double>(k));
      m->set_flops_per_s(1e15);
      m->set_gemm_flops_per_s(2e15);
      m->set_exposed_comm(0.1);
      m->set_bubble(0);
    }
    return w.report;
  }

  // The ranks as they are now; what does not change is set in run_ranks().
  void advance(Worker& w) {
    w.step = core_.durable().assignment().source().step() +
             (now_ - w.began_ms) / kStepMs;
    for (pb::RankStatus& s : *w.report.mutable_ranks()) {
      s.set_progress(static_cast<uint64_t>(now_));
      s.set_operations(static_cast<uint64_t>(now_));
      s.set_committed_step(w.step);
      s.set_step(w.step + 1);
      s.mutable_at()->set_number(now_);
    }
  }

  static int64_t tokens_of(int64_t step) { return step * 1'000'000; }

  void run_ranks(Worker& w) {
    plan();
    w.report.set_state(pb::Report::RUNNING);
    w.report.set_busy(true);
    w.report.set_has_inventory(false);
    w.report.clear_holdings();
    w.began_ms = now_;
    for (const pb::RankPlace& p : core_.durable().assignment().ranks()) {
      if (p.worker() != w.report.worker()) continue;
      pb::RankStatus& s = *w.report.add_ranks();
      s.set_rank(p.rank());
      s.set_pid(10'000 + p.rank());
      s.set_phase(pb::RankStatus::COMPUTE);
      s.set_checkpoint_step(-1);
      s.set_os_state("R");
      s.set_rss_bytes(uint64_t{1} << 34);
      s.set_exposed_comm(0.1);
      s.set_bubble(0);
      pb::MemoryUse& m = *s.mutable_memory();
      m.set_weights(uint64_t{1} << 31);
      m.set_gradients(uint64_t{1} << 31);
      m.set_optimizer(uint64_t{1} << 32);
      m.set_activations(uint64_t{1} << 32);
      m.set_buffers(uint64_t{1} << 28);
      s.set_doing(
          "step 12, microbatch 3, forward, all_gather of 8.0 MiB on tensor "
          "(ranks 8 9 10 11 12 13 14 15)");
      pb::RankOperation& at = *s.mutable_at();
      at.set_name("all_gather");
      at.set_group("tensor");
      for (int r = 0; r < kSlots; ++r) at.add_ranks(r);
      at.set_bytes(8 << 20);
      at.set_seconds(1e-3);
    }
  }

  // The states of the generation's ranks, and where their replicas are.
  void plan() {
    const pb::Assignment& a = core_.durable().assignment();
    if (planned_ == a.generation()) return;
    planned_ = a.generation();
    replicas_ = core::replicas_of(a);
    const auto sharding = core::full_sharding_of(a);
    CHECK(sharding.ok());
    states_.clear();
    for (const pb::RankPlace& p : a.ranks()) {
      const auto shard = geometry::make_rank_shard(table_, *sharding, p.rank());
      CHECK(shard.ok());
      pb::StateHolding& h = states_.emplace_back();
      h.set_generation(planned_);
      h.set_rank(p.rank());
      *h.mutable_sharding() = manifest::sharding_info(*sharding);
      h.set_model(geometry::model_id(table_));
      h.set_elements(shard->zero.state_elements());
      h.set_segment(fmt::format("/dev/shm/remesh/g{}-{}", planned_, p.rank()));
    }
  }

  // Each state has the last two steps.
  void end_ranks(Worker& w) {
    if (w.report.state() == pb::Report::RUNNING) {
      advance(w);
      const auto add = [&](int rank, bool replica) {
        for (int64_t step = std::max<int64_t>(0, w.step - 1); step <= w.step;
             ++step) {
          pb::StateHolding& h = *w.report.add_holdings();
          h = states_[static_cast<size_t>(rank)];
          h.set_step(step);
          h.set_tokens(tokens_of(step));
          h.set_sequences(step);
          h.set_replica(replica);
          if (replica) h.set_segment(h.segment() + "-replica");
        }
      };
      for (const pb::RankStatus& s : w.report.ranks()) {
        add(s.rank(), false);
        for (const int owner : replicas_.kept[static_cast<size_t>(s.rank())])
          add(owner, true);
      }
    }
    w.report.set_state(pb::Report::QUIESCED);
    w.report.set_busy(false);
    w.report.set_has_inventory(true);
  }

  void take(const std::vector<core::Action>& actions) {
    for (const core::Action& a : actions) {
      if (const auto* d = std::get_if<core::SendDirective>(&a))
        follow(d->directive);
      else if (const auto* m = std::get_if<core::AppendMetrics>(&a))
        finished_ = m->metrics.step();
      else if (std::get_if<core::ScanCheckpoints>(&a) != nullptr)
        scan_ = true;
    }
  }

  void follow(const pb::Directive& d) {
    Worker& w = workers_[by_name_.at(d.worker())];
    w.report.set_coordinator_epoch(d.epoch());
    w.acked = std::max(w.acked, d.metrics_acked());
    switch (d.goal()) {
      case pb::Directive::PREPARE:
        w.report.set_generation(d.generation());
        w.report.set_state(pb::Report::PREPARED);
        w.report.clear_ranks();
        break;
      case pb::Directive::RUN:
        if (w.report.state() == pb::Report::PREPARED) run_ranks(w);
        break;
      case pb::Directive::ABORT:
      case pb::Directive::FINISH:
        end_ranks(w);
        break;
      default:
        break;
    }
  }

  core::Coordinator core_;
  std::vector<Worker> workers_;
  std::map<std::string, size_t> by_name_;
  const geometry::ParamTable table_;
  int64_t planned_ = 0;  // generation of the next two
  memory::ReplicaPlacement replicas_;
  std::vector<pb::StateHolding> states_;  // by rank, without a step
  int64_t now_ = 1000;
  int64_t finished_ = 0;
  int64_t inputs_ = 0;
  bool scan_ = false;
  server::ReconcilePacer pacer_;
};

int main_of(int argc, char** argv) {
  std::vector<int> sizes = {16, 128, 1024};
  int64_t ms = 2000;
  bool smoke = false;
  CLI::App app{"What a job of many workers costs the coordinator's core."};
  add_number(app, "--workers", sizes, "numbers of workers", 2, 8192);
  app.add_option("--ms", ms, "of training")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_flag("--smoke", smoke, "small sizes; targets are not judged");
  CLI11_PARSE(app, argc, argv);
  if (smoke) sizes = {2, 16};
  Targets targets(smoke);
  fmt::print("{:>8} {:>8} {:>12} {:>12} {:>12} {:>14}\n", "workers", "ranks",
             "start, ms", "us an input", "loss, ms", "share of a core");
  double largest_share = 0;
  for (const int workers : sizes) {
    const auto job = job_for(workers);
    if (!job.ok()) {
      fmt::print(stderr, "{}\n", job.status().message());
      return kExitFailed;
    }
    Cluster cluster(*job, workers);
    const double start_s = cluster.run(kMostMs, pb::Durable::RUNNING);
    targets.require(fmt::format("{} workers run", workers),
                    cluster.phase() == pb::Durable::RUNNING);
    cluster.run(kStepMs / 2);
    const int64_t inputs = cluster.inputs();
    const double cpu = cluster.run(ms);
    const double input_us =
        cpu / static_cast<double>(cluster.inputs() - inputs) * 1e6;
    const double share = cpu / static_cast<double>(ms) * 1e3;
    if (workers == *std::max_element(sizes.begin(), sizes.end()))
      largest_share = share;
    targets.require(fmt::format("{} workers make steps", workers),
                    cluster.finished() > 0);
    const int ranks = cluster.ranks();
    cluster.lose_last();
    double loss_s = cluster.run(kMostMs, pb::Durable::PREPARING);
    loss_s += cluster.run(kMostMs, pb::Durable::RUNNING);
    targets.require(
        fmt::format("{} workers run again", workers),
        cluster.phase() == pb::Durable::RUNNING && cluster.ranks() < ranks);
    targets.require(fmt::format("{} workers lose no step", workers),
                    cluster.from_memory());
    fmt::print("{:>8} {:>8} {:>12.1f} {:>12.1f} {:>12.1f} {:>14.3f}\n", workers,
               ranks, start_s * 1e3, input_us, loss_s * 1e3, share);
    std::fflush(stdout);
  }
  targets.at_most("share of a core, largest job", 0.5, largest_share);
  return targets.report();
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) { return remesh::bench::main_of(argc, argv); }
