// One run over many meshes: workers join and are killed, and meshes are
// requested; the losses equal those of an undisturbed run.
#include <fmt/format.h>

#include <filesystem>

#include "tests/e2e/e2e.h"
#include "tests/testing/expect.h"

namespace remesh::e2e {
namespace {

std::vector<std::string> descriptions_in(const std::string& state) {
  std::vector<std::string> out;
  for (const auto& f :
       std::filesystem::recursive_directory_iterator(state + "/remesh/hosts"))
    if (f.path().filename() == "local.toml") out.push_back(f.path());
  return out;
}

class MeshTest : public E2e {
 protected:
  // A step finished on that mesh, after `after`.
  bool wait_for_mesh(int dp, int pp, int tp, int64_t after) {
    return testing::wait_until(
        [&] {
          for (const Json& m : c().metrics())
            if (m["step"] > after && m["mesh"]["dp"] == dp &&
                m["mesh"]["pp"] == pp && m["mesh"]["tp"] == tp)
              return true;
          return false;
        },
        60'000);
  }
  // The losses are those of the same job without any disturbance.
  void expect_losses_of(const Settings& job, int local_workers) {
    const auto disturbed = raw_losses(c().metric_lines());
    const auto undisturbed = raw_losses(undisturbed_lines(job, local_workers));
    ASSERT_EQ(disturbed.size(), undisturbed.size());
    for (size_t i = 0; i < disturbed.size(); ++i)
      EXPECT_NEAR(std::stod(disturbed[i]) / std::stod(undisturbed[i]), 1, 1e-4)
          << "step " << i + 1;
  }
  void ask_for(const std::string& layout) {
    const Finished f = c().remesh({"mesh", layout, c().run_dir()});
    ASSERT_EQ(f.exit.code, 0) << f.output;
  }
};

TEST_F(MeshTest, ARunGoesThroughFourMeshesByJoinsAndKills) {
  // The order of three data sets does not depend on what happens.
  const testing::TempDir folder;
  const std::string mix = folder.path() + "/mix";
  std::vector<std::string> command{testing::program("remesh"), "data", "mix"};
  std::vector<std::unique_ptr<testing::TinyData>> sets;
  for (const int documents : {20, 40, 60}) {
    sets.push_back(std::make_unique<testing::TinyData>(documents));
    const std::string link = fmt::format("{}/of{}", folder.path(), documents);
    std::filesystem::create_symlink(sets.back()->path(), link);
    command.push_back(fmt::format("{}=0.{}", link, documents / 10));
  }
  command.insert(command.end(), {"--out", mix});
  const Finished mixed = testing::run_program(command);
  ASSERT_EQ(mixed.exit.code, 0) << mixed.output;
  const Settings job = endless({{"elastic.max_slots", "3"},
                                {"checkpoint.interval", "5"},
                                {"data.path", "\"" + mix + "\""}});
  make(job);
  c().start_coordinator();
  for (const char* name : {"w1", "w2"}) c().start_worker({.name = name});
  ASSERT_TRUE(wait_for_mesh(2, 1, 1, 5));
  ask_for("dp1,tp2");
  ASSERT_TRUE(wait_for_mesh(1, 1, 2, 0));
  const auto pids = c().rank_pids(2);
  ASSERT_EQ(pids.size(), 2U);
  testing::send_signal(pids.at(1), SIGKILL);
  ASSERT_TRUE(c().wait_for_event("failure"));
  ASSERT_TRUE(wait_for_mesh(1, 1, 2, c().last_step()));
  ask_for("pp2");
  ASSERT_TRUE(wait_for_mesh(1, 2, 1, 0));
  c().worker("w2").kill(SIGKILL);
  ASSERT_TRUE(c().wait_for_event("failure", 2));
  c().start_worker({.name = "w2"});
  c().start_worker({.name = "w3"});
  // One slot is left: pp2 is released and the mesh is selected automatically.
  ASSERT_TRUE(wait_for_mesh(3, 1, 1, 0));
  stop_and_check();
  expect_losses_of(job, 1);
}

TEST_F(MeshTest, AllRanksUseFp32IfOneProcessorHasNoBf16) {
  Settings job{{"train.steps", "10"},
               {"train.dtype", "\"bf16\""},
               {"parallel.tensor_parallel_degree", "2"}};
  make(job);
  c().start_coordinator();
  c().start_worker({.name = "w1"});
  c().start_worker({.name = "w2", .prefix = {"env", "DNNL_MAX_CPU_ISA=AVX2"}});
  expect_exit(c().coordinator(), 0);
  expect_sequence(10);
  EXPECT_EQ(c().events_named("mesh").size(), 1U);
  job["train.dtype"] = "\"fp32\"";
  expect_losses_of(job, 2);
}

// The first worker of a host measures it, and the others take what it found.
TEST_F(MeshTest, AutomaticDegreesFollowTheMeasurementsOfWorkers) {
  make({{"train.steps", "200"},
        {"parallel.tensor_parallel_degree", "-1"},
        {"parallel.pipeline_parallel_degree", "-1"}});
  const auto described = [&] {
    std::vector<std::string> out;
    for (const std::string& path : descriptions_in(c().folder() + "/state"))
      out.push_back(testing::read_whole(path));
    return out;
  };
  expect_exit(c().start_run(2), 0);
  const auto first = described();
  ASSERT_EQ(first.size(), 1U);
  EXPECT_HAS(first[0], "peak_fp32_tflops");
  std::filesystem::remove_all(c().run_dir());
  expect_exit(c().start_run(2), 0);
  EXPECT_EQ(described(), first);
}

// Each worker finds the description of its host in a state folder of its own.
TEST_F(MeshTest, WorkersOnSlowHostsGetFewerMicrobatches) {
  const Settings job = {{"train.steps", "8"}, {"elastic.min_slots", "2"}};
  Settings by_speed = job;
  by_speed["parallel.microbatches"] = "\"by_speed\"";
  make(by_speed);
  c().start_coordinator();
  for (const auto& [name, tflops] : {std::pair("fast", 0.28), {"slow", 0.1}}) {
    const std::string state = c().folder() + "/state-of-" + name;
    // Measured once for where it is and what the processor is called.
    const Finished measured =
        testing::run_program({testing::program("remesh-measure"), "--core"},
                             60'000, {{"XDG_STATE_HOME", state}});
    ASSERT_EQ(measured.exit.code, 0) << measured.output;
    const auto paths = descriptions_in(state);
    ASSERT_EQ(paths.size(), 1U);
    const std::string text = testing::read_whole(paths[0]);
    testing::write_whole(
        paths[0],
        text.substr(0, text.find('\n', text.find("name = "))) +
            fmt::format("\nmemory_gb = 4.0\n"
                        "memory_gb_per_s = 10.0\npeak_tflops = {0}\n"
                        "peak_fp32_tflops = {0}\n[node]\ndevices = 1\n"
                        "gb_per_s = 4.0\n[network]\ngb_per_s = 0.1\n",
                        tflops));
    c().start_worker({.name = name,
                      .more = {"--host-name", name},
                      .prefix = {"env", "XDG_STATE_HOME=" + state}});
  }
  expect_exit(c().coordinator(), 0);
  const Json mesh = c().events_named("mesh").back();
  EXPECT_HAS(mesh["detail"].get<std::string>(), "11, 4 microbatches")
      << mesh.dump();
  expect_sequence(8);
  const auto got = raw_losses(c().metric_lines());
  const auto even = raw_losses(undisturbed_lines(job, 2));
  ASSERT_EQ(got.size(), even.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(std::stod(got[i]) / std::stod(even[i]), 1, 1e-4);
}

}  // namespace
}  // namespace remesh::e2e
