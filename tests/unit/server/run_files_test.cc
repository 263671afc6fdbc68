// Two coordinators have the files of one run open: only one of them writes.
#include "coordinator/server/run_files.h"

#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "coordinator/rundir/lines.h"
#include "proto/rundir/paths.h"
#include "tests/testing/event_fields.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/text_message.h"

namespace remesh::server {
namespace {

namespace fs = std::filesystem;

class RunFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    log_ = Logger::open({.name = "test", .path = run_ + "/log"});
    open(older_);
  }

  void open(RunFiles& files) {
    ASSERT_OK_AND(files.lock, rundir::RunLock::acquire(run_));
    ASSERT_OK(files.open(run_, *log_));
  }
  void open_again(RunFiles& files) {
    files = RunFiles();
    open(files);
  }
  // The older one does not know that it has lost its lock.
  void start_newer() {
    fs::remove(rundir::lock_path(run_));
    open(newer_);
  }
  static pb::Durable state(uint64_t epoch, const std::string& more = "") {
    auto d = text_message<pb::Durable>(more);
    d.set_epoch(epoch);
    return d;
  }
  static pb::StepMetrics metrics(const std::string& text) {
    return text_message<pb::StepMetrics>(text);
  }
  static pb::EventRecord event(const std::string& text) {
    return text_message<pb::EventRecord>(text);
  }

  const TempDir dir_;
  const std::string run_ = dir_.path();
  std::shared_ptr<Logger> log_;
  RunFiles older_, newer_;
};

TEST_F(RunFilesTest, AFolderOfCheckpointsThatIsAwayPreventsNoRestart) {
  const TempDir disk;
  const std::string folder = disk.path() + "/checkpoints";
  pb::Durable before = state(1);
  before.mutable_job()->mutable_checkpoint()->set_folder(folder);
  testing::write_whole(folder, "no folder");
  EXPECT_FALSE(older_.claim(before.job(), *log_).ok()) << "a new run needs it";
  ASSERT_OK(older_.persist(before));
  open_again(older_);
  EXPECT_OK(older_.claim(before.job(), *log_));
  pb::Job other = before.job();
  other.mutable_checkpoint()->set_folder(folder + "/other");
  EXPECT_FALSE(older_.claim(other, *log_).ok())
      << "it was given for the resume";
}

// What it held back while the disk was full, before the newer one could write
// its epoch.
TEST_F(RunFilesTest, ACoordinatorThatLostTheLockWritesNoState) {
  ASSERT_OK(older_.persist(state(1)));
  start_newer();
  EXPECT_EQ(older_.persist(state(1)).code(), Code::kCancelled);
  EXPECT_OK(newer_.persist(state(2)));
}

// The coordinator was killed between the two.
TEST_F(RunFilesTest, AnEndThatOnlyTheJournalHasBecomesAnEvent) {
  ASSERT_OK(older_.persist(
      state(1, "phase: FAILED cause { what: 'nothing works' }")));
  ASSERT_FALSE(rundir::end_of_run(run_));
  open_again(older_);
  EXPECT_EQ(older_.check_not_ended().code(), Code::kEnded);
  const auto end = rundir::end_of_run(run_);
  ASSERT_TRUE(end);
  EXPECT_EQ(end->outcome, pb::JobStatus::FAILED);
  EXPECT_EQ(end->cause, "nothing works");
  const auto size = fs::file_size(rundir::events_path(run_));
  EXPECT_EQ(older_.check_not_ended().code(), Code::kEnded);
  EXPECT_EQ(fs::file_size(rundir::events_path(run_)), size) << "once";
  EXPECT_OK(older_.append(event("event: 'worker_left'")));
  EXPECT_TRUE(rundir::end_of_run(run_)) << "the last event is the end";
}

// The coordinator was killed before every worker had heard of the end.
TEST_F(RunFilesTest, NoAddressIsLeftOfARunThatHasEnded) {
  ASSERT_OK(older_.persist(state(1, "phase: DONE")));
  ASSERT_OK(older_.append(event("event: 'job_done'")));
  ASSERT_OK(rundir::write_endpoint(*older_.fs, run_, {.address = "tcp://h:1"}));
  open_again(older_);
  EXPECT_EQ(older_.check_not_ended().code(), Code::kEnded);
  EXPECT_FALSE(fs::exists(rundir::endpoint_path(run_)));
}

TEST_F(RunFilesTest, OnlyAnEndThatNobodyAskedForIsExplained) {
  ASSERT_OK(older_.append(metrics("step: 9 loss: 1")));
  pb::Durable d = state(1, "phase: STOPPED");
  for (const int64_t steps : {5, 20}) {
    const bool too_few = steps < 9;
    d.mutable_job()->mutable_train()->set_steps(steps);
    d.mutable_cause()->set_what(too_few ? "too few" : "stopped by request");
    ASSERT_OK(older_.persist(d));
    fs::resize_file(rundir::events_path(run_), 0);
    open_again(older_);
    EXPECT_EQ(older_.check_not_ended().code(), Code::kEnded);
    const auto end = rundir::end_of_run(run_);
    ASSERT_TRUE(end);
    EXPECT_EQ(end->outcome, pb::JobStatus::STOPPED);
    EXPECT_EQ(end->cause, too_few ? "too few" : "");
  }
}

