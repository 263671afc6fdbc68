// Saving and loading on the real file system.
#include "checkpoint/store/store.h"

#include <hdf5.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "checkpoint/store/blocks.h"
#include "checkpoint/store/hdf5_file.h"
#include "checkpoint/store/verify.h"
#include "tests/testing/expect.h"
#include "tests/testing/llama.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/checkpoint/fixture.h"

namespace remesh::store {
namespace {

using geometry::ParamTable;

constexpr uint64_t kSeed = 77;

class StoreTest : public testing::Test {
 protected:
  static void spill(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  }

  std::unique_ptr<FileSystem> fs_ = posix_file_system();
  const ParamTable table_ = ParamTable::make(tiny_model());
  const State state_ = random_state(table_.num_elements(), kSeed);
  const TempDir dir_;
  const std::string root_ = dir_.path();
  const std::string folder_ = root_ + "/run/checkpoints";
};

TEST_F(StoreTest, LoadsBitExactUnderAnyOtherNumberOfRanks) {
  const int64_t n = table_.num_elements();
  for (int k = 1; k <= 5; ++k) {
    const SaveId id{.step = k, .generation = 1};
    ASSERT_OK_AND(const auto done, save(*fs_, folder_, id, table_, state_, k,
                                        {.keep_latest_k = 9}));
    EXPECT_OK(done.cleanup);
    ASSERT_OK_AND(const auto m, manifest::read_checkpoint(*fs_, done.path));
    EXPECT_EQ(m.SerializeAsString(), done.manifest.SerializeAsString());
    for (int other = 1; other <= 5; ++other) {
      State loaded(n, 42);
      for (int r = 0; r < other; ++r) {
        const auto [begin, end] = share(n, other, r);
        // Each rank has memory only for its own share.
        const auto count = static_cast<size_t>(end - begin);
        State mine(end - begin);
        ASSERT_OK(load(*fs_, done.path, m, table_,
                       pieces_of_range(table_, begin, end, begin),
                       mine.view()));
        std::copy_n(mine.weights.begin(), count,
                    loaded.weights.begin() + begin);
        std::copy_n(mine.exp_avg.begin(), count,
                    loaded.exp_avg.begin() + begin);
        std::copy_n(mine.exp_avg_sq.begin(), count,
                    loaded.exp_avg_sq.begin() + begin);
      }
      EXPECT_TRUE(same_bits(loaded, state_)) << k << " to " << other;
    }
  }
}

TEST_F(StoreTest, LoadsBlocksOfColumnsAndTouchesNothingElse) {
  ASSERT_OK_AND(const auto done,
                save(*fs_, folder_, {3, 1}, table_, state_, 3));
  for (size_t i = 0; i < table_.size(); ++i) {
    if (table_[i].shape.size() != 2) continue;
    const int64_t rows = table_[i].shape[0], cols = table_[i].shape[1];
    const int64_t width = cols - cols / 2 - 1;
    const geometry::Piece piece{
        .param = i,
        .rect = {1, cols / 2, rows - 2, width},
        .row_stride = width + 2};  // a gap that must not change
    std::vector<float> out(static_cast<size_t>((rows - 2) * (width + 2)), 42);
    ASSERT_OK(load(*fs_, done.path, done.manifest, table_, std::span(&piece, 1),
                   {.exp_avg = out}));
    for (int64_t r = 0; r < rows - 2; ++r)
      for (int64_t c = 0; c < width + 2; ++c) {
        const float got = out[static_cast<size_t>(r * (width + 2) + c)];
        const float want =
            c >= width ? 42
                       : state_.exp_avg[static_cast<size_t>(
                             table_.offset(i) + (r + 1) * cols + cols / 2 + c)];
        ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want))
            << r << " " << c;
      }
  }
}

