#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <span>
#include <thread>

#include "checkpoint/manifest/manifest.h"
#include "checkpoint/memory/segment.h"
#include "checkpoint/memory/segment_directory.h"
#include "coordinator/rundir/claim_folder.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/line_file.h"
#include "coordinator/rundir/lines.h"
#include "coordinator/rundir/newest_state.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/base/clock.h"
#include "proto/base/keyed_hash.h"
#include "proto/base/process.h"
#include "proto/base/rng.h"
#include "proto/base/text.h"
#include "proto/base/xxh3.h"
#include "proto/data/index.h"
#include "proto/rundir/events.h"
#include "proto/rundir/run_id.h"
#include "tests/testing/expect.h"
#include "tests/testing/hooked_file_system.h"
#include "tests/testing/resolved_job.h"
#include "tests/testing/seed.h"
#include "tests/testing/temp_dir.h"
#include "tests/testing/text_message.h"

namespace remesh::rundir {
namespace {

namespace fs = std::filesystem;

class RunDirTest : public testing::Test {
 protected:
  static void put(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
  }
  static std::string get(const std::string& path) {
    return read_file(path).value();
  }
  static pb::StepMetrics metrics(int64_t step) {
    pb::StepMetrics m;
    m.set_step(step);
    m.set_loss(2.0 / 3);
    m.mutable_mesh()->set_dp(2);
    return m;
  }
  static bool valid(std::string_view line) {
    return parse_metrics_line(line).ok();
  }

