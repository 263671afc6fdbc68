// Runs real remesh-worker processes with a minimal coordinator over ZeroMQ and
// MPI ranks that do not train.
#pragma once

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "proto/base/child.h"
#include "proto/base/clock.h"
#include "proto/wire/channel.h"
#include "tests/testing/expect.h"
#include "tests/testing/process.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/agent_shell/num_entries.h"
#include "worker/agent/shell/process_control.h"
#include "worker/agent/shell/scratch.h"

namespace remesh::agent {

// Sends directives and relays fences. Makes no decisions.
class TinyCoordinator {
 public:
  explicit TinyCoordinator(uint64_t epoch = 1,
                           const std::string& at = "tcp://127.0.0.1:0")
      : epoch_(epoch),
        server_(std::move(wire::Server::bind(at, std::nullopt)).value()) {}

  const std::string& address() const { return server_->address(); }
  pb::Report& report(const std::string& worker) { return reports_[worker]; }
  size_t num_workers() const { return reports_.size(); }
  int fences() const { return num_fences_; }
  // The state job of later directives; 0: no states are kept.
  void set_state_job(uint64_t job) { state_job_ = job; }

  // How long later directives say that it waits for a silent worker.
  void set_dead_after_ms(int64_t ms) { dead_after_ms_ = ms; }

  // The goal of later directives to all workers.
  void want(pb::Directive::Goal goal, const pb::Assignment& assignment) {
    goal_ = goal;
    assignment_ = assignment;
    tell_all();
  }

  // Runs until `done`; false on a timeout of `ms`.
  template <typename F>
  bool run_until(F&& done, int ms = 120000) {
    const int64_t end = monotonic_ms() + ms;
    while (!done()) {
      if (monotonic_ms() > end) return false;
      pollfd p{server_->fd(), POLLIN, 0};
      poll(&p, 1, 20);
      while (auto m = server_->receive()) on(*m);
      if (monotonic_ms() - told_ms_ > 50) tell_all();
    }
    return true;
  }
  // Runs until all workers are in that state of the generation.
  bool reach(const std::set<std::string>& workers, pb::Report::State state,
             int64_t generation, int ms = 120000) {
    return run_until(
        [&] {
          for (const std::string& w : workers)
            if (reports_[w].state() != state ||
                reports_[w].generation() != generation)
              return false;
          return true;
        },
        ms);
  }

 private:
  void on(const wire::Received& m) {
    if (m.envelope.has_report()) {
      const pb::Report& r = m.envelope.report();
      peers_[r.worker()] = m.peer;
      reports_[r.worker()] = r;
    } else if (m.envelope.has_fence_in()) {
      on_fence(m.envelope.fence_in());
    }
  }
  void on_fence(const pb::FenceIn& f) {
    auto& blobs = fences_[{f.generation(), f.index()}];
    blobs[f.worker()] = f.blob();
    std::set<std::string> with_ranks;
    for (const auto& r : assignment_.ranks()) with_ranks.insert(r.worker());
    if (blobs.size() != with_ranks.size()) return;
    // Workers repeat theirs until they have the answer.
    if (complete_.insert({f.generation(), f.index()}).second) ++num_fences_;
    pb::Envelope e;
    auto* out = e.mutable_fence_out();
    out->set_epoch(epoch_);
    out->set_generation(f.generation());
    out->set_index(f.index());
    for (const auto& [worker, blob] : blobs) out->mutable_blob()->append(blob);
    for (const auto& w : with_ranks) server_->send(peers_[w], e);
  }
  void tell_all() {
    told_ms_ = monotonic_ms();
    for (const auto& [worker, r] : reports_) {
      pb::Envelope e;
      e.set_job("test");
      auto* d = e.mutable_directive();
      d->set_epoch(epoch_);
      d->set_seq(++seq_);
      d->set_worker(worker);
      d->set_incarnation(r.incarnation());
      d->set_generation(assignment_.generation());
      d->set_goal(goal_);
      if (assignment_.ranks_size() > 0) *d->mutable_assignment() = assignment_;
      d->set_report_every_ms(50);
      d->set_job("test");
      d->set_run_dir(assignment_.run_dir());
      d->set_state_job(state_job_);
      d->set_dead_after_ms(dead_after_ms_);
      server_->send(peers_[worker], e);
    }
  }

  uint64_t epoch_;
  std::unique_ptr<wire::Server> server_;
  uint64_t seq_ = 0;
  uint64_t state_job_ = 0;
  int64_t dead_after_ms_ = 2000;
  int64_t told_ms_ = 0;
  int num_fences_ = 0;
  std::set<std::pair<int64_t, int64_t>> complete_;
  pb::Directive::Goal goal_ = pb::Directive::IDLE;
  pb::Assignment assignment_;
  std::map<std::string, wire::PeerId> peers_;
  std::map<std::string, pb::Report> reports_;
  std::map<std::pair<int64_t, int64_t>, std::map<std::string, std::string>>
      fences_;
};

class WorkerTest : public ::testing::Test {
 protected:
  void TearDown() override {
    for (auto& [name, pid] : pids_) stop(name, SIGKILL);
    // Workers killed by a test leave the clean-up to the next worker.
    std::error_code ignored;
    for (const auto& e :
         std::filesystem::directory_iterator(scratch(), ignored))
      std::filesystem::remove_all(state_folder_of(e.path().string()), ignored);
    (void)Scratch::open(scratch(), "sweeper");
    EXPECT_EQ(num_entries(scratch()), 0);
  }
  bool has_shared(const std::string& name) const {
    return std::filesystem::exists(shared_root_of(scratch() + "/" + name));
  }
  std::string scratch() const { return dir_ / "scratch"; }
  std::string states_of(const std::string& name) const {
    return state_folder_of(scratch() + "/" + name);
  }