TEST_F(StoreTest, LargeParametersAreChunkedAndRoundTrip) {
  // Several chunks per parameter, an odd last one; a dim larger than a chunk.
  EXPECT_EQ(chunk_of({3, 5}), (Dims{3, 5}));
  EXPECT_EQ(chunk_of({kChunkElements + 1}), (Dims{kChunkElements / 2 + 1}));
  EXPECT_EQ(chunk_of({2, 2 * kChunkElements}), (Dims{1, kChunkElements}));
  for (const Dims& d : {Dims{5000, 1000}, Dims{7, 999999}, Dims{1, 1}}) {
    const Dims c = chunk_of(d);
    EXPECT_LE(c[0] * c[1], kChunkElements);
  }
  const ParamTable table =
      ParamTable::make(geometry::llama(1000, 1, 2, 1, 10, 2501, /*tied=*/true));
  const State state = random_state(table.num_elements(), kSeed);
  ASSERT_OK_AND(const auto done, save(*fs_, folder_, {1, 1}, table, state, 2));
  State loaded;
  ASSERT_OK(load_whole(*fs_, done.path, table, loaded));
  EXPECT_TRUE(same_bits(loaded, state));
  std::vector<uint64_t> told;
  uint64_t all = 0;
  const auto report =
      verify(*fs_, done.path, [&](uint64_t bytes, uint64_t total) {
        told.push_back(bytes);
        all = total;
      });
  EXPECT_TRUE(report.ok);
  ASSERT_GT(told.size(), 10U);
  EXPECT_TRUE(std::ranges::is_sorted(told));
  EXPECT_EQ(told.back(), all);
}

TEST_F(StoreTest, SameStateGivesTheSameBytes) {
  for (const char* folder : {"/a", "/b"})
    ASSERT_OK(save(*fs_, root_ + folder, {1, 1}, table_, state_, 2));
  for (const char* file :
       {"shard-00000.h5", "shard-00001.h5", "index.h5", "manifest.json"})
    EXPECT_EQ(read_whole(root_ + "/a/step-00000001/" + file),
              read_whole(root_ + "/b/step-00000001/" + file))
        << file;
}

// Runs `script` with h5py; returns its exit code.
int run_h5py(const std::string& script, const std::string& arguments) {
  const int rc = std::system(("cd / && /usr/bin/python3 - " + arguments +
                              " <<'END'\n" + script + "\nEND\n")
                                 .c_str());
  return WIFEXITED(rc) ? WEXITSTATUS(rc) : 255;
}

TEST_F(StoreTest, OtherProgramsReadEveryParameterFromTheIndex) {
  for (int k : {1, 3}) {
    ASSERT_OK_AND(const auto done,
                  save(*fs_, folder_, {k, 1}, table_, state_, k));
    std::string names;
    for (size_t i = 0; i < table_.size(); ++i) names += table_[i].name + "\n";
    spill(root_ + "/names", names);
    const auto raw = [](const std::vector<float>& v) {
      return std::string(reinterpret_cast<const char*>(v.data()),
                         v.size() * sizeof(float));
    };
    spill(root_ + "/weights", raw(state_.weights));
    spill(root_ + "/exp_avg", raw(state_.exp_avg));
    spill(root_ + "/exp_avg_sq", raw(state_.exp_avg_sq));
    const int rc = run_h5py(R"(
import sys, os, h5py, numpy
root, path = sys.argv[1:]
names = open(root + '/names').read().split()
f = h5py.File(path + '/index.h5', 'r')
assert f.attrs['job'] in ('test', b'test'), f.attrs['job']
for tensor in ('weights', 'exp_avg', 'exp_avg_sq'):
    assert sorted(f[tensor]) == sorted(names)
    flat = numpy.concatenate([f[tensor][n][...].ravel() for n in names])
    want = numpy.fromfile(root + '/' + tensor, '<f4')
    assert (flat.view('u4') == want.view('u4')).all(), tensor
n = f['weights/model.embed_tokens.weight']
assert n.shape == (11, 8) and n.dtype == numpy.float32
# Without its shard a slice reads as NaN, or the parameter fails to open.
os.rename(path + '/shard-00000.h5', root + '/away')
g = h5py.File(path + '/index.h5', 'r')
try:
    assert numpy.isnan(g['weights/model.embed_tokens.weight'][0]).all()
except KeyError:
    pass
os.rename(root + '/away', path + '/shard-00000.h5')
)",
                            root_ + " " + done.path);
    EXPECT_EQ(rc, 0);
  }
}