// The journal was put back from a backup that was made after the end, and the
// job was resumed in between.
TEST_F(RunFilesTest, AnEndThatMetricsOrEventsGoBeyondIsNone) {
  ASSERT_OK(older_.persist(state(1, "phase: DONE generation: 1")));
  ASSERT_OK(older_.append(event("event: 'job_done' generation: 1")));
  open_again(older_);
  EXPECT_EQ(older_.check_not_ended().code(), Code::kEnded);
  ASSERT_OK(older_.append(event("event: 'mesh' generation: 2")));
  open_again(older_);
  EXPECT_OK(older_.check_not_ended());
  EXPECT_FALSE(rundir::end_of_run(run_)) << "no event was written";
  ASSERT_OK(
      older_.append(event("event: 'coordinator_restarted' generation: 0")));
  ASSERT_OK(older_.append(metrics("step: 1 loss: 1 generation: 2")));
  open_again(older_);
  EXPECT_OK(older_.check_not_ended());
  core::Options o;
  older_.tell(&o);
  EXPECT_EQ(o.recorded_generation, 2);
}

// The newer one has read the metrics before, and would plan without them.
TEST_F(RunFilesTest, LinesOfTheOlderCoordinatorEndTheNewerOne) {
  start_newer();
  ASSERT_OK(newer_.persist(state(2)));
  ASSERT_OK(older_.append(metrics("step: 1 generation: 1")));
  EXPECT_EQ(newer_.persist(state(2)).code(), Code::kCancelled);
}

TEST_F(RunFilesTest, WhatSomebodyRemovesIsWrittenAgain) {
  ASSERT_OK(older_.persist(state(1, "generation: 7")));
  for (const char* step : {"step: 1 generation: 7", "step: 2 generation: 7"})
    ASSERT_OK(older_.append(metrics(step)));
  rundir::LineTail tail(rundir::metrics_path(run_), /*from_end=*/false);
  EXPECT_EQ(tail.poll().size(), 2u);
  const auto check = [&] {
    ASSERT_OK(older_.check());
    ASSERT_OK(older_.check());
  };
  check();  // writes job.toml and coordinator.addr
  for (const std::string& path :
       {rundir::metrics_path(run_), rundir::events_path(run_),
        rundir::journal_path(run_), rundir::job_path(run_)})
    ASSERT_TRUE(fs::remove(path)) << path;
  ASSERT_OK(older_.check());
  EXPECT_FALSE(fs::exists(rundir::job_path(run_)))
      << "the rest may be removed just now";
  std::ofstream(rundir::metrics_path(run_)) << "of somebody else\n";
  ASSERT_OK(older_.check());
  ASSERT_OK(older_.append(metrics("step: 3")));
  ASSERT_OK(older_.syncer->sync_metrics());
  EXPECT_EQ(rundir::read_lines(rundir::metrics_path(run_)).size(), 3u);
  EXPECT_EQ(tail.poll().size(), 1u);
  EXPECT_EQ(rundir::read_lines(rundir::metrics_path(run_) + ".replaced"),
            std::vector<std::string>{"of somebody else"});
  EXPECT_TRUE(fs::exists(rundir::job_path(run_)));
  const auto events = rundir::read_lines(rundir::events_path(run_));
  ASSERT_EQ(events.size(), 2u);  // the first one is of those two
  EXPECT_NE(events[1].find("journal, metrics.jsonl, events.jsonl, job.toml"),
            std::string::npos)
      << events[1];
  for (const std::string& line : events)
    EXPECT_EQ(undeclared_fields(rundir::parse_event_line(line).value()), "");
  ASSERT_OK_AND(const pb::Durable found,
                read_journal(*older_.fs, rundir::journal_path(run_)));
  EXPECT_EQ(found.generation(), 7);
  ASSERT_OK(older_.check());
  EXPECT_EQ(rundir::read_lines(rundir::events_path(run_)).size(), 2u);
}

// As after a failed file system was mounted again: nothing can be written to
// the files that are open, and others are at their paths.
TEST_F(RunFilesTest, AFileSystemThatWasReplacedIsNotWaitedFor) {
  ASSERT_OK(older_.append(metrics("step: 1")));
  const pb::StepMetrics second = metrics("step: 2");
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit none{.rlim_cur = 0, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &none);
  const Status waits = older_.append(second);
  fs::remove(rundir::lock_path(run_));
  const Status ends = older_.append(second);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(waits.code(), Code::kIo) << waits.to_string();
  EXPECT_EQ(ends.code(), Code::kCancelled) << ends.to_string();
}

// Before the next look of the coordinator.
TEST_F(RunFilesTest, AStateIsWrittenToAJournalThatWasRemoved) {
  ASSERT_OK(older_.persist(state(1)));
  fs::remove(rundir::journal_path(run_));
  ASSERT_OK(older_.persist(state(2)));
  ASSERT_OK_AND(const pb::Durable found,
                read_journal(*older_.fs, rundir::journal_path(run_)));
  EXPECT_EQ(found.epoch(), 2u);
}

}  // namespace
}  // namespace remesh::server
