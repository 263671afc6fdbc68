#include "checkpoint/manifest/manifest.h"

#include <fmt/format.h>
#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "checkpoint/manifest/branch.h"
#include "checkpoint/manifest/read_plan.h"
#include "checkpoint/manifest/scan.h"
#include "parallel/geometry/sharding.h"
#include "tests/testing/expect.h"
#include "tests/testing/memory_file_system.h"
#include "tests/unit/checkpoint/fixture.h"

namespace remesh::manifest {
namespace {

using geometry::ParamTable;
using geometry::Rect;

constexpr uint64_t kSeed = 20240601;

pb::Manifest example() {
  pb::Manifest m;
  m.set_format(kFormat);
  m.set_job("a \"job\" with \n and ü");
  m.set_step(100);
  m.set_generation(3);
  m.mutable_mesh()->set_dp(2);
  *m.mutable_model() = model_info(store::tiny_model());
  m.set_tokens(std::numeric_limits<int64_t>::max());
  m.set_seed(std::numeric_limits<uint64_t>::max());
  pb::ShardFile* f = m.add_shards();
  f->set_name(shard_name(0));
  f->set_rank(0);
  f->set_bytes(12345);
  f->set_data_bytes(12329);
  f->set_block_bytes(1 << 18);
  f->set_xxh128(std::string(32, 'a'));
  const ParamTable table = ParamTable::make(store::tiny_model());
  for (const geometry::ParamSpec& spec : table.specs())
    *f->add_slices() = make_slice(spec, full_rect(spec));
  return m;
}

TEST(Names, ParseOnlyWhatTheyPrint) {
  EXPECT_EQ(step_name(100), "step-00000100");
  EXPECT_EQ(tmp_name({100, 3}), ".tmp-step-00000100.g3");
  for (const int64_t step : {int64_t{0}, int64_t{7}, int64_t{99999999},
                             int64_t{100000000}, int64_t{1} << 60}) {
    EXPECT_EQ(parse_step_name(step_name(step)), step);
    EXPECT_EQ(parse_tmp_name(tmp_name({step, 12})), (TmpName{step, 12}));
    EXPECT_EQ(parse_old_name(old_name(step)), step);
  }
  for (const char* bad :
       {"", "step-", "step-100", "step-000000100", "step-0000010x",
        "step--0000100", "step-+0000100", " step-00000100", "step-00000100 ",
        "step-99999999999999999999", ".tmp-step-00000100.g3"})
    EXPECT_FALSE(parse_step_name(bad)) << bad;
  for (const char* bad : {"", ".tmp-", ".tmp-step-00000100", ".tmp-step-1.g1",
                          ".tmp-step-00000100.g", ".tmp-step-00000100.g01",
                          ".tmp-step-00000100.g1x", "step-00000100"})
    EXPECT_FALSE(parse_tmp_name(bad)) << bad;
}

TEST(Encoding, RoundTripsAndIsJson) {
  const pb::Manifest m = example();
  const std::string text = encode(m);
  ASSERT_OK_AND(const auto back, decode(text));
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(m, back));
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json["manifest"]["step"], "100");
  EXPECT_EQ(json["xxh128"].get<std::string>().size(), 32U);
}

TEST(Encoding, DoublesRoundTripExactly) {
  std::mt19937_64 rng(kSeed);
  std::vector<double> values = {0.0,
                                1e-5,
                                0.1,
                                5e-324,
                                1.7e308,
                                std::numeric_limits<double>::infinity(),
                                -std::numeric_limits<double>::infinity()};
  for (int i = 0; i < 3000; ++i) {
    const uint64_t bits = rng();
    double x = 0;
    std::memcpy(&x, &bits, sizeof x);
    if (!std::isnan(x)) values.push_back(x);
  }
  pb::Manifest m = example();
  for (const double x : values) m.add_recent()->set_loss(x);
  m.add_recent()->set_loss(std::numeric_limits<double>::quiet_NaN());
  ASSERT_OK_AND(const auto back, decode(encode(m)));
  for (size_t i = 0; i < values.size(); ++i) {
    const double x = back.recent(static_cast<int>(i)).loss();
    EXPECT_EQ(std::bit_cast<uint64_t>(x), std::bit_cast<uint64_t>(values[i]))
        << values[i];
  }
  EXPECT_TRUE(std::isnan(back.recent(m.recent_size() - 1).loss()));
}

