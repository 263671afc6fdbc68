#include "parallel/jobfile/jobfile.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>

#include "parallel/geometry/lora.h"
#include "parallel/jobfile/schema.h"
#include "tests/testing/expect.h"
#include "tests/testing/seed.h"

namespace remesh::jobfile {
namespace {

namespace fs = std::filesystem;

const TomlOrigin kOrigin{"job.toml", "/jobs"};
constexpr char kLeast[] = "[data]\npath = \"books\"\n";

std::string problem(const std::string& toml,
                    const std::vector<std::string>& overrides = {}) {
  const auto job = parse_job(toml, kOrigin, overrides, "/here");
  return job.ok() ? "" : job.status().message();
}

pb::Job good(const std::string& toml,
             const std::vector<std::string>& overrides = {}) {
  auto job = parse_job(toml, kOrigin, overrides, "/here");
  EXPECT_OK(job);
  return job.ok() ? *job : pb::Job();
}

std::string resolve_problem(const std::string& toml,
                            const DataInfo& data = {257}) {
  const auto job = resolve(good(kLeast + toml), data);
  return job.ok() ? "" : job.status().message();
}

TEST(Job, KeysGivenArePresentAndTheRestHasDefaults) {
  const pb::Job job = good(
      std::string(kLeast) +
      "[train]\nsteps = 7\nmax_norm = 2\n[model]\ntie_embeddings = true\n");
  EXPECT_EQ(job.train().steps(), 7);
  EXPECT_EQ(job.train().max_norm(), 2.0);  // an integer for a number
  EXPECT_TRUE(job.model().tie_embeddings());
  EXPECT_FALSE(job.train().has_seq_len());
  EXPECT_EQ(job.train().seq_len(), 256);
}

TEST(Job, PathsStartAtTheFileAndInOverridesAtTheCurrentFolder) {
  EXPECT_EQ(good(kLeast).data().path(), "/jobs/books");
  EXPECT_EQ(good(kLeast).job().dump_folder(), "/here/runs");
  EXPECT_EQ(good(kLeast).model().init_from(), "");  // none, not a folder
  EXPECT_EQ(good(kLeast, {"data.path=../b"}).data().path(), "/b");
  EXPECT_EQ(good("[data]\npath = \"/abs/./x\"\n").data().path(), "/abs/x");
}

TEST(Job, OverridesTakeTomlOrABareWordAndTheLastWins) {
  const pb::Job job =
      good(kLeast, {"train.steps=5", "train.steps = 6", "train.dtype=fp32",
                    "job.name=2024", "job.description=\"a b\"",
                    "optimizer.lr=3e-4", "model.tie_embeddings=true"});
  EXPECT_EQ(job.train().steps(), 6);
  EXPECT_EQ(job.train().dtype(), "fp32");
  EXPECT_EQ(job.job().name(), "2024");
  EXPECT_EQ(job.job().description(), "a b");
  EXPECT_EQ(job.optimizer().lr(), 3e-4);
  EXPECT_TRUE(job.model().tie_embeddings());
}

TEST(Job, AListOfLayoutsIsReadAndChecked) {
  const std::string key = "[elastic]\nlayouts = ";
  const auto read = [&](const std::string& list) {
    const pb::Job job = good(kLeast + key + list + "\n");
    const auto& l = job.elastic().layouts();
    return std::vector<std::string>(l.begin(), l.end());
  };
  EXPECT_EQ(read("[\"dp3\", \"dp1,tp2\"]"), (Texts{"dp3", "dp1,tp2"}));
  EXPECT_EQ(read("[]"), Texts{});
  EXPECT_EQ(good(kLeast + key + "[\"dp3\"]\n", {"elastic.layouts=['tp2']"})
                .elastic()
                .layouts(0),
            "tp2");
  EXPECT_EQ(problem(kLeast + key + "\"dp3\"\n"),
            "job.toml:4: elastic.layouts = \"dp3\": must be a list of quoted "
            "strings");
  EXPECT_NE(problem(kLeast + key + "[3]\n"), "");
  EXPECT_HAS(problem(kLeast + key + "[\"dp3\", \"dx1\"]\n"),
             "layout 'dx1': unknown axis 'dx'");
  EXPECT_NE(problem(std::string(kLeast) + "[train]\nsteps = [\"1\"]\n"), "");
}

TEST(Job, AnOverrideCannotSmuggleInASecondKey) {
  EXPECT_EQ(good(kLeast, {"job.description=1\nx = 2"}).job().description(),
            "1\nx = 2");
  EXPECT_NE(problem(kLeast, {"train.steps=1\nx = 2"}), "");
}

TEST(Job, ErrorsNameLineKeyValueAndWhatIsAllowed) {
  EXPECT_EQ(problem("[data]\npath = \"x\"\n\n[train]\nsteps = \"many\"\n"),
            "job.toml:5: train.steps = \"many\": must be an integer from 1");
  EXPECT_EQ(problem(std::string(kLeast) + "[train]\ndtype = \"fp16\"\n"),
            "job.toml:4: train.dtype = \"fp16\": must be one of \"fp32\", "
            "\"bf16\"; did you mean \"fp32\"?");
  EXPECT_EQ(problem(kLeast, {"train.steps=0"}),
            "--set train.steps=0: must be an integer from 1");
  EXPECT_EQ(problem(kLeast, {"model.n_kv_heads=0"}),
            "--set model.n_kv_heads=0: must be an integer, -1 or from 1 to "
            "1024");
  EXPECT_EQ(problem(kLeast, {"optimizer.eps=1e-46"}),
            "--set optimizer.eps=1e-46: must be a number from 1e-30");
  EXPECT_EQ(problem(kLeast, {"model.norm_eps=1e-46"}),
            "--set model.norm_eps=1e-46: must be a number from 1e-30 to 0.1");
  EXPECT_EQ(problem(kLeast, {"train.seed=-1"}),
            "--set train.seed=-1: must be an integer from 0 to 2^63 - 1");
  EXPECT_NE(problem(kLeast, {"optimizer.lr=nan"}), "");
  EXPECT_NE(problem(kLeast, {"optimizer.lr=inf"}), "");
  EXPECT_NE(problem(kLeast, {"elastic.hang_after_s=-0.5"}), "");
  EXPECT_NE(problem(kLeast, {"train.steps=1.5"}), "");
  EXPECT_NE(problem(kLeast, {"train.steps=[1]"}), "");
  EXPECT_NE(problem(kLeast, {"job.name=a b"}), "");
  EXPECT_NE(problem(kLeast, {"job.name=../x"}), "");
  EXPECT_NE(problem("[data]\npath = \"\"\n"), "");
  EXPECT_EQ(problem("[train]\nsteps = 2\n"),
            "job.toml: data.path: is required: give a quoted path");
  EXPECT_EQ(problem("[train\n").substr(0, 20), "job.toml:1: not TOML");
  EXPECT_EQ(problem("train = 5\n" + std::string(kLeast)),
            "job.toml:1: train = 5: must be a section: [train]");
}

TEST(Job, LettersBeyondAsciiAreTextInStringsAndErrorsElsewhere) {
  EXPECT_HAS(problem("\u00e9 = 1\n"), "job.toml:1: not TOML");
  EXPECT_HAS(problem("a\u00e9 = 1\n"), "job.toml:1: not TOML");
  const pb::Job job = good(
      "# \u00e9\n[data]\npath = \"\u00e9\"\n[job]\n"
      "description = \"\"\"a \\\n\u00e9\"\"\"\n");
  EXPECT_EQ(job.data().path(), "/jobs/\u00e9");
  EXPECT_EQ(job.job().description(), "a \u00e9");
}

// A job.toml with such text could not be read again.
TEST(Job, TextThatAFileCannotHoldIsRefused) {
  const std::string refused = ": must be UTF-8 without control characters";
  EXPECT_EQ(problem(kLeast, {"data.path=caf\xe9"}),
            "--set data.path=caf?" + refused);
  EXPECT_EQ(problem(kLeast, {"job.description=a\x1b[2J"}),
            "--set job.description=a?[2J" + refused);
  EXPECT_EQ(problem(kLeast, {"job.description=a\n\tb"}), "");
  const auto job = parse_job(kLeast, kOrigin, {}, "/caf\xe9");
  EXPECT_EQ(job.status().message(), "job.dump_folder = /caf?/runs" + refused);
}

TEST(Job, AllProblemsAreToldInTheOrderOfTheFile) {
  EXPECT_EQ(
      problem(std::string(kLeast) + "[train]\nsteps = 0\n[model]\ndim = 1\n",
              {"train.x=1"}),
      "job.toml:4: train.steps = 0: must be an integer from 1\n"
      "job.toml:6: model.dim = 1: must be an integer from 2 to 65536\n"
      "--set train.x=1: no key 'x'; [train] has steps, seq_len, "
      "global_batch_size, local_batch_size, max_norm, z_loss, "
      "max_skipped_steps, spike_factor, seed, dtype, backend, recompute, "
      "threads, eval_every, eval_sequences, log_every, recompute_every, "
      "peak_flops, digest");
}

TEST(Job, UnknownNamesGetTheNearestOrTheOneThatOthersCallIt) {
  const auto says = [&](const std::string& toml, const std::string& what) {
    EXPECT_HAS(problem(kLeast + toml), what) << toml;
  };
  says("[train]\nstesp = 1\n", "did you mean train.steps?");
  says("[trian]\nsteps = 1\n", "did you mean [train]?");
  says("[training]\nsteps = 1\n", "the section is [train] here");
  says("[training]\nbatch_size = 1\n", "use train.local_batch_size");
  says("[train]\nbatch_size = 1\n", "use train.local_batch_size");
  says("[lr_scheduler]\nwarmup_steps = 1\n", "the section is [schedule]");
  says("[parallelism]\ndata_parallel_shard_degree = 1\n",
       "use parallel.data_parallel_degree");
  says("[optimizer]\nwarmup_steps = 1\n", "there is schedule.warmup_steps");
  says("[model]\nhidden_size = 64\n", "use model.dim");
  EXPECT_HAS(problem("steps = 3\n"), "it is a key of [train]");
}

TEST(Job, EveryHintNamesKeysThatExist) {
  const std::string words =
      "training parallelism experimental lr_scheduler scheduler "
      "activation_checkpoint validation metrics fault_tolerance profiling";
  std::istringstream in(words);
  for (std::string w; in >> w;) EXPECT_NE(hint(w, ""), "") << w;
  for (const Field* s : sections()) {
    EXPECT_EQ(hint(s->name(), ""), "") << s->name();
    for (const Field* k : keys(*s))
      EXPECT_EQ(hint(s->name(), k->name()), "") << full_name(*k);
  }
}

TEST(Job, LoadsAFileAndSaysWhenThereIsNone) {
  const fs::path dir =
      fs::temp_directory_path() / ("jobfile_test." + std::to_string(getpid()));
  fs::create_directories(dir);
  std::ofstream(dir / "a.toml") << kLeast;
  ASSERT_OK_AND(const auto job,
                load_job((dir / "a.toml").string(), {"train.steps=3"}));
  EXPECT_EQ(job.data().path(), (dir / "books").string());
  EXPECT_EQ(job.train().steps(), 3);
  EXPECT_EQ(load_job((dir / "b.toml").string()).status().code(),
            Code::kNotFound);
  EXPECT_EQ(load_job(dir.string()).status().code(), Code::kInvalidArgument);
  fs::remove_all(dir);
}

TEST(Resolve, FlavorsExpandAndKeysGivenWin) {
  const struct {
    const char* flavor;
    int64_t dim, layers, heads, kv, hidden;
  } sizes[] = {{"tiny", 64, 4, 8, 4, 192},     {"15m", 288, 6, 6, 6, 768},
               {"42m", 512, 8, 8, 8, 1376},    {"110m", 768, 12, 12, 12, 2048},
               {"1b", 2048, 16, 32, 8, 8192},  {"8b", 4096, 32, 32, 8, 14336},
               {"70b", 8192, 80, 64, 8, 28672}};
  for (const auto& s : sizes) {
    ASSERT_OK_AND(
        const auto job,
        resolve(good(kLeast, {std::string("model.flavor=") + s.flavor}),
                {257}));
    const geometry::ModelConfig c = model_config(job);
    EXPECT_OK(c.validate());
    EXPECT_EQ(c.dim, s.dim);
    EXPECT_EQ(c.n_layers, s.layers);
    EXPECT_EQ(c.n_heads, s.heads);
    EXPECT_EQ(c.n_kv_heads, s.kv);
    EXPECT_EQ(c.hidden_dim, s.hidden);
    EXPECT_EQ(c.vocab_size, 257);
  }
  const auto job =
      resolve(good(kLeast, {"model.flavor=1b", "model.n_layers=3"}), {257});
  EXPECT_EQ(job->model().n_layers(), 3);
  EXPECT_TRUE(model_config(*job).rope_scaled);
  EXPECT_EQ(model_config(*job).rope_scaling.factor, 32);
  // One given for this run replaces the file's model.
  const std::string file = std::string(kLeast) + "\n[model]\ndim = 96\n";
  ASSERT_OK_AND(const auto other,
                resolve(good(file, {"model.flavor=8b"}), {257}));
  EXPECT_EQ(other.model().dim(), 4096);
}

TEST(Resolve, TheModelOfInitFromFillsInWhatIsNotGiven) {
  DataInfo data{.vocab_size = 257};
  data.init_model = geometry::ModelConfig{.dim = 96,
                                          .n_layers = 3,
                                          .n_heads = 6,
                                          .n_kv_heads = 2,
                                          .hidden_dim = 100,
                                          .vocab_size = 300,
                                          .norm_eps = 1e-6,
                                          .rope_theta = 5e5,
                                          .tie_embeddings = true,
                                          .rope_scaled = true};
  const std::string file = std::string(kLeast) + "[model]\ninit_from = \"w\"\n";
  ASSERT_OK_AND(const auto job,
                resolve(good(file, {"model.n_layers=3", "model.n_kv_heads=-1",
                                    "elastic.layouts=['dp2']"}),
                        data));
  EXPECT_EQ(model_config(job), *data.init_model);
  EXPECT_EQ(job.model().init_from(), "/jobs/w");
  EXPECT_TRUE(has_every_size(job.model()));
  EXPECT_FALSE(has_every_size(good(file).model()));
  // Resolved, it needs the model no more.
  EXPECT_EQ(model_config(*resolve(job, {257})), *data.init_model);
  const auto other = resolve(
      good(file, {"model.dim=64", "model.flavor=tiny", "model.n_layers=3"}),
      data);
  ASSERT_FALSE(other.ok());
  for (const char* part :
       {"model.dim = 64: the model of model.init_from has 96",
        "model.flavor = \"tiny\": must be \"custom\""})
    EXPECT_SAYS(other, part);
}

TEST(Resolve, AdaptersOfAllMatricesUnlessTheyAreNamed) {
  const std::string file =
      std::string(kLeast) + "[model]\ninit_from = \"w\"\n[lora]\nrank = 4\n";
  ASSERT_OK_AND(const auto all, resolve(good(file), {257}));
  EXPECT_EQ(model_config(all).lora.targets, geometry::lora_targets());
  ASSERT_OK_AND(
      const auto some,
      resolve(good(file, {"lora.targets=['o_proj', 'q_proj', 'o_proj']"}),
              {257}));
  EXPECT_EQ(model_config(some).lora.targets,
            (std::vector<std::string>{"q_proj", "o_proj"}));
  EXPECT_EQ(model_config(some).base().lora, geometry::Lora{});
  EXPECT_HAS(problem(file, {"lora.targets=['head']"}),
             "'head': must be one of q_proj, k_proj");
}

TEST(Resolve, FillsInWhatMinusOneStandsFor) {
  ASSERT_OK_AND(const auto job,
                resolve(good(kLeast, {"train.steps=20"}), {257, 1000, 0}));
  EXPECT_EQ(job.model().n_kv_heads(), 4);
  EXPECT_EQ(job.model().hidden_dim(), 704);  // 682.67 up to 32s
  EXPECT_EQ(job.model().vocab_size(), 257);
  EXPECT_EQ(job.schedule().total_steps(), 20);
  EXPECT_EQ(job.schedule().warmup_steps(), 20);
  EXPECT_EQ(job.train().eval_sequences(), 0);
  EXPECT_EQ(job.parallel().data_parallel_degree(), -1);
  for (const Field* s : sections())
    for (const Field* k : keys(*s)) EXPECT_TRUE(has_key(job, *k));
}

TEST(Resolve, KeysThatContradictEachOtherAreRefused) {
  const auto says = [&](const std::string& toml, const std::string& what,
                        const DataInfo& data = {257}) {
    EXPECT_HAS(resolve_problem(toml, data), what) << toml;
  };
  says("[train]\nglobal_batch_size = 6\n", "must divide train.global_batch");
  says("[model]\nn_heads = 3\n", "model.n_heads = 3: must divide");
  says("[lora]\nrank = 4\n", "lora.rank = 4: needs model.init_from");
  says("[lora]\ntargets = [\"q_proj\"]\n", "lora.rank: must be given");
  says("[train]\nspike_factor = 10\n",
       "train.max_skipped_steps: must be given");
  says("[model]\nn_kv_heads = 3\n", "model.n_kv_heads = 3: must divide");
  says("[model]\nvocab_size = 100\n", "has a vocabulary of 257");
  says("", "data.path = \"/jobs/books\": has text for validation only",
       {.vocab_size = 257, .train_tokens = 0, .val_tokens = 900});
  // Of a larger vocabulary only what occurs counts.
  says("[model]\nvocab_size = 100\n",
       "a vocabulary of 257 and tokens up to 100; must be at least 101",
       {.vocab_size = 257, .largest_token = 100});
  EXPECT_EQ(resolve_problem("[model]\nvocab_size = 101\n",
                            {.vocab_size = 257, .largest_token = 100}),
            "");
  says("[model]\nrope_low_freq_factor = 9\n", "rope_high_freq_factor = 4");
  says("[train]\nsteps = 9\n[schedule]\nwarmup_steps = 10\n",
       "schedule.warmup_steps = 10: must be at most the 9");
  says("[parallel]\ndata_parallel_degree = 5\n",
       "a step has 4; dp must be 1 to 4");
  says("[parallel]\ntensor_parallel_degree = 3\n",
       "parallel.tensor_parallel_degree = 3: tensor-parallel degree 3: must "
       "divide the 4 query heads");
  says("[parallel]\ntensor_parallel_degree = 3\n", "allowed: 1, 2, 4");
  says("[parallel]\npipeline_parallel_degree = 5\n", "allowed: 1 to 4");
  says("[parallel]\ncontext_parallel_degree = 3\n",
       "256 tokens over 3 context-parallel ranks, two equal parts each; "
       "allowed: a multiple of 6");
  says("[parallel]\npipeline_chunks = 2\n",
       "must be 1 where parallel.pipeline_schedule is \"1f1b\"");
  const std::string chunks =
      "[parallel]\npipeline_schedule = \"interleaved\"\npipeline_chunks = ";
  says(chunks + "3\npipeline_parallel_degree = 2\n", "has 6 stages");
  EXPECT_EQ(resolve_problem(chunks + "2\npipeline_parallel_degree = 2\n"), "");
  EXPECT_EQ(resolve_problem(chunks + "4\n"), "");
  says(chunks +
           "5\npipeline_parallel_degree = 1\n[elastic]\nlayouts = "
           "[\"pp2\"]\n",
       "elastic.layouts: 'pp2': pp = 2 with");
  says("[parallel]\nzero_shard_group = 2\n", "zero_stage is 0");
  says("[elastic]\nlayouts = [\"dp2\", \"tp3\"]\n",
       "elastic.layouts: 'tp3': tensor-parallel degree 3");
  says("[elastic]\nlayouts = [\"dp8\"]\n",
       "'dp8': a data-parallel rank needs a microbatch and a step has 4");
  says("[elastic]\nmax_slots = 2\nlayouts = [\"dp4\"]\n", "has 4 ranks");
  says("[elastic]\nmin_slots = 3\nmax_slots = 2\n", "elastic.max_slots = 2");
  says("[elastic]\nmax_slots = 2\n[parallel]\ndata_parallel_degree = 4\n",
       "at least 4");
  says("[elastic]\ndead_after_ms = 100\n", "must be above elastic.report_");
  says("", "has 200 training tokens", {257, 200, 200});
  says("[train]\neval_sequences = 4\n", "held-out", {257, 2000, 0});
  says("[train]\neval_every = 4\n", "must be 0", {257, 2000, 0});
  EXPECT_EQ(resolve_problem(""), "");
}

// A random value, allowed or nearly so, for the key.
Value random_value(const Field& key, std::mt19937_64& rng) {
  if (key.is_repeated()) {
    Texts layouts;
    for (uint64_t n = rng() % 3; n > 0; --n)
      layouts.push_back("dp" + std::to_string(1 + rng() % 3));
    return layouts;
  }
  const auto& o = key.options();
  const auto pick = [&](int64_t n) {
    return static_cast<int64_t>(rng() % static_cast<uint64_t>(n));
  };
  switch (key.cpp_type()) {
    case Field::CPPTYPE_BOOL:
      return pick(2) == 1;
    case Field::CPPTYPE_STRING: {
      const std::string& allowed = o.GetExtension(pb::allowed);
      if (!allowed.empty()) {
        std::istringstream in(allowed);
        std::vector<std::string> all;
        for (std::string s; std::getline(in, s, '|');) all.push_back(s);
        return all[static_cast<size_t>(pick(static_cast<int64_t>(all.size())))];
      }
      if (full_name(key) == "job.name") return std::string("n-1_.x");
      std::string text = o.GetExtension(pb::is_path) ? "/p" : "";
      for (int64_t n = pick(12) + 1; n > 0; --n)
        text +=
            std::vector<std::string>{
                "a",    "\"", "\\", "\n", "\t", "é",
                "\x7f", "#",  "=",  " ",  "'",  "\x01"}[static_cast<size_t>(
                pick(12))];
      return text;
    }
    case Field::CPPTYPE_DOUBLE:
      return std::ldexp(static_cast<double>(rng() >> 11), -53) *
             std::pow(10.0, static_cast<double>(pick(9) - 6));
    default:
      if (full_name(key) == "train.seed")
        return static_cast<int64_t>(rng() >> 1);
      return (int64_t{1} << pick(12)) * (1 + pick(3)) - pick(2);
  }
}

TEST(Toml, RandomResolvedJobsComeBackTheSame) {
  const uint64_t seed = test_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 rng(seed);
  int resolved_jobs = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    pb::Job job = good(kLeast);
    for (const Field* s : sections())
      for (const Field* k : keys(*s))
        if (rng() % 12 == 0) (void)set_key(job, *k, random_value(*k, rng));
    const auto resolved = resolve(job, {257});
    if (!resolved.ok()) continue;
    ++resolved_jobs;
    const std::string toml = to_toml(*resolved);
    const auto back = parse_job(toml, kOrigin);
    ASSERT_OK(back) << "\n" << toml;
    ASSERT_EQ(back->SerializeAsString(), resolved->SerializeAsString()) << toml;
    ASSERT_OK_AND(const auto again, resolve(*back, {257}));
    ASSERT_EQ(again.SerializeAsString(), resolved->SerializeAsString());
  }
  EXPECT_GT(resolved_jobs, 100);
}

TEST(Toml, ListsComeBack) {
  const pb::Job job = good(kLeast, {"elastic.layouts=[\"dp2\", \"dp1,tp2\"]"});
  EXPECT_HAS(to_toml(job), "layouts = [\"dp2\", \"dp1,tp2\"]");
  EXPECT_EQ(good(to_toml(job)).elastic().layouts_size(), 2);
}

TEST(Toml, FieldNumbersKeepThePathsAndSeedExact) {
  pb::Job job = good(kLeast, {"train.seed=9223372036854775807",
                              "optimizer.lr=0.1", "model.norm_eps=1e-6"});
  ASSERT_OK_AND(const auto resolved, resolve(job, {257}));
  const pb::Job back = good(to_toml(resolved));
  EXPECT_EQ(back.train().seed(), 9223372036854775807ULL);
  EXPECT_EQ(back.model().norm_eps(), 1e-6);
  EXPECT_EQ(back.data().path(), "/jobs/books");
}

TEST(Example, GivesHelpAllowedValuesAndDefaultOfAKey) {
  for (const char* part : {R"(
[data]

# Folder written by `remesh data prepare`.
# A quoted path; required.
path = "data"
)",
                           R"(
# Optimizer. AdamW (Loshchilov and Hutter 2019) is the only one; the key
# exists so that a job file can name it.
# "adamw".
# name = "adamw"

# Peak learning rate.
# A number from 0.
# lr = 0.001
)",
                           R"(
# One of "gpipe", "1f1b", "interleaved", "zb-h1".
# pipeline_schedule = "1f1b"
)"})
    EXPECT_HAS(commented_example(), part);
}

TEST(Example, UncommentedItLoadsAsAllDefaults) {
  const std::string text = commented_example();
  const pb::Job plain = good(text);
  EXPECT_FALSE(plain.train().has_steps());
  std::istringstream in(text);
  std::string bare;
  for (std::string line; std::getline(in, line);) {
    const bool key = line.starts_with("# ") && line.find(" = ") < 40 &&
                     line.find('`') == std::string::npos;
    std::string name = key ? line.substr(2, line.find(" = ") - 2) : "";
    if (key && name.find(' ') == std::string::npos) line = line.substr(2);
    bare += line + "\n";
  }
  const pb::Job all = good(bare);
  for (const Field* s : sections())
    for (const Field* k : keys(*s)) {
      EXPECT_TRUE(has_key(all, *k)) << full_name(*k);
      if (k->options().GetExtension(pb::is_path)) continue;
      EXPECT_EQ(get_key(all, *k), default_value(*k)) << full_name(*k);
    }
}

}  // namespace
}  // namespace remesh::jobfile