TEST_F(StoreTest, CompressedShardsAreSmallerAndLoadUnderAnyRanks) {
  // Several chunks per parameter, an odd last one, noise in the moments.
  const ParamTable table =
      ParamTable::make(geometry::llama(1000, 1, 2, 1, 10, 1301, /*tied=*/true));
  State state = random_state(table.num_elements(), kSeed);
  for (size_t i = 0; i < state.weights.size(); ++i) {
    state.weights[i] = static_cast<float>(i % 1000) * 1e-3F;
    state.exp_avg[i] = 0;
  }
  const auto plain = save(*fs_, folder_, {1, 1}, table, state, 2);
  const auto zlib =
      save(*fs_, folder_, {2, 1}, table, state, 3, {}, Compression::kZlib);
  ASSERT_TRUE(plain.ok() && zlib.ok()) << zlib.status().to_string();
  const auto bytes = [](const CommitResult& c) {
    uint64_t n = 0;
    for (const pb::ShardFile& f : c.manifest.shards()) n += f.bytes();
    return n;
  };
  EXPECT_LT(bytes(*zlib), bytes(*plain) * 6 / 10);
  State loaded;
  ASSERT_OK(load_whole(*fs_, zlib->path, table, loaded));
  EXPECT_TRUE(same_bits(loaded, state));
  // A part across the edges of chunks.
  const int64_t begin = 1000 * 1000 - 77, end = 1200 * 1000 + 5;
  State part(end - begin);
  ASSERT_OK(load(*fs_, zlib->path, zlib->manifest, table,
                 pieces_of_range(table, begin, end, begin), part.view()));
  EXPECT_TRUE(std::equal(part.weights.begin(), part.weights.end(),
                         state.weights.begin() + begin));
  const VerifyReport report = verify(*fs_, zlib->path);
  EXPECT_TRUE(report.ok) << describe(report);
  EXPECT_FALSE(parse_compression("lz4").ok());
  EXPECT_EQ(*parse_compression("zlib"), Compression::kZlib);
  EXPECT_EQ(*parse_compression(""), Compression::kNone);
}

TEST_F(StoreTest, VerifyNamesTheDatasetAndItsRows) {
  const ParamTable table =
      ParamTable::make(geometry::llama(500, 1, 2, 1, 10, 6000, /*tied=*/true));
  State state = random_state(table.num_elements(), kSeed);
  for (const Compression how : {Compression::kNone, Compression::kZlib}) {
    const SaveId id{.step = how == Compression::kNone ? 1 : 2, .generation = 1};
    ASSERT_OK_AND(const auto done,
                  save(*fs_, folder_, id, table, state, 1, {}, how));
    const std::string path = done.path + "/shard-00000.h5";
    const std::string good = read_whole(path);
    // Within the embedding's first moment, far from other data. It has 3
    // million elements, 2000 bytes per row: this is about row 3000.
    std::string bad = good;
    const size_t at = good.size() / 3 + 6000000;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    spill(path, bad);
    const VerifyReport report = verify(*fs_, done.path);
    EXPECT_FALSE(report.ok);
    ASSERT_EQ(report.problems.size(), 1U) << describe(report);
    const std::string& problem = report.problems[0];
    for (const char* word : {"shard-00000.h5", "bytes ",
                             "/exp_avg/model.embed_tokens.weight.0 rows "})
      EXPECT_HAS(problem, word);
    State loaded;
    const Status s = load_whole(*fs_, done.path, table, loaded);
    EXPECT_EQ(s.code(), Code::kCorrupt);
    for (const char* word :
         {"shard-00000.h5", "bytes ", "/exp_avg/model.embed_tokens.weight.0"})
      EXPECT_SAYS(s, word);
    // A rank that does not need that part still loads correctly.
    std::vector<float> norm(500);
    const geometry::Piece piece{
        .param = static_cast<size_t>(table.find("model.norm.weight")),
        .rect = {0, 0, 1, 500}};
    EXPECT_OK(load(*fs_, done.path, done.manifest, table, std::span(&piece, 1),
                   {.weights = norm}));
  }
}

// --- damage ---------------------------------------------------------------