TEST(Encoding, EveryChangedByteAndEveryTruncationIsDetected) {
  pb::Manifest m = example();
  m.mutable_shards(0)->clear_slices();
  const std::string text = encode(m);
  for (size_t i = 0; i < text.size(); ++i) {
    for (const char flip : {1, 32, -128}) {
      std::string bad = text;
      bad[i] = static_cast<char>(bad[i] ^ flip);
      EXPECT_EQ(decode(bad).status().code(), Code::kCorrupt) << i;
    }
    EXPECT_FALSE(decode(text.substr(0, i)).ok()) << i;
  }
  EXPECT_FALSE(decode(text + " ").ok());
}

TEST(Encoding, RefusesInvalidContent) {
  const auto refused = [](auto change) {
    pb::Manifest m = example();
    change(m);
    const Status s = decode(encode(m)).status();
    EXPECT_EQ(s.code(), Code::kCorrupt) << s.to_string();
    return s.message();
  };
  for (const int format : {1, 3})
    EXPECT_EQ(refused([&](auto& m) { m.set_format(format); }),
              fmt::format("format {}, this version reads format 2", format));
  refused([](auto& m) { m.mutable_shards(0)->clear_block_bytes(); });
  EXPECT_HAS(refused([](auto& m) {
               m.mutable_shards(0)->set_name("../../etc/passwd");
             }),
             "passwd");
  refused([](auto& m) { m.mutable_shards(0)->set_rank(1); });
  refused([](auto& m) { m.mutable_shards(0)->set_xxh128("x"); });
  refused([](auto& m) { m.set_step(-1); });
  refused(
      [](auto& m) { m.mutable_shards(0)->mutable_slices(0)->add_start(0); });
  for (const int64_t count : {int64_t{0}, int64_t{1} << 32})
    refused([&](auto& m) {
      m.mutable_shards(0)->mutable_slices(0)->set_count(0, count);
    });
  refused([](auto& m) {
    m.mutable_shards(0)->mutable_slices(0)->set_start(0, int64_t{1} << 32);
  });
}

// --- coverage, against counting every element ------------------------------

// Random guillotine cuts: an exact tiling of the parameter.
void cut(const Rect& box, std::mt19937_64& rng, int depth,
         std::vector<Rect>& out) {
  const bool rows = rng() % 2 == 0;
  const int64_t extent = rows ? box.rows : box.cols;
  if (depth == 0 || extent < 2) {
    out.push_back(box);
    return;
  }
  const auto at = 1 + static_cast<int64_t>(rng() % (extent - 1));
  Rect a = box, b = box;
  (rows ? a.rows : a.cols) = at;
  (rows ? b.rows : b.cols) -= at;
  (rows ? b.row : b.col) += at;
  cut(a, rng, depth - 1, out);
  cut(b, rng, depth - 1, out);
}

pb::Manifest random_tiling(const ParamTable& table, int shards,
                           std::mt19937_64& rng) {
  pb::Manifest m;
  for (int r = 0; r < shards; ++r) m.add_shards()->set_name(shard_name(r));
  for (const geometry::ParamSpec& spec : table.specs()) {
    std::vector<Rect> boxes;
    cut(full_rect(spec), rng, static_cast<int>(rng() % 4), boxes);
    for (const Rect& box : boxes)
      *m.mutable_shards(static_cast<int>(rng() % shards))->add_slices() =
          make_slice(spec, box);
  }
  return m;
}

// Naive twin: counts how often each element is stored.
bool covers_by_counting(const pb::Manifest& m, const ParamTable& table) {
  std::vector<int> count(static_cast<size_t>(table.num_elements()));
  for (const pb::ShardFile& f : m.shards())
    for (const pb::Slice& s : f.slices()) {
      const int i = table.find(s.param());
      if (i < 0) return false;
      const Rect all = full_rect(table[static_cast<size_t>(i)]);
      const Rect box = rect_of(s);
      for (int64_t r = box.row; r < box.row + box.rows; ++r)
        for (int64_t c = box.col; c < box.col + box.cols; ++c) {
          if (r >= all.rows || c >= all.cols) return false;
          ++count[static_cast<size_t>(table.offset(static_cast<size_t>(i)) +
                                      r * all.cols + c)];
        }
    }
  return std::all_of(count.begin(), count.end(), [](int n) { return n == 1; });
}

