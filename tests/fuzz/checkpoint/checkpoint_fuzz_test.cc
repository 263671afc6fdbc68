// Mutates the files of a checkpoint and reads them: the result is an error or
// the correct data, never a crash or wrong data.
//
// REMESH_TEST_SEED and REMESH_FUZZ_ROUNDS (a multiplier) allow longer runs.

#include <string>

#include "checkpoint/store/sidecar.h"
#include "checkpoint/store/verify.h"
#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/testing/memory_file_system.h"
#include "tests/testing/mutator.h"
#include "tests/testing/seed.h"
#include "tests/unit/checkpoint/fixture.h"

namespace remesh::store {
namespace {

class CheckpointFuzz : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND(const auto done, save(fs_, "c", {1, 1}, table_, state_, 2));
    path_ = done.path;
    manifest_ = done.manifest;
  }
  std::string mutate(const std::string& text) { return mutator_(text, text); }
  void put(const std::string& path, const std::string& bytes) {
    ASSERT_OK(write_file(fs_, path, bytes));
  }
  std::string get(const std::string& path) {
    return *read_file(fs_, path, uint64_t{1} << 30);
  }

  const uint32_t seed_ = test_seed();
  const uint64_t rounds_ = from_env("REMESH_FUZZ_ROUNDS", 1);
  Mutator mutator_{seed_};
  const geometry::ParamTable table_ = geometry::ParamTable::make(
      geometry::llama(2, 1, 1, 1, 1, 3, /*tied=*/true));
  const State state_ = random_state(table_.num_elements(), 9);
  MemoryFileSystem fs_;
  std::string path_;
  pb::Manifest manifest_;
};

TEST_F(CheckpointFuzz, AnyChangeOfTheManifestsTextIsRefused) {
  const std::string text = manifest::encode(manifest_);
  for (uint64_t i = 0; i < 20000 * rounds_; ++i) {
    const std::string bad = mutate(text);
    if (bad == text) continue;
    ASSERT_EQ(manifest::decode(bad).status().code(), Code::kCorrupt)
        << "seed " << seed_ << " round " << i;
  }
}

// Deliberate damage: the body is changed and its checksum recomputed.
TEST_F(CheckpointFuzz, AManifestWithAnyBodyNeverCrashesItsReaders) {
  const std::string text = manifest::encode(manifest_);
  const size_t line = text.find('\n') + 1;
  const std::string body = text.substr(line, text.size() - line - 2);
  for (uint64_t i = 0; i < 1500 * rounds_; ++i) {
    const std::string bad = mutate(body);
    const std::string whole = "{\"xxh128\":\"" + xxh128_text(bad) +
                              "\",\"bytes\":" + std::to_string(bad.size()) +
                              ",\"manifest\":\n" + bad + "}\n";
    const auto m = manifest::decode(whole);
    if (!m.ok()) continue;
    (void)describe(*m);
    (void)describe_json(*m);
    put(path_join(path_, manifest::kManifestName), whole);
    (void)verify(fs_, path_);
    State loaded;
    // The state is intact, so it must load correctly.
    if (load_whole(fs_, path_, table_, loaded).ok()) {
      ASSERT_TRUE(same_bits(loaded, state_))
          << "seed " << seed_ << " round " << i;
    }
  }
}

TEST_F(CheckpointFuzz, AnyChangeOfAShardIsRefused) {
  for (uint64_t i = 0; i < 1500 * rounds_; ++i) {
    const std::string file = path_join(path_, manifest::shard_name(i % 2));
    const std::string good = get(file);
    const std::string bad = mutate(good);
    if (bad == good) continue;
    put(file, bad);
    State loaded;
    EXPECT_EQ(load_whole(fs_, path_, table_, loaded).code(), Code::kCorrupt)
        << "seed " << seed_ << " round " << i;
    put(file, good);
  }
}

TEST_F(CheckpointFuzz, AnyChangeOfASidecarIsRefused) {
  const SaveId id{.step = 2, .generation = 1};
  ASSERT_OK(write_shards(fs_, "c", id, table_, state_, 1));
  const std::string dir = tmp_path("c", id);
  const std::string file = path_join(dir, manifest::sidecar_name(0));
  const std::string good = get(file);
  for (uint64_t i = 0; i < 5000 * rounds_; ++i) {
    const std::string bad = mutate(good);
    if (bad == good) continue;
    put(file, bad);
    ASSERT_EQ(read_sidecar(fs_, dir, 0).status().code(), Code::kCorrupt)
        << "seed " << seed_ << " round " << i;
  }
}

}  // namespace
}  // namespace remesh::store