  pid_t start(const std::string& connect, const std::string& name,
              std::vector<std::string> more = {}) {
    ChildOptions c;
    c.argv = {REMESH_WORKER, "--connect", connect,     "--slots", "2",
              "--trainer",   TEST_RANK,   "--scratch", scratch(), "--no-auth"};
    if (!name.empty()) c.argv.insert(c.argv.end(), {"--name", name});
    c.argv.insert(c.argv.end(), more.begin(), more.end());
    c.env = {"PATH=/usr/bin:/bin", "OMPI_MCA_btl=nonsense",
             "PMIX_RANK=77"};  // must not reach the ranks
    c.env.insert(c.env.end(), env_.begin(), env_.end());
    for (const char* key : {"ASAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"})
      if (const char* v = getenv(key))
        c.env.push_back(std::string(key) + "=" + v);
    c.output = dir_ / ("worker-" + name + ".out");
    auto child = start_child(c);
    EXPECT_OK(child);
    close(child->pidfd);
    return pids_[name] = child->pid;
  }
  // Starts a worker, of which the coordinator has then heard.
  void join(TinyCoordinator& c, const std::string& name) {
    const size_t before = c.num_workers();
    start(c.address(), name);
    ASSERT_TRUE(c.run_until([&] { return c.num_workers() == before + 1; }));
  }
  // Whether it ends with code 0 by itself.
  bool leaves(TinyCoordinator& c, const std::string& name) {
    return c.run_until([&] {
      return read_proc_stat(pids_[name])->state == 'Z';
    }) && wait(name) == 0;
  }
  // Exit code, or 128 + signal; -1 if it did not end.
  int wait(const std::string& name, int ms = 60000) {
    const int64_t end = monotonic_ms() + ms;
    int status = 0;
    while (waitpid(pids_[name], &status, WNOHANG) == 0) {
      if (monotonic_ms() > end) return -1;
      usleep(2000);
    }
    pids_[name] = 0;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }
  int stop(const std::string& name, int signal) {
    if (pids_[name] == 0) return -1;
    testing::send_signal(pids_[name], signal);
    return wait(name);
  }
  // Whether that text comes up in its output; lines are written by a thread.
  bool says(const std::string& name, const std::string& text) const {
    const int64_t until = monotonic_ms() + 60000;
    while (output(name).find(text) == std::string::npos) {
      if (monotonic_ms() > until) return false;
      usleep(10'000);
    }
    return true;
  }
  std::string output(const std::string& name) const {
    std::ifstream in(dir_ / ("worker-" + name + ".out"));
    return {std::istreambuf_iterator<char>(in), {}};
  }

  pb::Assignment assignment(const std::vector<std::string>& workers,
                            int ranks_each, const std::string& script) {
    pb::Assignment a;
    a.set_generation(++generation_);
    a.set_run_dir(dir_ / "run");
    // The coordinator has made it; a worker does not.
    std::filesystem::create_directories(a.run_dir());
    a.mutable_job()->mutable_job()->set_name("test");
    a.mutable_job()->mutable_job()->set_description(script);
    int rank = 0;
    for (const std::string& w : workers) {
      a.add_workers(w);
      a.add_hosts("here");
      for (int i = 0; i < ranks_each; ++i) {
        auto* p = a.add_ranks();
        p->set_rank(rank++);
        p->set_worker(w);
        p->set_threads(1);
      }
    }
    a.mutable_mesh()->set_dp(rank);
    return a;
  }
  // Prepares and runs; returns the milliseconds until a step was committed
  // everywhere.
  int64_t run_generation(TinyCoordinator& c, const pb::Assignment& a) {
    const std::set<std::string> w(a.workers().begin(), a.workers().end());
    c.want(pb::Directive::PREPARE, a);
    EXPECT_TRUE(c.reach(w, pb::Report::PREPARED, a.generation()));
    const int64_t start = monotonic_ms();
    c.want(pb::Directive::RUN, a);
    EXPECT_TRUE(c.run_until([&] {
      for (const std::string& name : w) {
        if (c.report(name).ranks_size() == 0) return false;
        for (const auto& r : c.report(name).ranks())
          if (r.committed_step() < 1) return false;
      }
      return true;
    })) << output("a");
    return monotonic_ms() - start;
  }

  TempDir dir_;
  std::vector<std::string> env_;  // of workers started later, too
  int64_t generation_ = 0;
  std::map<std::string, pid_t> pids_;
};

}  // namespace remesh::agent
