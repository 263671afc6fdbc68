// Base of the end-to-end tests: one data set per test program, one cluster of
// real processes per test, and a check after each test that nothing is left.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/testing/cluster.h"

namespace remesh::e2e {

using testing::Cluster;
using testing::Exit;
using testing::Finished;
using testing::Json;
using testing::Process;
using testing::Settings;

constexpr int64_t kEndMs = 60'000;  // time for a run to exit

class E2e : public ::testing::Test {
 protected:
  static void SetUpTestSuite();
  static void TearDownTestSuite();
  void TearDown() override;

  // The test's cluster; a second call checks and replaces it.
  Cluster& make(const Settings& job = {});
  Cluster& c() { return *cluster_; }
  static const std::string& data_path() { return data_->path(); }

  // Coordinator and workers w1, w2, ... as services, training past `step`.
  void start_services(int workers, int64_t step = 3);
  // `remesh ARGS...` must exit with that code.
  Finished expect_remesh(int code, const std::vector<std::string>& args,
                         int64_t timeout_ms = 60'000);
  // `remesh stop`; all daemons must exit with code 0.
  void stop_in_order();
  // The same, and every step must occur once and in order.
  void stop_and_check();
  // Ctrl-C: `remesh run` must exit with code 130.
  void interrupt();
  void kill_coordinator(int signal = SIGKILL);
  // SIGTERM: the worker leaves and must exit with code 0.
  void terminate_worker(const std::string& name);
  // The process must exit by itself with that code.
  void expect_exit(Process& process, int code, int64_t timeout_ms = kEndMs);
  // Steps 1 .. last must occur once each and in order.
  void expect_sequence(int64_t last);
  // Every mesh must have continued from the last finished step.
  void expect_no_step_lost();
  // The lines of metrics.jsonl of the same job on local workers, undisturbed,
  // for as many steps as the test's cluster has finished, which it replaces.
  std::vector<std::string> undisturbed_lines(Settings job, int local_workers);

 private:
  void check_nothing_left();
  static std::unique_ptr<testing::TinyData> data_;
  std::unique_ptr<Cluster> cluster_;
};

// A job that trains until it is stopped.
Settings endless(Settings more = {});
int64_t lost_steps(const Json& event);
// step -> the loss as written in these lines of metrics.jsonl.
std::vector<std::string> raw_losses(const std::vector<std::string>& lines);

}  // namespace remesh::e2e