TEST(Coverage, AgreesWithCountingOnRandomTilingsRightAndWrong) {
  const ParamTable table = ParamTable::make(store::tiny_model());
  std::mt19937_64 rng(kSeed);
  int right = 0, wrong = 0;
  for (int trial = 0; trial < 600; ++trial) {
    pb::Manifest m = random_tiling(table, 1 + trial % 4, rng);
    pb::ShardFile& f =
        *m.mutable_shards(static_cast<int>(rng() % m.shards_size()));
    if (trial % 3 != 0 && f.slices_size() > 0) {
      pb::Slice& s =
          *f.mutable_slices(static_cast<int>(rng() % f.slices_size()));
      const int d = static_cast<int>(rng() % s.start_size());
      switch (rng() % 4) {
        case 0:
          s.set_start(d, s.start(d) + 1);
          break;
        case 1:
          s.set_count(d, s.count(d) + 1);
          break;
        case 2:
          if (s.count(d) > 1) s.set_count(d, s.count(d) - 1);
          break;
        default:
          *f.add_slices() = s;
      }
    }
    const bool expected = covers_by_counting(m, table);
    EXPECT_EQ(check_coverage(m, table).ok(), expected)
        << "seed " << kSeed << " trial " << trial;
    ++(expected ? right : wrong);
  }
  EXPECT_GT(right, 150);
  EXPECT_GT(wrong, 150);
}

TEST(Coverage, NamesWhatIsMissingOrDuplicated) {
  const ParamTable table = ParamTable::make(store::tiny_model());
  pb::Manifest m = example();
  m.mutable_shards(0)->mutable_slices()->RemoveLast();
  EXPECT_SAYS(check_coverage(m, table),
              "lm_head.weight: row 0, column 0 is in no shard");
  m = example();
  *m.mutable_shards(0)->add_slices() = m.shards(0).slices(1);
  EXPECT_SAYS(check_coverage(m, table),
              "input_layernorm.weight: row 0, column 0 is stored twice");
  m = example();
  m.mutable_shards(0)->mutable_slices(0)->set_param("what");
  EXPECT_SAYS(check_coverage(m, table), "'what'");
  m = example();
  m.mutable_shards(0)->mutable_slices(0)->set_start(
      0, std::numeric_limits<int64_t>::max());
  EXPECT_EQ(check_coverage(m, table).code(), Code::kCorrupt);
}

// Element i of a rectangle of a parameter, row by row: parameter, row, column.
using Element = std::array<int64_t, 3>;
Element element(int64_t param, const Rect& rect, int64_t i) {
  return {param, rect.row + i / rect.cols, rect.col + i % rect.cols};
}

TEST(PlanReads, FillsEveryWantedElementOnceWhateverTheSlicing) {
  const ParamTable table = ParamTable::make(store::tiny_model());
  std::mt19937_64 rng(kSeed);
  for (int trial = 0; trial < 100; ++trial) {
    const pb::Manifest m = random_tiling(table, 1 + trial % 5, rng);
    const pb::Manifest other = random_tiling(table, 1, rng);
    std::vector<geometry::Piece> wanted;
    for (const pb::Slice& slice : other.shards(0).slices())
      wanted.push_back({.param = static_cast<size_t>(table.find(slice.param())),
                        .rect = rect_of(slice)});
    wanted.resize(1 + rng() % wanted.size());
    int64_t elements = 0;
    wanted = geometry::packed(wanted, &elements);
    // Each element of the vector, and of what it must be a copy.
    std::vector<Element> expected(static_cast<size_t>(elements));
    for (const geometry::Piece& piece : wanted)
      for (int64_t i = 0; i < piece.rect.numel(); ++i)
        expected[static_cast<size_t>(piece.at + i)] =
            element(static_cast<int64_t>(piece.param), piece.rect, i);
    ASSERT_OK_AND(const auto reads, plan_reads(m, table, wanted));
    const Element none = {-1, 0, 0};
    std::vector<Element> filled(expected.size(), none);
    for (const Read& read : reads) {
      const pb::Slice& slice = m.shards(read.shard).slices(read.slice);
      for (int64_t r = 0; r < read.copy.rows; ++r)
        for (int64_t c = 0; c < read.copy.cols; ++c) {
          const int64_t to = read.copy.to_at + r * read.copy.to_stride + c;
          const int64_t from =
              read.copy.from_at + r * read.copy.from_stride + c;
          EXPECT_EQ(filled.at(static_cast<size_t>(to)), none);
          filled[static_cast<size_t>(to)] =
              element(table.find(slice.param()), rect_of(slice), from);
        }
    }
    EXPECT_EQ(filled, expected);
  }
  const geometry::Piece outside{.param = 0, .rect = {0, 0, 1, 1 << 20}};
  EXPECT_EQ(
      plan_reads(random_tiling(table, 1, rng), table, std::span(&outside, 1))
          .status()
          .code(),
      Code::kInvalidArgument);
}

