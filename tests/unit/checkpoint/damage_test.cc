// Exhaustive damage to a small checkpoint: every byte of every file is changed
// in turn, and every file is truncated to every length. Each damage is found,
// the file is named, and a search from the newest checkpoint to older ones ends
// at the intact one.
//
// Reading an entire checkpoint takes HDF5 milliseconds, so the consequences of
// a damaged file are tested for every kSample-th case only.

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>

#include "checkpoint/store/blocks.h"
#include "checkpoint/store/index_file.h"
#include "checkpoint/store/verify.h"
#include "tests/testing/expect.h"
#include "tests/testing/memory_file_system.h"
#include "tests/unit/checkpoint/fixture.h"

namespace remesh::store {
namespace {

using geometry::ParamTable;

constexpr uint64_t kSeed = 99;
// Every change must be found in its file and by load(). A sample is also
// checked with verify() and with a restore from the folder;
// REMESH_DAMAGE_SAMPLE=1: all.
size_t sample() {
  const char* asked = std::getenv("REMESH_DAMAGE_SAMPLE");
  return asked != nullptr ? std::max(std::atoi(asked), 1) : 64;
}
constexpr char kFolder[] = "c";

class DamageTest : public testing::TestWithParam<Compression> {
 protected:
  void SetUp() override {
    for (const int64_t step : {1, 2}) {
      ASSERT_OK_AND(const auto done,
                    save(fs_, kFolder, {step, 1}, table_,
                         step == 1 ? one_ : two_, 1, {}, GetParam()));
      path_ = done.path;
      manifest_ = done.manifest;
    }
  }
  std::string get(const std::string& name) {
    return *read_file(fs_, path_join(path_, name), 1 << 30);
  }
  void put(const std::string& name, const std::string& bytes) {
    ASSERT_OK(write_file(fs_, path_join(path_, name), bytes));
  }

  // Like a restore: loads the newest one that it can. Returns its step.
  int64_t restore(Status& newest) {
    const auto found = manifest::scan(fs_, kFolder);
    if (!found.ok()) return 0;
    for (const manifest::Found& f : *found) {
      State loaded;
      Status s = f.status;
      if (s.ok()) s = load_whole(fs_, f.path, table_, loaded);
      if (f.step == 2) newest = s;
      if (!s.ok()) continue;
      EXPECT_TRUE(same_bits(loaded, f.step == 1 ? one_ : two_));
      return f.step;
    }
    return 0;
  }

  // The check of a single file that verify() and load() do first.
  Status look(const std::string& name) {
    if (name == manifest::kManifestName)
      return manifest::read_manifest(fs_, path_).status();
    const std::string file = path_join(path_, name);
    if (name == manifest::kIndexName)
      return check_index(fs_, file, manifest_.index());
    const auto bad = find_bad_blocks(fs_, file, manifest_.shards(0));
    if (!bad.ok()) return bad.status();
    if (!bad->empty()) return corrupt(file + ": " + text(bad->front()));
    return ok_status();
  }

  // Replaces the file's bytes by `bad`, which is reported and survived.
  void expect_reported(const std::string& name, const std::string& bad,
                       const std::string& what, bool in_full) {
    put(name, bad);
    const Status looked = look(name);
    ASSERT_EQ(looked.code(), Code::kCorrupt) << what << looked.to_string();
    ASSERT_SAYS(looked, name) << what;
    if (name == manifest::shard_name(0)) {
      State loaded(table_.num_elements());
      const Status s = load(fs_, path_, manifest_, table_,
                            pieces_of_range(table_, 0, table_.num_elements()),
                            loaded.view());
      ASSERT_EQ(s.code(), Code::kCorrupt) << what << s.to_string();
      ASSERT_SAYS(s, name) << what;
    }
    if (in_full) expect_survived(name, what);
  }

  void expect_survived(const std::string& name, const std::string& what) {
    const VerifyReport report = verify(fs_, path_);
    ASSERT_FALSE(report.ok) << what;
    ASSERT_HAS(report.problems.front(), name) << what;
    Status newest;
    const int64_t step = restore(newest);
    if (name == manifest::kIndexName) {
      // A restore does not read the index.
      ASSERT_EQ(step, 2) << what << newest.to_string();
      return;
    }
    ASSERT_EQ(step, 1) << what;
    ASSERT_SAYS(newest, name) << what;
  }

  const size_t sample_ = sample();
  const ParamTable table_ = ParamTable::make(smallest_model());
  const State one_ = random_state(table_.num_elements(), 1);
  const State two_ = random_state(table_.num_elements(), 2);
  MemoryFileSystem fs_;
  std::string path_;  // of step 2
  pb::Manifest manifest_;
};

TEST_P(DamageTest, EveryChangedByteIsReportedAndTheOlderOneIsUsed) {
  std::mt19937_64 rng(kSeed);
  RecordProperty("seed", std::to_string(kSeed));
  const auto names = fs_.list(path_);
  ASSERT_EQ(names->size(), 3U);
  for (const std::string& name : *names) {
    const std::string good = get(name);
    for (size_t i = 0; i < good.size(); ++i) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ (1 << (rng() % 8)));
      expect_reported(name, bad, name + " byte " + std::to_string(i),
                      i % sample_ == 0);
      if (HasFatalFailure()) return;
    }
    put(name, good);
  }
  EXPECT_TRUE(verify(fs_, path_).ok);
  Status newest;
  EXPECT_EQ(restore(newest), 2) << newest.to_string();
}

TEST_P(DamageTest, EveryTruncationIsReportedAndTheOlderOneIsUsed) {
  const auto names = fs_.list(path_);
  ASSERT_EQ(names->size(), 3U);
  for (const std::string& name : *names) {
    const std::string good = get(name);
    for (size_t n = 0; n < good.size(); ++n) {
      expect_reported(name, good.substr(0, n),
                      name + " of length " + std::to_string(n),
                      n % sample_ == 0);
      if (HasFatalFailure()) return;
    }
    expect_reported(name, good + '\0', name + ", longer", true);
    put(name, good);
  }
  EXPECT_TRUE(verify(fs_, path_).ok);
}

// A manifest may say that a dataset has any size.
TEST_P(DamageTest, SlicesThatDoNotFitTheModelAreNotRead) {
  pb::Manifest m = manifest_;
  pb::Slice* const s = m.mutable_shards(0)->mutable_slices(0);
  s->set_count(0, s->count(0) + 1);
  put(manifest::kManifestName, manifest::encode(m));
  const VerifyReport report = verify(fs_, path_);
  ASSERT_EQ(report.problems.size(), 1U) << describe(report);
  EXPECT_HAS(report.problems[0], "not inside its shape");
}

INSTANTIATE_TEST_SUITE_P(
    Of, DamageTest, testing::Values(Compression::kNone, Compression::kZlib),
    [](const auto& info) {
      return std::string(info.param == Compression::kZlib ? "Compressed"
                                                          : "Plain");
    });

}  // namespace
}  // namespace remesh::store
