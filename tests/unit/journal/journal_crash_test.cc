// Whatever fails while the journal is created or written, and wherever the
// machine stops: afterwards it opens, and has the state of the last persist()
// that returned ok, or of the one in progress.
//
// Exhaustive: every call, SQLite's own included, every way it can fail there,
// every way the disk can look afterwards.
#include <gtest/gtest.h>

#include <set>

#include "coordinator/server/journal.h"
#include "tests/testing/memory_file_system.h"
#include "tests/unit/journal/memory_vfs.h"

namespace remesh::server {
namespace {

using Fault = MemoryFileSystem::Fault;
using Survives = MemoryFileSystem::Survives;
using Torn = MemoryFileSystem::Torn;

constexpr char kPath[] = "run/journal.db";

pb::Durable state(int64_t generation) {
  pb::Durable d;
  d.set_generation(generation);
  // Several pages.
  d.set_cause(std::string(9'000, static_cast<char>('a' + generation)));
  return d;
}

// The run directory exists and is durable; `has_journal`: with generation 1.
class JournalCrashTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    vfs_.use(&start_);
    ASSERT_TRUE(start_.create_dirs("run").ok());
    ASSERT_TRUE(start_.sync_dir("").ok());
    if (!GetParam()) return;
    auto j = Journal::open(start_, kPath);
    ASSERT_TRUE(j.ok()) << j.status().message();
    ASSERT_TRUE((*j)->persist(state(1)).ok());
  }

  // Opens the journal and persists generation 2.
  Status second(MemoryFileSystem& fs) {
    vfs_.use(&fs);
    ASSIGN_OR_RETURN(const auto journal, Journal::open(fs, kPath));
    return journal->persist(state(2));
  }

  // The generation that a new coordinator finds; 0: none.
  int64_t found(MemoryFileSystem& fs, const std::string& where) {
    vfs_.use(&fs);
    const auto j = Journal::open(fs, kPath);
    EXPECT_TRUE(j.ok()) << where << j.status().message();
    if (!j.ok() || !(*j)->restored()) return 0;
    const int64_t generation = (*j)->restored()->generation();
    EXPECT_EQ((*j)->restored()->SerializeAsString(),
              state(generation).SerializeAsString())
        << where;
    return generation;
  }

  int64_t before() const { return GetParam() ? 1 : 0; }

  MemoryVfs vfs_;
  MemoryFileSystem start_;
  std::mt19937_64 rng_{4711};
};

TEST_P(JournalCrashTest, ACrashAtAnyCallLeavesOneStateOrTheOther) {
  std::set<int64_t> seen;
  int64_t call = 0;
  for (bool reached = true; reached; ++call)
    for (const Torn torn : {Torn::kHalf, Torn::kNothing, Torn::kAllButOneByte})
      for (const Survives survives : {Survives::kSyncedOnly, Survives::kAll,
                                      Survives::kSome, Survives::kSome}) {
        const auto fs = start_.clone();
        fs->fail_at(call, Fault::kCrash, torn);
        const Status done = second(*fs);
        reached = fs->calls() > call;
        fs->recover(survives, rng_);
        const std::string where = "call " + std::to_string(call) + ": ";
        const int64_t generation = found(*fs, where);
        seen.insert(generation);
        EXPECT_TRUE(generation == 2 || (!done.ok() && generation == before()))
            << where << generation;
        // The next life goes on.
        const Status again = second(*fs);
        EXPECT_TRUE(again.ok()) << where << again.to_string();
        EXPECT_EQ(found(*fs, where), 2);
      }
  EXPECT_EQ(seen, (std::set<int64_t>{before(), 2}));
  EXPECT_GT(call, 15);
}

TEST_P(JournalCrashTest, AFailureAtAnyCallIsReportedAndLosesNothing) {
  for (const Fault fault : {Fault::kIoOnce, Fault::kFull}) {
    bool reached = true;
    for (int64_t call = 0; reached; ++call) {
      const auto fs = start_.clone();
      fs->fail_at(call, fault);
      const Status done = second(*fs);
      reached = fs->calls() > call;
      fs->fail_at(0, Fault::kNone);
      const std::string where = "call " + std::to_string(call) + ": ";
      const int64_t generation = found(*fs, where);
      EXPECT_TRUE(generation == 2 || (!done.ok() && generation == before()))
          << where << generation << ", " << done.to_string();
      EXPECT_TRUE(second(*fs).ok()) << where;
      EXPECT_EQ(found(*fs, where), 2);
    }
  }
}

// A rollback journal cut anywhere, or gone: SQLite must not take it for one.
TEST_P(JournalCrashTest, LeftoversOfAnotherJournalAreIgnored) {
  for (const char* leftover : {"run/journal.db.new", "run/journal.db-journal",
                               "run/journal.db.new-journal"}) {
    const auto fs = start_.clone();
    if (GetParam() && std::string(leftover) == "run/journal.db-journal")
      continue;  // it is the rollback journal of the one that is there
    ASSERT_TRUE(write_file(*fs, leftover, std::string(700, 'x')).ok());
    EXPECT_EQ(found(*fs, leftover), before()) << leftover;
    EXPECT_TRUE(second(*fs).ok()) << leftover;
    EXPECT_EQ(found(*fs, leftover), 2) << leftover;
  }
}

TEST_P(JournalCrashTest, ATruncatedJournalIsDamageNotANewRun) {
  if (!GetParam()) return;
  const auto whole = read_file(start_, kPath, 1 << 20);
  ASSERT_TRUE(whole.ok());
  for (size_t size = 0; size < whole->size(); size += 1 + size / 8) {
    const auto fs = start_.clone();
    ASSERT_TRUE(write_file(*fs, kPath, whole->substr(0, size)).ok());
    vfs_.use(fs.get());
    const auto j = Journal::open(*fs, kPath);
    ASSERT_FALSE(j.ok()) << size;
    EXPECT_EQ(j.status().code(), Code::kCorrupt) << j.status().message();
    EXPECT_EQ(*read_file(*fs, kPath, 1 << 20), whole->substr(0, size));
  }
}

INSTANTIATE_TEST_SUITE_P(Journals, JournalCrashTest, testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "Existing" : "New";
                         });

}  // namespace
}  // namespace remesh::server
