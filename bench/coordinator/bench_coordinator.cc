// bench_coordinator: what a large job costs the coordinator. The decisions of
// the real core (coordinator/core), for workers that do what they are told at
// once and report every elastic.report_every_ms, each with the ranks of eight
// slots. Without sockets and disks.
//
// Prints CPU time by the size of the job: of the first start, of an input (a
// report or a tick) while the job trains, and of a change that a lost worker
// causes; and the share of a core that training takes. Target: half a core is
// enough for the largest job.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <iterator>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "bench/cpu_time.h"
#include "bench/targets.h"
#include "coordinator/core/coordinator.h"
#include "coordinator/server/pace.h"
#include "parallel/jobfile/jobfile.h"
#include "proto/base/exit_code.h"

namespace remesh::bench {
namespace {

constexpr int kSlots = 8;
constexpr int64_t kReportMs = 100;
constexpr int64_t kTickMs = 20;
constexpr int64_t kStepMs = 1000;

Result<pb::Job> job_for(int workers) {
  const std::string toml = fmt::format(
      "[model]\nflavor = \"8b\"\nvocab_size = 32000\n[data]\npath = "
      "\"tokens\"\n"
      "[train]\nsteps = 1000000\nglobal_batch_size = {}\n"
      "[parallel]\ntensor_parallel_degree = 8\n"
      "[elastic]\nmin_slots = 8\nreport_every_ms = {}\n",
      workers * kSlots, kReportMs);
  ASSIGN_OR_RETURN(const pb::Job job, jobfile::parse_job(toml, {}));
  return jobfile::resolve(job, {.vocab_size = 32000});
}

class Cluster {
 public:
  Cluster(const pb::Job& job, int workers)
      : core_({.job = job, .run_id = 1, .secret = "bench"}) {
    for (int i = 0; i < workers; ++i) {
      Worker& w = workers_.emplace_back();
      w.report.set_worker(fmt::format("worker-{:05}", i));
      w.report.set_incarnation(1);
      w.report.set_host(fmt::format("host-{:05}", i));
      w.report.set_slots(kSlots);
      w.report.set_cores(kSlots);
      w.report.set_memory_bytes(uint64_t{1} << 40);
      w.report.set_state_room(uint64_t{1} << 39);
      w.report.set_state_room_total(uint64_t{1} << 39);
      w.report.set_has_inventory(true);
      w.report.set_state(pb::Report::IDLE);
      by_name_[w.report.worker()] = i;
    }
    take(core_.start(now_));
  }

  pb::Durable::Phase phase() const { return core_.durable().phase(); }
  int ranks() const { return core_.durable().assignment().ranks_size(); }
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
          inputs.emplace_back(core::ReportReceived{report_of(i), ""});
      if (now_ % kTickMs == 0) inputs.emplace_back(core::Tick{});
      if (scan_) inputs.emplace_back(core::CheckpointsScanned{});
      scan_ = false;
      const double began = thread_cpu_s();
      std::vector<core::Action> all;
      const auto add = [&](std::vector<core::Action> actions) {
        std::move(actions.begin(), actions.end(), std::back_inserter(all));
      };
      for (const core::Input& input : inputs)
        add(std::holds_alternative<core::ReportReceived>(input)
                ? core_.take(input, now_)
                : core_.on(input, now_));
      // As the daemon does it. Of a look only its CPU time passes.
      const int64_t now_ns = now_ * 1'000'000;
      if (looks_.is_due(now_ns)) {
        const double looked = thread_cpu_s();
        add(core_.settle(now_));
        looks_.done(now_ns +
                    static_cast<int64_t>((thread_cpu_s() - looked) * 1e9));
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
    bool dead = false;
  };