TEST_F(StoreTest, EveryKindOfDamageIsNamed) {
  ASSERT_OK_AND(const auto done,
                save(*fs_, folder_, {1, 1}, table_, state_, 2));
  const auto expect_damage = [&](const std::string& name, bool cheap) {
    ASSERT_OK_AND(const auto found, manifest::scan(*fs_, folder_));
    EXPECT_EQ(found[0].status.ok(), !cheap) << name;
    if (cheap) {
      EXPECT_SAYS(found[0].status, name);
    }
    State loaded;
    const Status s = load_whole(*fs_, done.path, table_, loaded);
    EXPECT_FALSE(s.ok());
    EXPECT_SAYS(s, name);
    const VerifyReport report = verify(*fs_, done.path);
    EXPECT_FALSE(report.ok);
    EXPECT_HAS(describe(report), name);
  };
  for (const char* name :
       {"shard-00000.h5", "shard-00001.h5", "manifest.json"}) {
    const std::string path = path_join(done.path, name);
    const std::string good = read_whole(path);
    std::filesystem::remove(path);
    expect_damage(name, true);
    for (const size_t keep : {size_t{0}, good.size() / 2, good.size() - 1}) {
      spill(path, good.substr(0, keep));
      expect_damage(name, true);
    }
    spill(path, good + "x");
    expect_damage(name, true);
    std::string flipped = good;
    flipped[good.size() / 2] ^= 4;
    spill(path, flipped);
    expect_damage(name, std::string(name) == "manifest.json");
    std::filesystem::remove(path);
    std::filesystem::create_directory(path);  // not a file
    expect_damage(name, true);
    std::filesystem::remove(path);
    spill(path, good);
  }
  EXPECT_TRUE(verify(*fs_, done.path).ok);
  // Damage to the index is reported, but does not prevent a restore.
  const std::string index = path_join(done.path, "index.h5");
  spill(index, read_whole(index).substr(1));
  EXPECT_FALSE(verify(*fs_, done.path).ok);
  State loaded;
  EXPECT_OK(load_whole(*fs_, done.path, table_, loaded));
}

TEST_F(StoreTest, ASwappedShardOfAnotherStepIsNamed) {
  const auto one = save(*fs_, folder_, {1, 1}, table_, state_, 1);
  const auto two = save(*fs_, folder_, {2, 1}, table_, state_, 1);
  ASSERT_TRUE(one.ok() && two.ok());
  std::filesystem::copy_file(one->path + "/shard-00000.h5",
                             two->path + "/shard-00000.h5",
                             std::filesystem::copy_options::overwrite_existing);
  State loaded;
  const Status s = load_whole(*fs_, two->path, table_, loaded);
  EXPECT_EQ(s.code(), Code::kCorrupt);
  EXPECT_SAYS(s, "shard-00000.h5");
}

TEST_F(StoreTest, VerifyWarnsOfNonFiniteWeightsAndStrayFiles) {
  State state(table_.num_elements(), 1.0F);
  state.weights[3] = std::numeric_limits<float>::quiet_NaN();
  state.weights[500] = std::numeric_limits<float>::infinity();
  state.exp_avg[9] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_OK_AND(const auto done, save(*fs_, folder_, {1, 1}, table_, state, 2));
  spill(done.path + "/notes.txt", "hello");
  const VerifyReport report = verify(*fs_, done.path);
  EXPECT_TRUE(report.ok) << describe(report);
  EXPECT_EQ(report.num_nonfinite, 2);
  EXPECT_EQ(report.warnings.size(), 2U) << describe(report);
  EXPECT_EQ(report.num_files, 3);
  EXPECT_EQ(report.num_elements, table_.num_elements());
  const auto json = nlohmann::json::parse(describe_json(report));
  EXPECT_EQ(json["nonfinite"], 2);
  EXPECT_EQ(nlohmann::json::parse(describe_json(done.manifest))["step"], 1);
  EXPECT_HAS(describe(done.manifest), "shard-00001.h5");
}

TEST_F(StoreTest, AdaptersAreDescribedAsSuch) {
  pb::Manifest m = manifest_of(table_, {1, 1});
  m.set_base("/models/base");
  m.mutable_model()->set_arch("qwen3");
  m.mutable_model()->set_head_dim(6);
  m.mutable_model()->set_lora_rank(4);
  m.mutable_model()->set_lora_alpha(8);
  for (const char* target : {"q_proj", "v_proj"})
    m.mutable_model()->add_lora_targets(target);
  const std::string text = describe(m);
  for (const char* line : {"model     qwen3 dim ",
                           "adapters  rank 4 alpha 8 on q_proj, v_proj; of the "
                           "model /models/base\n"})
    EXPECT_HAS(text, line);
  const auto json = nlohmann::json::parse(describe_json(m));
  EXPECT_EQ(json["base"], "/models/base");
  EXPECT_EQ(json["model"]["arch"], "qwen3");
  EXPECT_EQ(json["model"]["head_dim"], 6);
  EXPECT_EQ(json["model"]["lora_rank"], 4);
  EXPECT_EQ(json["model"]["lora_targets"].size(), 2U);
}