  const TempDir temp_;
  const std::string dir_ = temp_.path();
  const std::unique_ptr<FileSystem> fs_ = posix_file_system();
};

TEST_F(RunDirTest, MetricsKeepEveryBitOfADouble) {
  pb::StepMetrics m = metrics(7);
  merge_text("grad_norm: 0.1 lr: 1e-300 tokens: 123456789012345 skipped: true",
             &m);
  m.set_val_loss(std::nextafter(1.0, 2.0));
  const std::string line = metrics_line(m);
  EXPECT_EQ(
      line.substr(0, 75),
      R"({"step":7,"loss":0.66666666666666663,"grad_norm":0.10000000000000001,"lr":1)");
  ASSERT_OK_AND(const auto back, parse_metrics_line(line));
  EXPECT_EQ(back.loss(), m.loss());
  EXPECT_EQ(back.lr(), m.lr());
  EXPECT_EQ(back.val_loss(), m.val_loss());
  EXPECT_TRUE(back.skipped());
  EXPECT_FALSE(valid(R"({"step":7,"loss":1,"skipped":1})"));
  EXPECT_EQ(back.tokens(), m.tokens());
  EXPECT_EQ(back.mesh().dp(), 2);
  EXPECT_FALSE(
      parse_metrics_line(metrics_line(metrics(1))).value().has_val_loss());
}

TEST_F(RunDirTest, OnlyMeasuredFieldsOfAStepAreWritten) {
  pb::StepMetrics m = metrics(7);
  EXPECT_LACKS(metrics_line(m), "gemm_efficiency");
  EXPECT_LACKS(metrics_line(m), "bubble");
  merge_text(
      "flops_per_s: 3e11 gemm_flops_per_s: 4e11 exposed_comm: 0.125 bubble: 0",
      &m);
  EXPECT_HAS(metrics_line(m), R"("gemm_efficiency":0.75)");
  EXPECT_LACKS(metrics_line(m), "mfu");
  m.set_mfu(0.375);
  EXPECT_HAS(metrics_line(m), R"("mfu":0.375,)");
  ASSERT_OK_AND(const auto back, parse_metrics_line(metrics_line(m)));
  EXPECT_EQ(metrics_line(back), metrics_line(m));
}

TEST_F(RunDirTest, EventNamesAreUniqueAndUnknownOnesAreNotices) {
  std::set<std::string> names;
  for (const events::EventKind& kind : events::event_kinds()) {
    EXPECT_TRUE(names.insert(kind.name).second) << kind.name;
    EXPECT_FALSE(kind.meaning.empty()) << kind.name;
  }
  EXPECT_EQ(events::tone_of("failure"), events::Tone::kBad);
  EXPECT_EQ(events::tone_of("from_a_newer_version"), events::Tone::kNotice);
}

TEST_F(RunDirTest, AnEventHasThePreviousMesh) {
  const auto e = text_message<pb::EventRecord>(
      "event: 'mesh' mesh { tp: 2 } from { dp: 2 cp: 4 }");
  ASSERT_OK_AND(const auto back, parse_event_line(event_line(e)));
  EXPECT_EQ(back.mesh().tp(), 2);
  EXPECT_EQ(back.from().dp(), 2);
  EXPECT_EQ(back.from().cp(), 4);
}

TEST_F(RunDirTest, ALogLineHasTheFieldsOfAnEvent) {
  const auto e = text_message<pb::EventRecord>(
      "time: 1.5 event: 'failure' generation: 3 cause: 'killed by signal 9' "
      "seconds: 0.25 mesh { dp: 2 } digest: 15 last_log: ['one', 'two']");
  std::set<std::string> fields;
  for (const Kv& kv : event_fields(e))
    fields.insert(std::string(kv.key) + "=" + kv.value);
  EXPECT_EQ(fields,
            (std::set<std::string>{
                "generation=3", "cause=killed by signal 9", "seconds=0.25",
                "mesh=dp2", "digest=000000000000000f", "last_log=one, two"}));
}

TEST_F(RunDirTest, DigestsKeepAllTheirBits) {
  for (const uint64_t digest :
       {uint64_t{0}, uint64_t{1} << 63 | 1, ~uint64_t{0}}) {
    pb::StepMetrics m = metrics(1);
    m.set_digest(digest);
    ASSERT_OK_AND(const auto back, parse_metrics_line(metrics_line(m)));
    EXPECT_TRUE(back.has_digest());
    EXPECT_EQ(back.digest(), digest);
    pb::EventRecord e;
    e.set_event("training");
    e.set_digest(digest);
    ASSERT_OK_AND(const auto event, parse_event_line(event_line(e)));
    EXPECT_EQ(event.digest(), digest);
  }
  EXPECT_FALSE(parse_metrics_line(metrics_line(metrics(1)))->has_digest());
  for (const char* bad : {"12x", "", "1ffffffffffffffff"})
    EXPECT_FALSE(parse_metrics_line(std::string(R"({"step":1,"loss":1,)") +
                                    R"("digest":")" + bad + R"("})")
                     .ok())
        << bad;
}

TEST_F(RunDirTest, AFailureKeepsItsDetails) {
  auto e = text_message<pb::EventRecord>(
      "event: 'failure' host: 'node7' signal: 9 exit_code: 0 "
      "doing: 'step 12, microbatch 3' last_log: 'one' "
      "flight_record: 'traces/flight.jsonl'");
  e.add_last_log("two \xff");
  ASSERT_OK_AND(const auto back, parse_event_line(event_line(e)));
  EXPECT_EQ(event_line(back), event_line(e));
  EXPECT_EQ(back.host(), "node7");
  EXPECT_EQ(back.signal(), 9);
  EXPECT_TRUE(back.has_exit_code());
  EXPECT_EQ(back.doing(), "step 12, microbatch 3");
  ASSERT_EQ(back.last_log_size(), 2);
  EXPECT_EQ(back.last_log(0), "one");
  EXPECT_EQ(back.flight_record(), "traces/flight.jsonl");
  EXPECT_FALSE(parse_event_line(R"({"event":"x","last_log":[1]})").ok());
}

TEST_F(RunDirTest, NonFiniteNumbersBecomeNull) {
  pb::StepMetrics m = metrics(1);
  m.set_loss(std::numeric_limits<double>::infinity());
  EXPECT_HAS(metrics_line(m), R"("loss":null)");
  EXPECT_TRUE(std::isnan(parse_metrics_line(metrics_line(m)).value().loss()));
}

TEST_F(RunDirTest, EventsWithBrokenTextAreStillJson) {
  pb::EventRecord e;
  e.set_event("failure");
  e.set_cause("last words: \xff\xfe \"quoted\"\n");
  e.set_rank(0);
  const auto back = parse_event_line(event_line(e));
  ASSERT_OK(back) << event_line(e);
  EXPECT_TRUE(back.value().has_rank());
  EXPECT_FALSE(back.value().has_seconds());
}

TEST_F(RunDirTest, ATornTailIsCutOff) {
  const std::string path = dir_ + "/m.jsonl";
  const std::string whole =
      metrics_line(metrics(1)) + "\n" + metrics_line(metrics(2)) + "\n";
  const std::string third = metrics_line(metrics(3)) + "\n";
  // Whatever part of the next line made it to the disk, also as zeros.
  for (size_t n = 0; n < third.size(); n += 5) {
    for (const std::string& torn : {third.substr(0, n), std::string(n, '\0'),
                                    std::string(n, '\0') + "\n"}) {
      put(path, whole + torn);
      ASSERT_OK_AND(const auto file, LineFile::open(path, valid));
      EXPECT_EQ(file->last_line(), metrics_line(metrics(2)));
      EXPECT_EQ(file->cut_bytes(), torn.size());
      ASSERT_OK(file->append(third));
      EXPECT_EQ(get(path), whole + third);
    }
  }
}

TEST_F(RunDirTest, AFileOfOneTornLineBecomesEmpty) {
  const std::string path = dir_ + "/m.jsonl";
  put(path, "{\"step\":1");
  ASSERT_OK_AND(const auto file, LineFile::open(path, valid));
  EXPECT_EQ(file->last_line(), "");
  EXPECT_EQ(get(path), "");
}

TEST_F(RunDirTest, MuchDamageAfterAValidLineIsKeptInAnotherFile) {
  const std::string path = dir_ + "/m.jsonl";
  const std::string good = metrics_line(metrics(1)) + "\n";
  for (const size_t bytes :
       {LineFile::kMaxCutBytes + 1, 5 * LineFile::kMaxCutBytes}) {
    const std::string bad(bytes, 'x');
    put(path, good + bad);
    ASSERT_OK_AND(const auto file, LineFile::open(path, valid));
    EXPECT_EQ(get(path), good);
    EXPECT_EQ(get(path + ".damaged"), bad);
    EXPECT_EQ(file->last_line() + "\n", good);
  }
}

// Another member of the group that owns the run may put a link there.
TEST_F(RunDirTest, DamagedLinesAreNotKeptThroughSymbolicLinks) {
  const std::string path = dir_ + "/m.jsonl", mine = dir_ + "/mine";
  put(mine, "kept");
  std::filesystem::create_symlink(mine, path + ".damaged");
  const std::string bad(LineFile::kMaxCutBytes + 1, 'x');
  put(path, metrics_line(metrics(1)) + "\n" + bad);
  ASSERT_OK(LineFile::open(path, valid));
  EXPECT_EQ(get(mine), "kept");
  EXPECT_EQ(get(path + ".damaged"), bad);
}

TEST_F(RunDirTest, AValidLineMayBeLongerThanAnyTornTail) {
  const std::string path = dir_ + "/m.jsonl";
  const std::string good = "{\"step\":1,\"loss\":2,\"more\":\"" +
                           std::string(3 * LineFile::kMaxCutBytes, 'x') +
                           "\"}\n";
  put(path, good + "torn");
  const auto file = LineFile::open(path, valid);
  ASSERT_OK(file);
  EXPECT_EQ(get(path), good);
}

TEST_F(RunDirTest, MuchDamageWithoutAValidLineIsNotATornTail) {
  const std::string path = dir_ + "/m.jsonl";
  const std::string text(5 * LineFile::kMaxCutBytes, 'x');
  put(path, text);
  const auto file = LineFile::open(path, valid);
  EXPECT_EQ(file.status().code(), Code::kCorrupt);
  EXPECT_EQ(get(path), text) << "it must be left as it is";
}

TEST_F(RunDirTest, ALineOfAnEventIsBounded) {
  for (const char c : {'x', '"', '\\', '\x1b', '\xff'}) {
    pb::EventRecord e;
    const std::string text(1 << 20, c);
    for (auto* field :
         {e.mutable_event(), e.mutable_worker(), e.mutable_cause(),
          e.mutable_source(), e.mutable_detail(), e.mutable_host(),
          e.mutable_doing(), e.mutable_flight_record()})
      *field = text;
    for (int i = 0; i < 100; ++i) e.add_last_log(text);
    const std::string line = event_line(e);
    EXPECT_LE(line.size(), kMaxEventBytes);
    EXPECT_OK(parse_event_line(line));
  }
}

TEST_F(RunDirTest, ATailHasCompleteLinesOnly) {
  const std::string path = dir_ + "/e.jsonl";
  LineTail tail(path, /*from_end=*/true);
  EXPECT_TRUE(tail.poll().empty());
  put(path, "one\ntw");
  EXPECT_EQ(tail.poll(), std::vector<std::string>{"one"});
  std::ofstream(path, std::ios::app) << "o\nthree\n";
  EXPECT_EQ(tail.poll(), (std::vector<std::string>{"two", "three"}));
  LineTail later(path, /*from_end=*/true);
  EXPECT_TRUE(later.poll().empty());
  EXPECT_EQ(read_lines(path).size(), 3u);
}

TEST_F(RunDirTest, TheLockNamesItsHolderAndDiesWithIt) {
  EXPECT_EQ(RunLock::holder(dir_), 0);
  {
    const auto lock = RunLock::acquire(dir_);
    ASSERT_OK(lock);
    EXPECT_EQ(RunLock::holder(dir_), getpid());
    const auto second = RunLock::acquire(dir_);
    EXPECT_EQ(second.status().code(), Code::kAlreadyExists);
    EXPECT_SAYS(second, std::to_string(getpid()));
    EXPECT_SAYS(second, " on " + host_name());
  }
  EXPECT_EQ(RunLock::holder(dir_), 0);
  EXPECT_OK(RunLock::acquire(dir_));
}

TEST_F(RunDirTest, ALostLockIsDetected) {
  ASSERT_OK_AND(const auto first, RunLock::acquire(dir_));
  EXPECT_OK(first->check());
  fs::remove(lock_path(dir_));
  EXPECT_EQ(first->check().code(), Code::kCancelled);
  ASSERT_OK_AND(const auto second, RunLock::acquire(dir_));
  EXPECT_OK(second->check());
  const Status lost = first->check();
  EXPECT_EQ(lost.code(), Code::kCancelled);
  EXPECT_SAYS(lost, "on " + host_name() + ") has taken over");
  // As where locks do not exclude: the name in the file tells.
  put(lock_path(dir_), "42 elsewhere 1.0\n");
  EXPECT_SAYS(second->check(), "pid 42 on elsewhere");
}

TEST_F(RunDirTest, NeitherOfTwoWritersCutsTheOthersLines) {
  const std::string path = dir_ + "/m.jsonl";
  const std::string one = metrics_line(metrics(1)) + "\n";
  const std::string two = metrics_line(metrics(2)) + "\n";
  ASSERT_OK_AND(const auto older, LineFile::open(path, valid));
  ASSERT_OK(older->append(one));
  ASSERT_OK_AND(const auto younger, LineFile::open(path, valid));
  ASSERT_OK(younger->append(two));
  const Status refused = older->append(two);
  EXPECT_EQ(refused.code(), Code::kCancelled) << refused.to_string();
  EXPECT_EQ(get(path), one + two);
}

// A rolled-back or lost journal does not change it, and the start of a run
// that failed leaves nothing.
TEST_F(RunDirTest, TheSecretOfARunIsMadeOnce) {
  const std::string secret = run_secret(*fs_, dir_);
  EXPECT_EQ(secret.size(), kSecretBytes);
  EXPECT_EQ(run_secret(*fs_, dir_), secret);
  EXPECT_OK(check_unused(*fs_, dir_));
  put(secret_path(dir_), "torn");
  EXPECT_NE(run_secret(*fs_, dir_), secret);
  EXPECT_EQ(get(secret_path(dir_)).size(), kSecretBytes);
  using std::filesystem::perms;
  EXPECT_EQ(std::filesystem::status(secret_path(dir_)).permissions(),
            perms::owner_read | perms::owner_write);
  // A file that cannot be read now stays.
  const std::string before = get(secret_path(dir_));
  HookedFileSystem unreadable([](const std::string& call, const auto&) {
    return call == "open" ? errno_error("secret", EIO) : ok_status();
  });
  EXPECT_NE(run_secret(unreadable, dir_), before);
  EXPECT_EQ(get(secret_path(dir_)), before);
}

TEST_F(RunDirTest, EndpointsSurviveTheFile) {
  const Endpoint e{.address = "tcp://10.0.0.1:5710",
                   .host = "head",
                   .pid = 42,
                   .bound = "tcp://0.0.0.0:5710",
                   .host_id = 0xfedcba9876543210};
  ASSERT_OK(write_endpoint(*posix_file_system(), dir_, e));
  EXPECT_EQ(read_endpoint(dir_).value(), e);
  EXPECT_EQ(get(endpoint_path(dir_)).substr(0, 20), "tcp://10.0.0.1:5710\n");
  remove_endpoint(*posix_file_system(), dir_);
  EXPECT_EQ(read_endpoint(dir_).status().code(), Code::kNotFound);
}

TEST_F(RunDirTest, AnEndpointIsReplacedOnAFullDisk) {
  Endpoint e{.address = "tcp://10.0.0.1:5710", .host = "head", .pid = 42};
  HookedFileSystem full([](const std::string& call, const auto&) {
    return call == "create" ? errno_error("x", ENOSPC) : ok_status();
  });
  EXPECT_EQ(write_endpoint(full, dir_, e).code(), Code::kExhausted);
  ASSERT_OK(write_endpoint(*posix_file_system(), dir_, e));
  e.pid = 7;
  e.address = "tcp://10.0.0.200:5710";
  ASSERT_OK(write_endpoint(full, dir_, e));
  EXPECT_EQ(read_endpoint(dir_).value(), e);
}

TEST_F(RunDirTest, AnEndpointOfAMachineOfTheSameNameIsNotHere) {
  Endpoint e{.host = host_identity(), .pid = 7, .host_id = host_id()};
  EXPECT_TRUE(is_here(e));
  EXPECT_TRUE(is_of_process(e, 7));
  EXPECT_FALSE(is_of_process(e, 8));
  e.host_id += 1;
  EXPECT_FALSE(is_here(e));
  EXPECT_FALSE(is_of_process(e, 7)) << "as in another container";
  e.host_id = 0;  // of an older release
  EXPECT_TRUE(is_here(e));
}

TEST_F(RunDirTest, TheLockTellsOfCoordinatorsBeforeARestartOfTheHost) {
  const uint64_t before = host_id() + 1;
  EXPECT_TRUE(lock_tells({.address = "tcp://10.0.0.1:5710",
                          .host = host_identity(),
                          .host_id = before}));
  for (const char* own : {"tcp://127.0.0.1:5710", "tcp://[::1]:5710",
                          "tcp://localhost:5710", "ipc:///run/socket"})
    EXPECT_TRUE(
        lock_tells({.address = own, .host = "elsewhere", .host_id = before}))
        << own;
  EXPECT_FALSE(lock_tells({.address = "tcp://10.0.0.1:5710",
                           .host = "elsewhere",
                           .host_id = before}));
}

// A run of the job whose coordinator started at `time`, or never.
void put_run(const std::string& run, const std::string& job_name, double time) {
  const auto store = [](const std::string& path, const std::string& text) {
    ASSERT_OK(write_file(*posix_file_system(), path, text));
  };
  fs::create_directories(run);
  store(job_path(run),
        "[job]\nname = \"" + job_name + "\"\n[data]\npath = \"/d\"\n");
  store(journal_path(run), "");
  if (time <= 0) return;
  pb::EventRecord e;
  e.set_event("coordinator_started");
  e.set_time(time);
  std::string lines = event_line(e) + "\n";
  e.set_event("checkpoint");
  e.set_time(time + 1000);
  store(events_path(run), lines + event_line(e) + "\n");
}

TEST_F(RunDirTest, TheNewestRunIsTheOneStartedLast) {
  const std::string runs = dir_ + "/runs";
  put_run(runs + "/a-20990101-000000", "a", 100);
  put_run(runs + "/mine", "a", 300);
  put_run(runs + "/b", "b", 200);
  put_run(runs + "/never-started", "a", 0);
  put_run(dir_ + "/elsewhere", "c", 400);
  fs::create_directories(runs + "/notes");
  EXPECT_EQ(newest_run(runs, "a").value(), runs + "/mine");
  EXPECT_EQ(newest_run(runs, "b").value(), runs + "/b");
  EXPECT_EQ(newest_run(runs, "").value(), runs + "/mine");
  EXPECT_FALSE(newest_run(runs, "c").ok());
  point_latest(runs, dir_ + "/elsewhere");
  EXPECT_EQ(newest_run(runs, "").value(), dir_ + "/elsewhere");
  EXPECT_EQ(choose_run(runs, "b", "", true, 0).value(), runs + "/b");
  EXPECT_FALSE(choose_run(runs, "a", dir_ + "/none", true, 0).ok());
  EXPECT_EQ(choose_run(runs, "a", dir_ + "/x/", false, 0).value(), dir_ + "/x");
  // Made from another run, and not continued yet.
  put_run(runs + "/fork", "b", 0);
  put(events_path(runs + "/fork"),
      event_line(text_message<pb::EventRecord>("event: 'forked' time: 500")) +
          "\n");
  EXPECT_EQ(newest_run(runs, "b").value(), runs + "/fork");
}

TEST_F(RunDirTest, LatestPointsToTheRunAndNamesTheRun) {
  const std::string run = dir_ + "/a-20250101-000000";
  put_run(run, "a", 1);
  point_latest(dir_, dir_ + "/elsewhere");
  point_latest(dir_, run);
  EXPECT_EQ(find_run(dir_ + "/latest").value(), run);
  EXPECT_EQ(choose_run(dir_, "a", dir_ + "/latest", true, 0).value(), run);
  point_latest(dir_, run);
  EXPECT_EQ(fs::read_symlink(dir_ + "/latest"), "a-20250101-000000");
  // The folder is reached by a link to a deeper place.
  const std::string far = dir_ + "/far/away/runs", near = dir_ + "/near";
  put_run(far + "/b", "b", 1);
  fs::create_directory_symlink(far, near);
  for (const std::string& b : {far + "/b", near + "/b"}) {
    point_latest(near, b);
    EXPECT_EQ(fs::read_symlink(near + "/latest"), "b");
  }
}

TEST_F(RunDirTest, ARunThatCannotBeLookedAtIsNotMissing) {
  fs::create_symlink(dir_ + "/loop", dir_ + "/loop");
  EXPECT_EQ(find_run(dir_ + "/loop").status().code(), Code::kIo);
  EXPECT_EQ(find_run(dir_ + "/none").status().code(), Code::kNotFound);
  put(dir_ + "/file", "x");
  EXPECT_EQ(find_run(dir_ + "/file").status().code(), Code::kNotFound);
}

TEST_F(RunDirTest, TheLastEventTellsHowARunEnded) {
  EXPECT_FALSE(end_of_run(dir_));
  auto e = text_message<pb::EventRecord>(
      "event: 'job_failed' step: 7 time: 100 cause: 'no luck'");
  put(events_path(dir_), event_line(e) + "\n");
  const auto end = end_of_run(dir_);
  ASSERT_TRUE(end.has_value());
  EXPECT_EQ(end->outcome, pb::JobStatus::FAILED);
  EXPECT_EQ(end_text(*end, "/r"), "failed at step 7, " + date_text(100) +
                                      ": no luck; to continue: remesh resume "
                                      "/r");
  EXPECT_EQ(
      end_text({.outcome = pb::JobStatus::DONE, .step = 7, .time = 100}, "/r"),
      "finished at step 7, " + date_text(100) +
          "; to train further: remesh resume /r --set train.steps=14");
  e.set_detail("step 7 is in the memory of a");
  e.set_seconds(600);
  put(events_path(dir_), event_line(e) + "\n");
  EXPECT_EQ(end_of_run(dir_)->detail,
            "step 7 is in the memory of a until " + time_of_day(700));
  const auto again =
      text_message<pb::EventRecord>("event: 'coordinator_restarted'");
  put(events_path(dir_), event_line(e) + "\n" + event_line(again) + "\n");
  EXPECT_FALSE(end_of_run(dir_));
}

TEST_F(RunDirTest, FilesOfACoordinatorThatFailedToStartAreRemoved) {
  const std::string run = dir_ + "/run";
  const std::string temporary = temporary_path(*fs_, journal_path(run));
  const auto leave = [&] {
    auto lock = RunLock::acquire(run);
    EXPECT_OK(lock);
    EXPECT_FALSE(lock.value()->was_run());
    const bool begun = lock.value()->begin(*fs_).ok();
    if (begun)
      for (const std::string& path :
           {job_path(run), journal_path(run), temporary, metrics_path(run)})
        put(path, "x");
    lock.value()->remove_unstarted(*fs_);
    return begun;
  };
  EXPECT_TRUE(leave());
  EXPECT_FALSE(fs_->exists(run));
  fs::create_directories(run);
  EXPECT_TRUE(leave());
  ASSERT_TRUE(fs_->exists(run)) << "it may be a mount point";
  EXPECT_TRUE(fs_->list(run)->empty());
  fs::create_directories(run + "/checkpoints");
  EXPECT_TRUE(leave());
  EXPECT_EQ(*fs_->list(run), std::vector<std::string>{"checkpoints"});
  put(temporary, "of one that was killed");
  EXPECT_TRUE(leave());
  put(job_path(run), "[data]\n");
  EXPECT_FALSE(leave());
  EXPECT_TRUE(fs_->exists(job_path(run))) << "the user's own";
  for (const std::string& path : {job_path(run), journal_path(run)})
    put(path, "x");
  ASSERT_OK_AND(const auto lock, RunLock::acquire(run));
  EXPECT_TRUE(lock->was_run());
  lock->remove_unstarted(*fs_);
  EXPECT_TRUE(is_run(run)) << "of an earlier start";
}

// As on a full disk.
TEST_F(RunDirTest, AStartThatCannotWriteItsLockLeavesNothing) {
  const std::string run = dir_ + "/run";
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit none{.rlim_cur = 0, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &none);
  const Status failed = RunLock::acquire(run).status();
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_HAS(failed.message(), "coordinator.lock: write");
  EXPECT_FALSE(fs::exists(run));
}

// Each start acquires the lock and either writes its number, or fails and
// cleans up. Some of the directory exists before, or goes while others wait.
TEST_F(RunDirTest, RacingStartsRemoveNoFilesOfTheWinner) {
  constexpr int kStarts = 6;
  for (const uint64_t seed : test_seeds(100)) {
    const std::string run = fmt::format("{}/race-{}", dir_, seed);
    std::atomic<int> won = 0;
    std::vector<std::thread> starts;
    for (int n = 1; n <= kStarts; ++n)
      starts.emplace_back([&, n] {
        const auto drawn = [&](uint64_t which, uint64_t below) {
          return random_u64(seed, n, which) % below;
        };
        const auto pause = [&](uint64_t which, uint64_t below_us) {
          std::this_thread::sleep_for(
              std::chrono::microseconds(drawn(which, below_us)));
        };
        pause(0, 300);
        const auto fs = posix_file_system();
        const auto lock = RunLock::acquire(run);
        if (!lock.ok()) {
          EXPECT_EQ(lock.status().code(), Code::kAlreadyExists)
              << lock.status().message();
          return;
        }
        if (lock.value()->was_run()) return;  // as after the end of a short job
        EXPECT_OK(lock.value()->begin(*fs));
        put(metrics_path(run), std::to_string(n));
        pause(1, 100);
        if (drawn(2, 2) == 0) return lock.value()->remove_unstarted(*fs);
        put(job_path(run), std::to_string(n));
        EXPECT_EQ(won.exchange(n), 0);
      });
    for (std::thread& t : starts) t.join();
    if (won == 0) {
      EXPECT_FALSE(is_run(run));
      continue;
    }
    for (const std::string& path : {job_path(run), metrics_path(run)})
      EXPECT_EQ(get(path), std::to_string(won))
          << "seed " << seed << ": " << path;
  }
}

pb::Job job(const std::vector<std::string>& set = {}) {
  std::vector<std::string> all = {"data.path=/d", "train.steps=100"};
  all.insert(all.end(), set.begin(), set.end());
  return resolved_job(all);
}

TEST_F(RunDirTest, OnlyChangesOfTheTrainingAreForbidden) {
  EXPECT_TRUE(forbidden_differences(job(), job()).empty());
  EXPECT_TRUE(forbidden_differences(
                  job(), job({"train.steps=20", "elastic.min_slots=2",
                              "checkpoint.interval=5", "train.log_every=3"}))
                  .empty());
  const auto two =
      forbidden_differences(job(), job({"train.seed=9", "model.dim=512"}));
  // head_dim and hidden_dim follow dim.
  ASSERT_EQ(two.size(), 4u) << join(two, "\n");
  EXPECT_EQ(two[0], "model.dim: the run has 256, given is 512");
  EXPECT_EQ(two[3], "train.seed: the run has 1, given is 9");
  EXPECT_TRUE(
      forbidden_differences(
          job(), job({"parallel.zero_stage=2", "profile.enable=true",
                      "elastic.layouts=[\"tp2\"]", "train.recompute_every=2"}))
          .empty());
  // A warm-up of one's own does not keep a run from being made longer, and is
  // itself not free.
  const auto own = job({"schedule.warmup_steps=5"});
  EXPECT_TRUE(forbidden_differences(
                  own, job({"schedule.warmup_steps=5", "train.steps=20"}))
                  .empty());
  EXPECT_EQ(forbidden_differences(own, job({"schedule.warmup_steps=6"})).size(),
            1u);
  // A schedule that was set apart from the steps is part of the training.
  EXPECT_FALSE(
      forbidden_differences(job(), job({"schedule.total_steps=200"})).empty());
}

std::string checksum_of(const std::string& tokens) {
  return hex(xxh3_128(std::as_bytes(std::span(tokens))));
}

TEST_F(RunDirTest, AFolderOfCheckpointsBelongsToOneRun) {
  const std::string folder = dir_ + "/disk/checkpoints";
  const std::string a = dir_ + "/a", b = dir_ + "/b";
  EXPECT_OK(claim_folder(a, a + "/checkpoints", 1));
  EXPECT_FALSE(fs_->exists(a + "/checkpoints")) << "its own needs no claim";
  ASSERT_OK(claim_folder(a, folder, 1));
  const auto long_ago = fs::file_time_type() + std::chrono::hours(1);
  fs::last_write_time(folder, long_ago);
  EXPECT_OK(claim_folder(a, folder, 1)) << "again";
  EXPECT_EQ(fs::last_write_time(folder), long_ago) << "without writing there";
  // Its start failed: there is no such run.
  ASSERT_OK(claim_folder(b, folder, 2));
  ASSERT_OK(create(b));
  ASSERT_OK(write_job(*fs_, job(), b, 2));
  const Status taken = claim_folder(a, folder, 1);
  EXPECT_EQ(taken.code(), Code::kInvalidArgument);
  EXPECT_SAYS(taken, "of another run, " + b);
  std::filesystem::remove_all(b);
  std::filesystem::create_directory(folder + "/step-00000100");
  EXPECT_FALSE(claim_folder(a, folder, 1).ok()) << "it has checkpoints";
  EXPECT_OK(claim_folder(b, folder, 2));
}

// For this thread, as on exFAT.
void refuse_hard_links() {
  std::vector<sock_filter> program = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const unsigned call : {SYS_link, SYS_linkat}) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1));
    program.push_back(
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | unsigned{EPERM}));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{.len = static_cast<unsigned short>(program.size()),
                          .filter = program.data()};
  ASSERT_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0);
}