// --- compatibility, retention, scanning ------------------------------------

TEST(Differences, NamesEachOneWithBothValues) {
  const store::SaveId id{.step = 1, .generation = 1};
  const ParamTable table = ParamTable::make(store::tiny_model());
  pb::Manifest m = store::manifest_of(table, id);
  m.set_global_batch_size(16);
  m.set_seq_len(32);
  JobIdentity job{.model = store::tiny_model(),
                  .seed = 1,
                  .data_id = "words",
                  .global_batch_size = 16,
                  .seq_len = 32};
  EXPECT_TRUE(differences(m, job).empty());
  job.seed = 2;
  job.model.n_layers = 5;
  job.model.rope_scaled = true;
  job.data_id = "other";
  EXPECT_EQ(differences(m, job),
            (std::vector<std::string>{
                "model.n_layers: checkpoint 1, job 5",
                "model.rope_scaling_factor: checkpoint 1, job 8",
                "train.seed: checkpoint 1, job 2",
                "data set: checkpoint words, job other"}));
  // Known on one side alone, the frozen weights cannot be compared.
  const size_t others = differences(m, job).size();
  job.base_fingerprint = "ab";
  EXPECT_EQ(differences(m, job).size(), others);
  m.set_base_fingerprint("cd");
  EXPECT_EQ(differences(m, job).back(),
            "weights of the frozen model (put back what was at "
            "model.init_from): checkpoint cd, job ab");
}

TEST(Model, RoundTripsAndRefusesNonsense) {
  geometry::ModelConfig c = store::tiny_model();
  c.rope_scaled = true;
  c.rope_scaling.factor = 32;
  EXPECT_EQ(*model_config(model_info(c)), c);
  c = store::tiny_model();
  EXPECT_EQ(*model_config(model_info(c)), c);
  c.lora = {.rank = 4, .alpha = 8, .targets = {"q_proj", "down_proj"}};
  EXPECT_EQ(*model_config(model_info(c)), c);
  EXPECT_EQ(
      model_differences(model_info(c), model_info(c.base())),
      (std::vector<std::string>{
          "lora.rank: checkpoint 4, job 0", "lora.alpha: checkpoint 8, job 0",
          "lora.targets: checkpoint q_proj, down_proj, job "}));
  pb::ModelInfo info = model_info(c);
  info.set_lora_targets(0, "head");
  EXPECT_EQ(model_config(info).status().code(), Code::kCorrupt);
  c.lora = {};
  info = model_info(c);
  info.set_n_heads(3);
  EXPECT_EQ(model_config(info).status().code(), Code::kCorrupt);
  info = model_info(c);
  info.set_vocab_size(int64_t{1} << 40);
  EXPECT_EQ(model_config(info).status().code(), Code::kCorrupt);
  EXPECT_FALSE(model_config(pb::ModelInfo()).ok());
}

TEST(Retention, KeepsTheNewestAndTheMilestonesAndNothingElse) {
  std::mt19937_64 rng(kSeed);
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<int64_t> valid, invalid;
    for (int64_t step = 0; step < 40; ++step) {
      if (rng() % 3 == 0)
        valid.push_back(step);
      else if (rng() % 6 == 0)
        invalid.push_back(step);
    }
    std::shuffle(valid.begin(), valid.end(), rng);
    const int64_t k = 1 + static_cast<int64_t>(rng() % 4);
    const int64_t n = static_cast<int64_t>(rng() % 7);
    const auto removed = to_remove(valid, invalid, k, n);
    const std::set<int64_t> gone(removed.begin(), removed.end());
    ASSERT_TRUE(std::is_sorted(removed.begin(), removed.end()));
    for (const int64_t step : valid) {
      const auto newer = std::count_if(valid.begin(), valid.end(),
                                       [&](int64_t s) { return s > step; });
      // The first at or after some multiple.
      bool first = false;
      for (int64_t m = n; n > 0 && m <= step; m += n)
        first |= std::none_of(valid.begin(), valid.end(),
                              [&](int64_t s) { return m <= s && s < step; });
      const bool keep = newer < k || first;
      EXPECT_EQ(gone.count(step) == 0, keep) << "trial " << trial;
    }
    for (const int64_t step : invalid)
      EXPECT_EQ(gone.count(step) == 1,
                std::any_of(valid.begin(), valid.end(),
                            [&](int64_t s) { return s > step; }));
  }
}

TEST(Retention, LeavesWhatIsKeptEvenIfItIsDamagedOrOfAnotherBranch) {
  EXPECT_EQ(to_remove({7, 9}, {3, 5}, 1, 0, {3, 7}), (std::vector<int64_t>{5}));
}

