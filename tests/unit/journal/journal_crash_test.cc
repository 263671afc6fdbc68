// Whatever fails while the journal is created or written, and wherever the
// machine stops: afterwards it opens, and has the state of the last persist()
// that returned ok, or of the one in progress.
//
// Exhaustive: every call, every way it can fail there, every way the disk can
// look afterwards.

#include <set>

#include "coordinator/server/journal.h"
#include "tests/testing/expect.h"
#include "tests/testing/memory_file_system.h"

namespace remesh::server {
namespace {

using Fault = MemoryFileSystem::Fault;
using Survives = MemoryFileSystem::Survives;
using Torn = MemoryFileSystem::Torn;

constexpr char kPath[] = "run/journal";

// Several pages; that of generation 2 needs larger slots if `grows`.
pb::Durable state(int64_t generation, bool grows) {
  pb::Durable d;
  d.set_generation(generation);
  const size_t bytes = grows && generation == 2 ? 200'000 : 9'000;
  d.mutable_cause()->set_what(
      std::string(bytes, static_cast<char>('a' + generation)));
  return d;
}

struct Case {
  std::string name;
  bool has_journal = true;  // with generation 1
  bool grows = false;
};

// The run directory exists and is durable.
class JournalCrashTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    ASSERT_OK(start_.create_dirs("run"));
    ASSERT_OK(start_.sync_dir(""));
    if (!GetParam().has_journal) return;
    ASSERT_OK_AND(auto j, Journal::open(start_, kPath));
    ASSERT_OK(j->persist(state(1, GetParam().grows)));
  }

  // Opens the journal and persists generation 2.
  Status second(MemoryFileSystem& fs) {
    ASSIGN_OR_RETURN(const auto journal, Journal::open(fs, kPath));
    return journal->persist(state(2, GetParam().grows));
  }

  // The generation that a new coordinator finds; 0: none.
  int64_t found(MemoryFileSystem& fs, const std::string& where) {
    const auto j = Journal::open(fs, kPath);
    EXPECT_OK(j) << where;
    if (!j.ok() || !(*j)->restored()) return 0;
    const int64_t generation = (*j)->restored()->generation();
    EXPECT_EQ((*j)->restored()->SerializeAsString(),
              state(generation, GetParam().grows).SerializeAsString())
        << where;
    return generation;
  }

  int64_t before() const { return GetParam().has_journal ? 1 : 0; }

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
        // The next life continues.
        EXPECT_OK(second(*fs)) << where;
        EXPECT_EQ(found(*fs, where), 2);
      }
  EXPECT_EQ(seen, (std::set<int64_t>{before(), 2}));
  EXPECT_GT(call, 6);
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
      EXPECT_NE(done.code(), Code::kCorrupt) << where << "it is sound";
      EXPECT_OK(second(*fs)) << where;
      EXPECT_EQ(found(*fs, where), 2);
    }
  }
}

TEST_P(JournalCrashTest, AFailedReadHidesNoOtherWriter) {
  bool reached = true;
  for (int64_t call = 0; reached; ++call) {
    const auto fs = start_.clone();
    const auto older = Journal::open(*fs, kPath);
    const auto younger = Journal::open(*fs, kPath);
    ASSERT_TRUE(older.ok() && younger.ok());
    pb::Durable newer = state(2, GetParam().grows);
    newer.set_epoch(8);
    ASSERT_OK((*younger)->persist(newer));
    fs->fail_at(call, Fault::kIoOnce);
    EXPECT_FALSE((*older)->persist(state(3, GetParam().grows)).ok()) << call;
    reached = fs->calls() > call;
  }
}

TEST_P(JournalCrashTest, WhatAnInterruptedCreationLeavesIsIgnored) {
  const auto fs = start_.clone();
  ASSERT_OK(write_file(*fs, temporary_path(*fs, kPath), std::string(700, 'x')));
  EXPECT_EQ(found(*fs, "first"), before());
  EXPECT_OK(second(*fs));
  EXPECT_EQ(found(*fs, "second"), 2);
}

TEST_P(JournalCrashTest, ATruncatedJournalIsDamageNotANewRun) {
  if (!GetParam().has_journal) return;
  ASSERT_OK_AND(const auto whole, read_file(start_, kPath, 1 << 20));
  for (size_t size = 0; size < whole.size(); size += 1 + size / 8) {
    const auto fs = start_.clone();
    ASSERT_OK(write_file(*fs, kPath, whole.substr(0, size)));
    const auto j = Journal::open(*fs, kPath);
    ASSERT_FALSE(j.ok()) << size;
    EXPECT_EQ(j.status().code(), Code::kCorrupt) << j.status().message();
    EXPECT_EQ(*read_file(*fs, kPath, 1 << 20), whole.substr(0, size));
  }
}

INSTANTIATE_TEST_SUITE_P(Journals, JournalCrashTest,
                         testing::Values(Case{"New", false}, Case{"Existing"},
                                         Case{"Growing", true, true}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace remesh::server