TEST_F(RunDirTest, AFolderIsClaimedWithoutHardLinks) {
  const std::string folder = dir_ + "/disk", a = dir_ + "/a", b = dir_ + "/b";
  std::thread([&] {
    refuse_hard_links();
    ASSERT_NE(::link(dir_.c_str(), folder.c_str()), 0);
    ASSERT_EQ(errno, EPERM);
    ASSERT_OK(claim_folder(a, folder, 1));
    fs::create_directory(folder + "/step-00000100");
    EXPECT_FALSE(claim_folder(b, folder, 2).ok());
    EXPECT_OK(claim_folder(a, folder, 1));
  }).join();
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 2);
}

TEST_F(RunDirTest, HyperparametersMayChangeOnlyOnRequest) {
  for (const char* set :
       {"optimizer.lr=0.5", "schedule.decay_type=linear", "train.dtype=fp32",
        "train.max_norm=9", "train.max_skipped_steps=3", "train.z_loss=1e-4",
        "train.digest=true"}) {
    const auto refused = forbidden_differences(job(), job({set}));
    ASSERT_EQ(refused.size(), 1U) << set;
    EXPECT_HAS(refused[0], "--set ");
    EXPECT_TRUE(forbidden_differences(job(), job({set}), {set}).empty()) << set;
  }
  for (const char* set :
       {"train.seed=9", "train.global_batch_size=32", "model.norm_eps=1e-6"})
    EXPECT_EQ(forbidden_differences(job(), job({set}), {set}).size(), 1U)
        << set;
}