// --- commit ---------------------------------------------------------------

TEST_F(StoreTest, CommitWaitsForEveryShard) {
  const SaveId id{.step = 5, .generation = 2};
  ASSERT_OK(write_shards(*fs_, folder_, id, table_, state_, 3));
  EXPECT_TRUE(missing_shards(*fs_, folder_, id, 3).empty());
  EXPECT_EQ(missing_shards(*fs_, folder_, id, 5), (std::vector<int>{3, 4}));
  const auto early =
      commit(*fs_, folder_, manifest_of(table_, id), 5, table_, {});
  EXPECT_EQ(early.status().code(), Code::kUnavailable);
  EXPECT_SAYS(early, "rank 3, 4");
  // Shards that do not cover the model are refused too.
  EXPECT_EQ(commit(*fs_, folder_, manifest_of(table_, id), 2, table_, {})
                .status()
                .code(),
            Code::kCorrupt);
  EXPECT_TRUE(manifest::scan(*fs_, folder_)->empty());
  EXPECT_OK(commit(*fs_, folder_, manifest_of(table_, id), 3, table_, {}));
}

TEST_F(StoreTest, ElementsMayChangeOnceTaken) {
  for (const Compression c : {Compression::kNone, Compression::kZlib}) {
    const SaveId id{.step = c == Compression::kNone ? 1 : 2, .generation = 1};
    State changing = state_;
    int taken = 0;
    WriteOptions options{.compression = c};
    options.stream.room = uint64_t{1} << 40;
    options.taken = [&] {
      ++taken;
      for (auto* v :
           {&changing.weights, &changing.exp_avg, &changing.exp_avg_sq})
        std::fill(v->begin(), v->end(), 7.0F);
    };
    ASSERT_OK(write_shard(*fs_, folder_, id, 0, table_,
                          pieces_of_range(table_, 0, table_.num_elements()),
                          changing.view(), options));
    EXPECT_EQ(taken, 1);
    ASSERT_OK_AND(
        const auto done,
        commit(*fs_, folder_, manifest_of(table_, id), 1, table_, {}));
    State loaded;
    ASSERT_OK(load_whole(*fs_, done.path, table_, loaded));
    EXPECT_TRUE(same_bits(loaded, state_));
  }
}

TEST_F(StoreTest, CommitKeepsAValidCheckpointAndReplacesADamagedOne) {
  ASSERT_OK_AND(const auto first,
                save(*fs_, folder_, {1, 1}, table_, state_, 2));
  ASSERT_OK_AND(const auto again,
                save(*fs_, folder_, {1, 2}, table_, state_, 3));
  EXPECT_TRUE(again.existed);
  EXPECT_EQ(again.manifest.generation(), 1);
  // A flipped byte that only a full read detects.
  std::string bytes = read_whole(first.path + "/shard-00001.h5");
  bytes[bytes.size() / 2] ^= 1;
  spill(first.path + "/shard-00001.h5", bytes);
  ASSERT_OK_AND(const auto mended,
                save(*fs_, folder_, {1, 3}, table_, state_, 3));
  EXPECT_FALSE(mended.existed);
  EXPECT_TRUE(verify(*fs_, mended.path).ok);
  EXPECT_EQ(*fs_->list(folder_), (std::vector<std::string>{"step-00000001"}));
}

// Somebody has copied them into the folder. The run does not save over them,
// take them for its own, or remove them.
TEST_F(StoreTest, CheckpointsOfAnotherRunAreLeftAlone) {
  const auto save_as = [&](uint64_t run, int64_t step, int64_t keep) {
    const SaveId id{.step = step, .generation = 1};
    EXPECT_OK(write_shards(*fs_, folder_, id, table_, state_, 1));
    pb::Manifest m = manifest_of(table_, id);
    m.set_run_id(run);
    return commit(*fs_, folder_, m, 1, table_, {.keep_latest_k = keep})
        .status();
  };
  for (const int64_t step : {2, 3}) ASSERT_OK(save_as(1, step, 2));
  const Status taken = save_as(2, 2, 2);
  EXPECT_EQ(taken.code(), Code::kCorrupt);
  EXPECT_SAYS(taken, "step-00000002: belongs to another run");
  ASSERT_OK(abandon(*fs_, folder_, {2, 1}));
  ASSERT_OK(
      fs_->rename(folder_ + "/step-00000003", folder_ + "/.old-step-00000003"));
  for (const int64_t step : {5, 6}) ASSERT_OK(save_as(2, step, 1));
  EXPECT_EQ(*fs_->list(folder_),
            (std::vector<std::string>{".old-step-00000003", "step-00000002",
                                      "step-00000006"}));
}

