// The weights that a run starts from: which they are, and that they stay.
#include <fmt/format.h>

#include <filesystem>

#include "checkpoint/manifest/manifest.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/run_dir.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/unit/huggingface/small_folder.h"

namespace remesh::rundir {
namespace {

namespace fs = std::filesystem;

class InitFromTest : public ::testing::Test {
 protected:
  // The path of a checkpoint without shards.
  static std::string save(const std::string& folder, int64_t step) {
    pb::Manifest m;
    m.set_format(manifest::kFormat);
    m.set_step(step);
    *m.mutable_model() = manifest::model_info(huggingface::small_model());
    std::string path = folder + "/" + manifest::step_name(step);
    fs::create_directories(path);
    testing::write_whole(path + "/manifest.json", manifest::encode(m));
    return path;
  }
  // A job file that names these weights.
  JobSource source(const std::string& from, const std::string& more = "") {
    testing::write_whole(
        dir_ + "/given.toml",
        fmt::format("[data]\npath = \"/d\"\n[model]\ninit_from = \"{}\"\n{}",
                    from, more));
    return {dir_ + "/given.toml", {}};
  }
  static std::string start(const JobSource& source,
                           const std::string& run = "") {
    const auto job = load_resolved(source, run);
    return job.ok() ? jobfile::init_path(job->model())
                    : job.status().to_string();
  }
  void make_run(const JobSource& source) {
    ASSERT_OK_AND(const auto job, load_resolved(source, run_));
    ASSERT_OK(create(run_));
    ASSERT_OK(write_job(*fs_, job, run_));
  }
  // Whether the run may continue with this job.
  Status check(const JobSource& source) {
    const auto job = load_resolved(source, run_);
    if (!job.ok()) return job.status();
    return check_job(*fs_, {*job, source.set}, run_, nullptr).status();
  }

  testing::TempDir temp_;
  const std::string dir_ = temp_.path();
  const std::string run_ = dir_ + "/run";
  std::unique_ptr<FileSystem> fs_ = posix_file_system();
};

// Whatever is saved beside it later.
TEST_F(InitFromTest, TheCheckpointToStartFromIsChosenOnce) {
  const std::string folder = dir_ + "/from";
  const std::string first = save(folder, 10);
  const JobSource given = source(folder);
  EXPECT_EQ(start(given), first);
  make_run(given);
  const std::string second = save(folder, 20);
  for (const JobSource& s : {given, JobSource{"", {"optimizer.lr=0.5"}}}) {
    EXPECT_EQ(start(s, run_), first);
    EXPECT_OK(check(s));
  }
  EXPECT_EQ(load_resolved(given, run_)->model().init_from(), folder);
  // A new run starts from what is there by then, unless its job says which.
  EXPECT_EQ(start(given), second);
  const std::string set = "model.init_checkpoint=";
  EXPECT_EQ(start({given.file, {set + first}}), first);
  const std::string other =
      start({given.file, {set + dir_ + "/step-00000010"}});
  EXPECT_HAS(other, "step-00000010: is not in " + folder);
  fs::remove_all(folder);
  EXPECT_EQ(start(given, run_), first) << "that is what the run started from";
}

// Not the link to the newest run, which points elsewhere later.
TEST_F(InitFromTest, ARunStandsForItsNewestCheckpoint) {
  make_run(source(save(dir_, 1)));
  const std::string saved = save(run_ + "/checkpoints", 7);
  const std::string latest = dir_ + "/latest";
  fs::create_directory_symlink(run_, latest);
  EXPECT_EQ(start(source(latest)), saved);
  EXPECT_EQ(start(source(run_)), saved);
  EXPECT_EQ(start(source(latest + "/checkpoints")), saved);
}

TEST_F(InitFromTest, OneModelIsItself) {
  const std::string one = save(dir_, 1);
  const huggingface::SmallFolder folder(huggingface::Dtype::kFp32);
  for (const std::string& from : {one, folder.path()}) {
    ASSERT_OK_AND(const auto job, load_resolved(source(from)));
    EXPECT_EQ(job.model().init_checkpoint(), "");
    EXPECT_EQ(job.lora().base_fingerprint(), "") << "nothing is frozen";
  }
  const std::string none = dir_ + "/none";
  EXPECT_EQ(load_resolved(source(none)).status().code(), Code::kNotFound);
  // With all sizes in the job it may be on other hosts alone.
  pb::Job whole = *load_resolved(source(one));
  whole.mutable_model()->set_init_from(none);
  EXPECT_OK(choose_init(*fs_, &whole));
  fs::create_directory(none);
  EXPECT_EQ(choose_init(*fs_, &whole).code(), Code::kNotFound);
}

TEST_F(InitFromTest, AdaptersContinueOnTheWeightsThatTheyWereTrainedWith) {
  huggingface::SmallFolder base(huggingface::Dtype::kFp32);
  const JobSource given = source(base.path(), "[lora]\nrank = 2\n");
  make_run(given);
  const std::string print =
      load_resolved(given, run_)->lora().base_fingerprint();
  EXPECT_EQ(print.size(), 32u);
  EXPECT_OK(check(given));
  base.tensors[3][0] ^= 1;
  base.put_weights();
  const Status other = check(given);
  EXPECT_EQ(other.code(), Code::kCorrupt);
  EXPECT_SAYS(other, "was at " + base.path() + " (fingerprint " + print);
  EXPECT_EQ(load_resolved({given.file, {"lora.base_fingerprint=" + print}})
                .status()
                .code(),
            Code::kCorrupt)
      << "a new run too";
  fs::remove(base.path() + "/config.json");
  EXPECT_OK(check(given)) << "it may be on other hosts";
}

}  // namespace
}  // namespace remesh::rundir