TEST_F(RunDirTest, ARunKeepsTheKeysThatAreNotGiven) {
  const std::string run = dir_ + "/run";
  ASSERT_OK(create(run));
  const pb::Job held = job({"train.steps=200", "model.vocab_size=257",
                            "elastic.layouts=[\"dp2\"]", "train.seed=5"});
  ASSERT_OK(write_job(*fs_, held, run));
  put(dir_ + "/job.toml", "[data]\npath = \"/d\"\n[train]\nseed = 5\n");
  ASSERT_OK_AND(const auto same, load_resolved({dir_ + "/job.toml", {}}, run));
  EXPECT_TRUE(jobfile::differences(held, same).empty());
  ASSERT_OK_AND(
      const auto longer,
      load_resolved({"", {"train.steps=300", "elastic.layouts=[]"}}, run));
  EXPECT_EQ(longer.schedule().total_steps(), 300) << "follows train.steps";
  EXPECT_EQ(longer.elastic().layouts_size(), 0);
  EXPECT_EQ(longer.train().seed(), 5U);
  EXPECT_FALSE(load_resolved({"", {}}, dir_ + "/none").ok());
}

TEST_F(RunDirTest, FewerStepsThanFinishedAreRefusedAndARateJumpIsReported) {
  ASSERT_OK(write_job(*fs_, job({"train.steps=200"}), dir_));
  auto m = text_message<pb::StepMetrics>("step: 100 loss: 2");
  put(metrics_path(dir_), metrics_line(m) + "\n" + "{\"step\":101,");
  EXPECT_EQ(last_finished_step(dir_), 100);
  const auto check = [&](const std::vector<std::string>& set) {
    return check_job(*fs_, {job(set), set}, dir_, nullptr);
  };
  const auto fewer = check({"train.steps=99"});
  EXPECT_EQ(fewer.status().code(), Code::kInvalidArgument);
  EXPECT_SAYS(fewer, "has finished step 100");
  EXPECT_EQ(check({"train.steps=200"})->keys, "");
  ASSERT_OK_AND(const auto bent, check({"train.steps=100"}));
  EXPECT_EQ(bent.keys,
            "train.steps 200 -> 100, schedule.total_steps 200 -> 100");
  EXPECT_EQ(bent.learning_rate.substr(0, 53),
            "step 101 has 1.00e-04 after 7.83e-04 at step 100, bec");
  m.set_lr(0.5);  // made with another one
  put(metrics_path(dir_), metrics_line(m) + "\n");
  EXPECT_EQ(check({"train.steps=100"})->learning_rate.substr(0, 53),
            "step 101 has 1.00e-04 after 5.00e-01 at step 100, bec");
  EXPECT_EQ(
      check({"train.steps=400", "schedule.total_steps=200"})->learning_rate,
      "");
  EXPECT_EQ(check({"train.steps=200", "optimizer.lr=0.1"})->keys,
            "optimizer.lr 0.001 -> 0.1");
}