TEST(Scan, ListsNewestFirstWithReasonsAndSkipsWhatIsBeingWritten) {
  MemoryFileSystem fs;
  EXPECT_TRUE(scan(fs, "ckpt")->empty());  // no folder, no checkpoint
  const auto put = [&](const std::string& dir, int64_t step) {
    ASSERT_OK(fs.create_dirs("ckpt/" + dir));
    pb::Manifest m = example();
    m.set_step(step);
    ASSERT_OK(write_file(fs, "ckpt/" + dir + "/manifest.json", encode(m)));
    ASSERT_OK(write_file(fs, "ckpt/" + dir + "/" + shard_name(0),
                         std::string(12345, 'x')));
  };
  put("step-00000001", 1);
  put("step-00000002", 2);
  put("step-00000003", 4);  // names another step
  put("step-00000005", 5);
  put(".tmp-step-00000006.g1", 6);
  put("notes", 7);
  ASSERT_OK(fs.create_dirs("ckpt/step-00000008"));
  ASSERT_OK(fs.remove("ckpt/step-00000005/" + shard_name(0)));
  ASSERT_OK_AND(const auto found, scan(fs, "ckpt"));
  ASSERT_EQ(found.size(), 5U);
  const std::vector<std::pair<int64_t, const char*>> expected = {
      {8, "manifest.json"},
      {5, "shard-00000.h5"},
      {3, "is of step 4"},
      {2, ""},
      {1, ""}};
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(found[i].step, expected[i].first);
    EXPECT_EQ(found[i].status.ok(), *expected[i].second == '\0');
    EXPECT_SAYS(found[i].status, expected[i].second);
  }
  ASSERT_NE(choose_newest_valid(found), nullptr);
  EXPECT_EQ(choose_newest_valid(found)->step, 2);
  EXPECT_EQ(choose_newest_valid({}), nullptr);

  // A generation that is newer was at a smaller step: it went back.
  std::vector<Found> branches(3);
  branches[0].step = 100;
  branches[1].step = 60;
  branches[2].step = 50;
  for (Found& f : branches) f.manifest.set_generation(f.step == 100 ? 1 : 3);
  EXPECT_EQ(choose_newest_valid(branches)->step, 60);
}

TEST(Branch, DecidesWhatIsInTheGenerationsPast) {
  const Origin origin{.step = 10, .generation = 3};
  EXPECT_TRUE(of_branch(origin, 5, 99, 5));   // its own
  EXPECT_TRUE(of_branch(origin, 5, 10, 3));   // where it started
  EXPECT_TRUE(of_branch(origin, 5, 9, 1));    // before that
  EXPECT_FALSE(of_branch(origin, 5, 10, 4));  // the same step, computed again
  EXPECT_FALSE(of_branch(origin, 5, 11, 3));  // continued without it
  EXPECT_FALSE(of_branch(origin, 5, 9, 6));   // of the future
  EXPECT_TRUE(of_branch({}, 5, 99, 4));
  EXPECT_FALSE(of_branch({}, 5, 99, 6));
}

TEST(Branch, TheNewestClaimWins) {
  MemoryFileSystem fs;
  EXPECT_EQ(claimed(fs, "a/c").value(), 0);
  EXPECT_OK(check_claim(fs, "a/c", 1));
  ASSERT_OK(claim(fs, "a/c", 7));
  ASSERT_OK(claim(fs, "a/c", 7));
  EXPECT_EQ(claimed(fs, "a/c").value(), 7);
  EXPECT_OK(check_claim(fs, "a/c", 7));
  EXPECT_OK(check_claim(fs, "a/c", 8));
  const Status old = check_claim(fs, "a/c", 6);
  EXPECT_EQ(old.code(), Code::kCancelled);
  EXPECT_SAYS(old, "a/c: generation 7");
  // A late older claim changes nothing; an unknown name is ignored.
  ASSERT_OK(claim(fs, "a/c", 6));
  for (const char* name : {".claim-g", ".claim-g9x", ".claim-g-9", "claim-g9"})
    ASSERT_OK(fs.create(path_join("a/c", name)));
  EXPECT_EQ(claimed(fs, "a/c").value(), 7);
  ASSERT_OK(claim(fs, "a/c", 8));
  EXPECT_EQ(claimed(fs, "a/c").value(), 8);
  EXPECT_FALSE(fs.exists("a/c/.claim-g7"));
}

}  // namespace
}  // namespace remesh::manifest
