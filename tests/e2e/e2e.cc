#include "tests/e2e/e2e.h"

#include <fmt/format.h>

#include "tests/testing/event_fields.h"

namespace remesh::e2e {

std::unique_ptr<testing::TinyData> E2e::data_;

void E2e::SetUpTestSuite() { data_ = std::make_unique<testing::TinyData>(); }

void E2e::TearDownTestSuite() { data_.reset(); }

void E2e::TearDown() { check_nothing_left(); }

Cluster& E2e::make(const Settings& job) {
  if (cluster_) check_nothing_left();
  cluster_ = std::make_unique<Cluster>(data_->path(), job);
  return *cluster_;
}

void E2e::check_nothing_left() {
  if (!cluster_) return;
  for (const Json& event : cluster_->events()) {
    std::vector<std::string> fields;
    for (const auto& [key, value] : event.items()) fields.push_back(key);
    EXPECT_EQ(undeclared_fields(event.value("event", ""), fields), "") << event;
  }
  if (!HasFailure())
    for (const std::string& left : cluster_->leftovers())
      ADD_FAILURE() << "left behind: " << left;
  if (HasFailure()) std::cerr << cluster_->describe();
  cluster_.reset();
}

void E2e::start_services(int workers, int64_t step) {
  c().start_coordinator();
  for (int i = 1; i <= workers; ++i)
    c().start_worker({.name = fmt::format("w{}", i)});
  ASSERT_TRUE(c().wait_for_step(step));
  ASSERT_TRUE(c().wait_for_dp(workers));
}

Finished E2e::expect_remesh(int code, const std::vector<std::string>& args,
                            int64_t timeout_ms) {
  Finished f = c().remesh(args, timeout_ms);
  EXPECT_EQ(f.exit.code, code) << f.output;
  return f;
}

void E2e::stop_in_order() {
  expect_remesh(0, {"stop", c().run_dir()});
  expect_exit(c().coordinator(), 0);
}

void E2e::stop_and_check() {
  stop_in_order();
  expect_sequence(c().last_step());
}

void E2e::interrupt() {
  c().run().kill(SIGINT);
  expect_exit(c().run(), 130);
}

void E2e::kill_coordinator(int signal) {
  c().coordinator().kill(signal);
  ASSERT_TRUE(c().coordinator().wait_ms(kEndMs));
}

void E2e::terminate_worker(const std::string& name) {
  c().worker(name).kill(SIGTERM);
  expect_exit(c().worker(name), 0);
}

void E2e::expect_exit(Process& process, int code, int64_t timeout_ms) {
  ASSERT_TRUE(process.wait_ms(timeout_ms)) << "still running";
  EXPECT_EQ(process.exit().signal, 0);
  EXPECT_EQ(process.exit().code, code) << testing::tail(process.output(), 10);
}

void E2e::expect_sequence(int64_t last) {
  const auto metrics = c().metrics();
  EXPECT_EQ(testing::sequence_error(metrics), "");
  EXPECT_EQ(static_cast<int64_t>(metrics.size()), last);
  EXPECT_GT(last, 0);
}

void E2e::expect_no_step_lost() {
  for (const Json& mesh : c().events_named("mesh"))
    EXPECT_EQ(lost_steps(mesh), 0) << mesh;
}

std::vector<std::string> E2e::undisturbed_lines(Settings job,
                                                int local_workers) {
  job["train.steps"] = std::to_string(c().last_step());
  make(job);
  expect_exit(c().start_run(local_workers), 0, 200'000);
  return c().metric_lines();
}

Settings endless(Settings more) {
  more.emplace("train.steps", "1000000");
  return more;
}

int64_t lost_steps(const Json& event) {
  return event.value("lost_steps", int64_t{-1});
}

std::vector<std::string> raw_losses(const std::vector<std::string>& lines) {
  std::vector<std::string> out;
  for (const std::string& line : lines)
    out.push_back(testing::raw_value(line, "loss"));
  return out;
}

}  // namespace remesh::e2e