TEST_F(RunDirTest, EditsOfTheJobFileInARunAreTakenOnlyOnRequest) {
  pb::Durable journal;
  *journal.mutable_job() = job({"train.steps=200"});
  journal.set_run_id(0xabcdef0123456789);
  const uint64_t id = journal.run_id();
  ASSERT_OK(write_job(*fs_, journal.job(), dir_, id));
  EXPECT_EQ(run_id_of(*fs_, dir_), id);
  EXPECT_TRUE(is_run(dir_));
  const auto check = [&](bool accept_edits,
                         const std::vector<std::string>& set = {}) {
    const auto now = load_resolved({"", set}, dir_);
    EXPECT_OK(now);
    return check_job(*fs_, {*now, set, accept_edits}, dir_, &journal);
  };
  EXPECT_EQ(check(false)->keys, "");
  EXPECT_EQ(check(false, {"optimizer.lr=0.5"})->keys,
            "optimizer.lr 0.001 -> 0.5");
  const std::string whole = get(job_path(dir_));
  const auto edit = [&](const std::string& from, const std::string& to) {
    std::string text = whole;
    text.replace(text.find(from), from.size(), to);
    put(job_path(dir_), text);
  };
  edit("\nlog_every = 1\n", "\nlog_every = 7 # by hand\n");
  const Status refused = check(false).status();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_SAYS(refused, "edited by hand: train.log_every 1 -> 7");
  EXPECT_EQ(check_unedited(*fs_, dir_, journal).code(), Code::kInvalidArgument);
  EXPECT_EQ(check(true)->keys, "train.log_every 1 -> 7");
  edit("\nseed = 1\n", "\nseed = 2\n");
  EXPECT_SAYS(check(true), "train.seed: the run has 1")
      << "that is another training";
  put(job_path(dir_), whole + "\n# a comment of a user\n");
  EXPECT_TRUE(check(false).ok());
  EXPECT_TRUE(check_unedited(*fs_, dir_, journal).ok());
  // Files of two runs.
  journal.set_run_id(5);
  const Status mixed = check(true).status();
  EXPECT_EQ(mixed.code(), Code::kCorrupt);
  EXPECT_SAYS(mixed, "to run 0000000000000005, but " + job_path(dir_) +
                         " to run abcdef0123456789");
  // The journal alone knows the job.
  journal.set_run_id(id);
  fs_->remove(job_path(dir_)).ok();
  EXPECT_EQ(check_job(*fs_, {job({"train.seed=3"}), {}}, dir_, &journal)
                .status()
                .code(),
            Code::kInvalidArgument);
}