TEST_F(StoreTest, CommitAppliesRetentionAndRemovesOlderTemporaries) {
  ASSERT_OK(write_shards(*fs_, folder_, {9, 1}, table_, state_, 1));
  ASSERT_OK(write_shards(*fs_, folder_, {9, 4}, table_, state_, 1));
  ASSERT_OK(fs_->create_dirs(folder_ + "/.old-step-00000001/x"));
  ASSERT_OK(fs_->create_dirs(folder_ + "/mine"));
  for (int step = 1; step <= 7; ++step) {
    ASSERT_OK_AND(const auto done,
                  save(*fs_, folder_, {step, 3}, table_, state_, 1,
                       {.keep_latest_k = 2, .keep_every_n = 3}));
    EXPECT_OK(done.cleanup);
    if (step == 6) {
      EXPECT_EQ(done.removed, (std::vector<int64_t>{4}));
    }
  }
  EXPECT_EQ(*fs_->list(folder_),
            (std::vector<std::string>{".tmp-step-00000009.g4", "mine",
                                      "step-00000003", "step-00000006",
                                      "step-00000007"}));
  ASSERT_OK(abandon(*fs_, folder_, {9, 4}));
  EXPECT_FALSE(fs_->exists(folder_ + "/.tmp-step-00000009.g4"));
}

// A user moved checkpoints to an archive and left links to them.
TEST_F(StoreTest, RetentionRemovesALinkAndKeepsWhatItLeadsTo) {
  namespace fs = std::filesystem;
  const std::string archive = root_ + "/archive";
  fs::create_directories(archive + "/old");
  spill(archive + "/old/file", "kept");
  for (int step = 1; step <= 3; ++step) {
    ASSERT_OK_AND(const auto done, save(*fs_, folder_, {step, 3}, table_,
                                        state_, 1, {.keep_latest_k = 1}));
    EXPECT_OK(done.cleanup);
    EXPECT_EQ(done.removed.size(), step == 1 ? 0u : 1u);
    const std::string name = manifest::step_name(step);
    const std::string kept = fs::path(archive) / name;
    fs::rename(folder_ + "/" + name, kept);
    fs::create_directory_symlink(kept, folder_ + "/" + name);
    // Removal was interrupted there.
    fs::create_directory_symlink(archive + "/old",
                                 folder_ + "/.old-step-00000009");
  }
  EXPECT_EQ(fs_->list(folder_)->size(), 2u);
  for (int step = 1; step <= 3; ++step)
    EXPECT_TRUE(verify(*fs_, archive + "/" + manifest::step_name(step)).ok);
  EXPECT_EQ(read_whole(archive + "/old/file"), "kept");
}

// Without a commit that succeeds: it may need the room.
TEST_F(StoreTest, WhatAnOlderGenerationDidNotFinishIsRemoved) {
  for (const int64_t generation : {1, 3, 4})
    ASSERT_OK(write_shards(*fs_, folder_, {9, generation}, table_, state_, 1));
  ASSERT_OK(save(*fs_, folder_, {2, 2}, table_, state_, 1));
  ASSERT_OK(remove_unfinished(*fs_, folder_, 3));
  EXPECT_EQ(
      *fs_->list(folder_),
      (std::vector<std::string>{".tmp-step-00000009.g3",
                                ".tmp-step-00000009.g4", "step-00000002"}));
  ASSERT_OK(manifest::claim(*fs_, folder_, 5));
  EXPECT_EQ(remove_unfinished(*fs_, folder_, 4).code(), Code::kCancelled);
  EXPECT_TRUE(fs_->exists(folder_ + "/.tmp-step-00000009.g3"));
}