  pb::Report report_of(size_t i) {
    Worker& w = workers_[i];
    w.report.set_seq(w.report.seq() + 1);
    w.report.clear_metrics();
    if (w.report.state() != pb::Report::RUNNING) return w.report;
    const int64_t step = (now_ - w.began_ms) / kStepMs;
    for (pb::RankStatus& s : *w.report.mutable_ranks()) {
      s.set_progress(static_cast<uint64_t>(now_));
      s.set_committed_step(step);
      s.set_step(step + 1);
    }
    for (int64_t k = finished_ + 1; i == 0 && k <= step; ++k) {
      pb::StepMetrics* m = w.report.add_metrics();
      m->set_generation(w.report.generation());
      m->set_step(k);
      m->set_loss(1);
      m->set_step_s(1);
    }
    return w.report;
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
    switch (d.goal()) {
      case pb::Directive::PREPARE:
        w.report.set_generation(d.generation());
        w.report.set_state(pb::Report::PREPARED);
        w.report.clear_ranks();
        break;
      case pb::Directive::RUN:
        if (w.report.state() != pb::Report::PREPARED) break;
        w.report.set_state(pb::Report::RUNNING);
        w.began_ms = now_;
        for (const pb::RankPlace& p : core_.durable().assignment().ranks())
          if (p.worker() == d.worker())
            w.report.add_ranks()->set_rank(p.rank());
        break;
      case pb::Directive::ABORT:
      case pb::Directive::FINISH:
        w.report.set_state(pb::Report::QUIESCED);
        break;
      default:
        break;
    }
  }

  core::Coordinator core_;
  std::vector<Worker> workers_;
  std::map<std::string, size_t> by_name_;
  int64_t now_ = 1000;
  int64_t finished_ = 0;
  int64_t inputs_ = 0;
  bool scan_ = false;
  server::Looks looks_;
};

int main_of(int argc, char** argv) {
  std::vector<int> sizes = {16, 128, 1024};
  int64_t ms = 2000;
  bool smoke = false;
  CLI::App app{"What a job of many workers costs the coordinator's core."};
  app.add_option("--workers", sizes, "numbers of workers")
      ->capture_default_str();
  app.add_option("--ms", ms, "of training")->capture_default_str();
  app.add_flag("--smoke", smoke, "small sizes; targets are not judged");
  CLI11_PARSE(app, argc, argv);
  if (smoke) sizes = {2, 16};
  Targets targets(smoke);
  fmt::print("{:>8} {:>8} {:>12} {:>12} {:>12} {:>14}\n", "workers", "ranks",
             "start, ms", "us an input", "loss, ms", "share of a core");
  double share = 0;
  for (const int workers : sizes) {
    const auto job = job_for(workers);
    if (!job.ok()) {
      fmt::print(stderr, "{}\n", job.status().message());
      return kExitFailed;
    }
    Cluster cluster(*job, workers);
    const double start_s = cluster.run(30'000, pb::Durable::RUNNING);
    targets.require(fmt::format("{} workers run", workers),
                    cluster.phase() == pb::Durable::RUNNING);
    cluster.run(kStepMs / 2);
    const int64_t inputs = cluster.inputs();
    const double cpu = cluster.run(ms);
    const double input_us =
        cpu / static_cast<double>(cluster.inputs() - inputs) * 1e6;
    share = cpu / static_cast<double>(ms) * 1e3;
    targets.require(fmt::format("{} workers make steps", workers),
                    cluster.finished() > 0);
    const int ranks = cluster.ranks();
    cluster.lose_last();
    double loss_s = cluster.run(1000, pb::Durable::PREPARING);
    loss_s += cluster.run(30'000, pb::Durable::RUNNING);
    targets.require(
        fmt::format("{} workers run again", workers),
        cluster.phase() == pb::Durable::RUNNING && cluster.ranks() < ranks);
    fmt::print("{:>8} {:>8} {:>12.1f} {:>12.1f} {:>12.1f} {:>14.3f}\n", workers,
               ranks, start_s * 1e3, input_us, loss_s * 1e3, share);
    std::fflush(stdout);
  }
  targets.at_most("share of a core, largest job", 0.5, share);
  return targets.report();
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) { return remesh::bench::main_of(argc, argv); }