// A coordinator that is killed before it writes the journal leaves such a file.
TEST_F(RunDirTest, AJobThatACoordinatorWroteIsNoEdit) {
  pb::Durable journal;
  *journal.mutable_job() = job();
  journal.set_run_id(7);
  ASSERT_OK(write_job(*fs_, job({"optimizer.lr=0.5"}), dir_, journal.run_id()));
  EXPECT_EQ(run_id_of(*fs_, dir_), 7U);
  const auto check = [&] {
    const auto now = load_resolved({}, dir_);
    EXPECT_OK(now);
    return check_job(*fs_, {*now, {}}, dir_, &journal);
  };
  ASSERT_OK_AND(const auto taken, check());
  EXPECT_EQ(taken.keys, "optimizer.lr 0.001 -> 0.5");
  std::string text = get(job_path(dir_));
  text.replace(text.find("\nlog_every = 1\n"), 15, "\nlog_every = 2\n");
  put(job_path(dir_), text);
  EXPECT_EQ(check().status().code(), Code::kInvalidArgument);
}

// Of a rank alone, so that the state is complete.
TEST_F(RunDirTest, TheNewestStepMayBeInMemoryOrInACheckpoint) {
  const std::vector<std::string> model = {
      "model.dim=8", "model.n_layers=1", "model.n_heads=2",
      "model.n_kv_heads=2", "model.hidden_dim=8"};
  const pb::Job now = job(model);
  const auto m =
      text_message<pb::StepMetrics>("step: 100 loss: 2 generation: 1");
  put(metrics_path(dir_), metrics_line(m) + "\n");
  pb::Durable journal;
  journal.set_run_id(7);
  journal.set_state_job(random_u64(getpid(), 1, 2));
  EXPECT_EQ(newest_state(*fs_, dir_, now, &journal).step, 100);
  EXPECT_EQ(state_text(newest_state(*fs_, dir_, now, &journal)), "");

  const auto checkpoint = [&](int64_t step, uint64_t run,
                              int64_t generation = 1) {
    pb::Manifest c;
    c.set_format(manifest::kFormat);
    c.set_step(step);
    c.set_generation(generation);
    c.set_run_id(run);
    const std::string folder =
        dir_ + "/checkpoints/" + manifest::step_name(step);
    fs::create_directories(folder);
    put(folder + "/manifest.json", manifest::encode(c));
  };
  checkpoint(150, 7);
  checkpoint(900, 8);  // of another run
  const auto saved = newest_state(*fs_, dir_, now, &journal);
  EXPECT_EQ(saved.step, 150);
  EXPECT_EQ(saved.source, pb::Source::CHECKPOINT);
  // One that the run continued without, as only the journal knows yet.
  pb::Durable went_back = journal;
  merge_text("branches { abandoned { generation: 2 step: 120 } }", &went_back);
  checkpoint(110, 7);
  const auto older = newest_state(*fs_, dir_, now, &went_back);
  EXPECT_EQ(older.state_step, 110);
  EXPECT_EQ(older.checkpoint_step, 110);

  const std::string folder =
      fmt::format("{}/{}{:016x}/state", memory::kSharedMemory,
                  memory::shared_folder_prefix(), journal.state_job());
  fs::create_directories(folder);
  const auto table = geometry::ParamTable::make(jobfile::model_config(now));
  const geometry::Sharding sharding{
      .bounds =
          geometry::stage_bounds(jobfile::model_config(now), 1, 16).value()};
  const int64_t elements = geometry::make_rank_shard(table, sharding, 0)
                               .value()
                               .zero.state_elements();
  {
    ASSERT_OK_AND(const auto segment,
                  memory::StateSegment::create(
                      memory::segment_path(folder, journal.state_job(), 0),
                      journal.state_job(), elements));
    segment->begin(0);
    segment->commit({.step = 180,
                     .generation = 1,
                     .sharding = sharding,
                     .model = geometry::model_id(table),
                     .elements = elements});
  }
  const auto kept = newest_state(*fs_, dir_, now, &journal);
  EXPECT_EQ(kept.step, 180);
  EXPECT_EQ(kept.source, pb::Source::MEMORY);
  EXPECT_NEAR(kept.kept_until, unix_seconds() + memory::kStateKeptS, 100);
  auto shorter = model;
  shorter.emplace_back("train.steps=170");
  const Status refused =
      check_job(*fs_, {job(shorter), {}}, dir_, &journal).status();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_SAYS(
      refused,
      "has finished step 180 (step 180 is in the memory of this host until ");
  fs::remove_all(fs::path(folder).parent_path());
}