// Somebody else's checkpoint must not read this user's files into the weights.
TEST_F(StoreTest, ElementsInOtherFilesAreRefused) {
  ASSERT_OK(fs_->create_dirs(root_));
  const std::string secret = root_ + "/secret", other = root_ + "/other.h5",
                    path = root_ + "/shard.h5";
  spill(secret, "0123456789abcdef");
  const hsize_t count = 4;
  const hid_t space = H5Screate_simple(1, &count, nullptr);
  const auto make = [&](hid_t file, const char* name, hid_t plist) {
    H5Dclose(H5Dcreate2(file, name, H5T_IEEE_F32LE, space, H5P_DEFAULT, plist,
                        H5P_DEFAULT));
  };
  const auto create = [](const std::string& at) {
    return H5Fcreate(at.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
  };
  const hid_t beside = create(other);
  make(beside, "x", H5P_DEFAULT);
  H5Fclose(beside);
  const hid_t file = create(path);
  const hid_t external = H5Pcreate(H5P_DATASET_CREATE);
  H5Pset_external(external, secret.c_str(), 0, 16);
  make(file, "external", external);
  const hid_t virtual_set = H5Pcreate(H5P_DATASET_CREATE);
  H5Pset_virtual(virtual_set, space, other.c_str(), "x", space);
  make(file, "virtual", virtual_set);
  H5Lcreate_external(other.c_str(), "x", file, "link", H5P_DEFAULT,
                     H5P_DEFAULT);
  make(file, "own", H5P_DEFAULT);
  H5Pclose(virtual_set);
  H5Pclose(external);
  H5Sclose(space);
  H5Fclose(file);
  ASSERT_OK_AND(auto opened, Hdf5Reader::open(fs_->open(path).value(), path));
  for (const char* name : {"external", "virtual", "link"})
    EXPECT_EQ(opened->dims(name).status().code(), Code::kCorrupt) << name;
  EXPECT_OK(opened->dims("own"));
}

TEST_F(StoreTest, Hdf5LoadsNoPlugIns) {
  ASSERT_OK(save(*fs_, folder_, {1, 1}, table_, state_, 1));
  unsigned state = ~0U;
  ASSERT_GE(H5PLget_loading_state(&state), 0);
  EXPECT_EQ(state, 0U);
}

// Generation 1 is cut off and keeps saving; 2 continues from its step 3.
TEST_F(StoreTest, TheNewerOfTwoBranchesIsKept) {
  const auto save_as = [&](int64_t generation, int64_t step) {
    std::optional<manifest::Origin> origin;
    if (generation == 2) origin = {.step = 3, .generation = 1};
    return save(*fs_, folder_, {step, generation}, table_, state_, 1,
                {.keep_latest_k = 2}, Compression::kNone, origin);
  };
  const auto steps = [&] {
    std::map<int64_t, int64_t> generation;
    const auto found = manifest::scan(*fs_, folder_);
    for (const manifest::Found& f : *found)
      generation[f.step] = f.manifest.generation();
    return generation;
  };
  using Steps = std::map<int64_t, int64_t>;
  for (const int64_t step : {2, 3, 5, 7}) ASSERT_OK(save_as(1, step));
  EXPECT_EQ(steps(), (Steps{{5, 1}, {7, 1}}));
  ASSERT_OK(save_as(2, 4));
  EXPECT_EQ(steps(), (Steps{{4, 2}, {5, 1}, {7, 1}}));
  ASSERT_OK_AND(const auto again, save_as(2, 5));
  EXPECT_FALSE(again.existed);
  EXPECT_EQ(steps(), (Steps{{4, 2}, {5, 2}, {7, 1}}));
  // Without a claim, too, a newer generation's checkpoint is kept.
  EXPECT_EQ(save_as(1, 5).status().code(), Code::kCancelled);
  ASSERT_OK(save_as(1, 9));
  EXPECT_EQ(steps(), (Steps{{4, 2}, {5, 2}, {7, 1}, {9, 1}}));
  ASSERT_OK(manifest::claim(*fs_, folder_, 2));
  const auto before = *fs_->list(folder_);
  EXPECT_EQ(save_as(1, 10).status().code(), Code::kCancelled);
  ASSERT_OK(abandon(*fs_, folder_, {10, 1}));
  EXPECT_EQ(*fs_->list(folder_), before);
  ASSERT_OK(save_as(2, 8));
  EXPECT_EQ(steps(), (Steps{{5, 2}, {8, 2}, {9, 1}}));
}

// A user keeps one of a branch that was abandoned, and the job comes to the
// same step again.
TEST_F(StoreTest, WhatIsKeptMakesWayAndStays) {
  const auto save_as = [&](int64_t generation) {
    std::optional<manifest::Origin> origin;
    if (generation == 2) origin = {.step = 3, .generation = 1};
    return save(*fs_, folder_, {5, generation}, table_, state_, 1,
                {.keep_latest_k = 2}, Compression::kNone, origin);
  };
  ASSERT_OK(save_as(1));
  const std::string step = folder_ + "/step-00000005";
  ASSERT_OK(
      write_file_atomically(*fs_, step + "/" + manifest::kKeepName, "best\n"));
  ASSERT_OK_AND(const auto again, save_as(2));
  EXPECT_SAYS(again.cleanup, "is kept");
  ASSERT_OK_AND(const auto saved, manifest::read_checkpoint(*fs_, step));
  EXPECT_EQ(saved.generation(), 2);
  ASSERT_OK_AND(const auto kept,
                manifest::read_checkpoint(
                    *fs_, folder_ + "/kept-step-00000005-before-generation-2"));
  EXPECT_EQ(kept.generation(), 1);
}

TEST_F(StoreTest, TwoThreadsSaveConcurrently) {
  std::vector<std::thread> threads;
  std::vector<Status> outcome(4);
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const std::string folder = root_ + "/" + std::to_string(t);
      const auto fs = posix_file_system();
      for (int step = 1; step <= 2; ++step) {
        const auto done = save(*fs, folder, {step, 1}, table_, state_, 2);
        outcome[t] = done.status();
        State loaded;
        if (done.ok()) outcome[t] = load_whole(*fs, done->path, table_, loaded);
        if (outcome[t].ok() && !same_bits(loaded, state_))
          outcome[t] = internal("differs");
      }
    });
  for (std::thread& t : threads) t.join();
  for (const Status& s : outcome) EXPECT_OK(s);
}