TEST_F(RunDirTest, AFolderWithOtherFilesIsRefused) {
  fs::create_directories(dir_ + "/keys");
  fs::create_directories(dir_ + "/logs");
  EXPECT_OK(check_unused(*fs_, dir_));
  put(job_path(dir_), "[data]\npath = \"/d\"\n");
  EXPECT_FALSE(is_run(dir_)) << "it is the user's";
  EXPECT_SAYS(check_unused(*fs_, dir_), "no run has written");
  fs_->remove(job_path(dir_)).ok();
  put(dir_ + "/thesis.tex", "x");
  EXPECT_SAYS(check_unused(*fs_, dir_), "thesis.tex");
}

TEST_F(RunDirTest, AnotherDataSetThanWasTrainedOnIsRefused) {
  const auto data_set = [&](const std::string& name, char content) {
    fs::create_directories(dir_ + "/" + name);
    data::Index index{
        .source_id = std::string(32, '0'),
        .tokenizer = "bytes",
        .vocab_size = 257,
        .train = {{"a", 5, checksum_of(std::string(10, content))}}};
    index.data_id = data_id_of(index);
    put(dir_ + "/" + name + "/dataset.json", index_to_json(index));
    return index.data_id;
  };
  const std::string first = data_set("first", 'x');
  const std::string second = data_set("second", 'y');
  pb::Durable journal;
  const auto check = [&](const std::string& name) {
    pb::Job j = job();
    j.mutable_data()->set_path(dir_ + "/" + name);
    return check_job(*fs_, {j}, dir_, &journal).status();
  };
  ASSERT_OK(write_job(*fs_, job(), dir_));
  journal.mutable_assignment()->set_data_id(first);
  EXPECT_OK(check("second")) << "nothing was trained yet";
  put(metrics_path(dir_), metrics_line(metrics(5)) + "\n");
  EXPECT_OK(check("first"));
  EXPECT_EQ(check("second").code(), Code::kInvalidArgument)
      << "the state is in memory alone";
  journal.mutable_assignment()->clear_data_id();
  EXPECT_OK(check("second")) << "the coordinator never saw the data";
  pb::Manifest m;
  m.set_format(manifest::kFormat);
  m.set_step(10);
  m.set_data_id(first);
  const std::string step =
      dir_ + "/checkpoints/" + manifest::step_name(m.step());
  fs::create_directories(step);
  put(step + "/manifest.json", manifest::encode(m));
  EXPECT_OK(check("first"));
  EXPECT_OK(check("none")) << "the job file's check names it";
  const Status refused = check("second");
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  for (const std::string& part : {first, second, dir_ + "/second"})
    EXPECT_SAYS(refused, part);
  fs::remove_all(dir_ + "/checkpoints");
  put(dir_ + "/checkpoints", "not a folder");
  EXPECT_FALSE(check("first").ok()) << "only a checkpoint may know it";
  journal.mutable_assignment()->set_data_id(first);
  EXPECT_OK(check("first"));
  EXPECT_EQ(check("second").code(), Code::kInvalidArgument);
}

TEST_F(RunDirTest, DataInfoComesFromTheIndex) {
  data::Index index{.source_id = std::string(32, '0'),
                    .tokenizer = "bytes",
                    .vocab_size = 257,
                    .largest_token = 120,
                    .train = {{"a", 5, checksum_of("xxxxxxxxxx")},
                              {"b", 6, checksum_of("xxxxxxxxxxxx")}}};
  index.data_id = data_id_of(index);
  put(dir_ + "/dataset.json", index_to_json(index));
  put(dir_ + "/a", std::string(128 + 2 * 5, 'x'));
  EXPECT_SAYS(read_data_info(dir_), "/b: No such file");
  put(dir_ + "/b", std::string(128 + 2 * 6, 'x'));
  ASSERT_OK_AND(const auto info, read_data_info(dir_));
  EXPECT_EQ(info.vocab_size, 257);
  EXPECT_EQ(info.largest_token, 120);
  EXPECT_EQ(info.train_tokens, 11);
  EXPECT_EQ(info.val_tokens, 0);
  put(dir_ + "/b", std::string(128 + 2 * 6, 'y'));
  EXPECT_SAYS(read_data_info(dir_), "/b: the tokens");
  EXPECT_SAYS(read_data_info(dir_ + "/none"), "remesh data prepare");
}

}  // namespace
}  // namespace remesh::rundir