TEST_F(StoreTest, AFullDiskIsAnErrorThatLosesNothing) {
  const std::string small = root_ + "/small";
  ASSERT_OK(fs_->create_dirs(small));
  if (mount("none", small.c_str(), "tmpfs", 0, "size=256k") != 0)
    GTEST_SKIP() << "needs mount";
  const std::string folder = small + "/checkpoints";
  const auto first = save(*fs_, folder, {1, 1}, table_, state_, 2);
  const ParamTable big =
      ParamTable::make(geometry::llama(64, 2, 2, 2, 128, 300));
  const State state = random_state(big.num_elements(), kSeed);
  const auto second = save(*fs_, folder, {2, 1}, big, state, 2);
  const auto found = manifest::scan(*fs_, folder);
  const VerifyReport report = verify(*fs_, folder + "/step-00000001");
  const bool abandoned = abandon(*fs_, folder, {2, 1}).ok();
  const auto third = save(*fs_, folder, {3, 1}, table_, state_, 2);
  EXPECT_EQ(umount2(small.c_str(), MNT_DETACH), 0);
  ASSERT_OK(first);
  EXPECT_EQ(second.status().code(), Code::kExhausted)
      << second.status().to_string();
  EXPECT_SAYS(second, "No space left");
  EXPECT_EQ(found->size(), 1U);
  EXPECT_TRUE(report.ok) << describe(report);
  EXPECT_TRUE(abandoned);
  EXPECT_OK(third);
}

TEST_F(StoreTest, ErrorsNameThePathAndHdf5NeverPrints) {
  testing::internal::CaptureStderr();
  spill(root_ + "/bad.h5", "not an HDF5 file at all");
  const auto bad =
      Hdf5Reader::open(fs_->open(root_ + "/bad.h5").value(), root_ + "/bad.h5");
  EXPECT_EQ(bad.status().code(), Code::kCorrupt);
  EXPECT_SAYS(bad, "bad.h5");
  spill(root_ + "/file", "");
  EXPECT_FALSE(
      write_shard(*fs_, root_ + "/file", {1, 1}, 0, table_, {}, {}).ok());
  const geometry::Piece outside{.param = 0, .rect = {0, 0, 1, 1000}};
  EXPECT_EQ(
      write_shard(*fs_, folder_, {1, 1}, 0, table_, std::span(&outside, 1), {})
          .status()
          .code(),
      Code::kInvalidArgument);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

}  // namespace
}  // namespace remesh::store
