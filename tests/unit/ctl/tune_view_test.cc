#include "coordinator/ctl/tune_view.h"

#include "tests/testing/expect.h"

namespace remesh::ctl {
namespace {

// What is printed after one trial of the job on four slots.
std::string report_on(const pb::Job& job, const geometry::Layout& layout) {
  tune::Space space{.settings = {{.layout = layout}},
                    .candidates = {{.knobs = std::vector<double>(8)}},
                    .slots = 4};
  tune::Tuner tuner(space.candidates);
  tuner.add({0, 1.5});
  return tune_text({space, tuner, job, {""}, "job.toml"});
}

TEST(TuneView, WithOneSettingNothingHasAnEffect) {
  tune::Space space{.settings = {{}},
                    .candidates = {{.knobs = std::vector<double>(8)}},
                    .slots = 1};
  tune::Tuner tuner(space.candidates);
  tuner.add({0, 1.5});
  EXPECT_HAS(tune_json({space, tuner, pb::Job(), {""}, "job.toml"}),
             "\"effects\": {}");
}

// 20 steps a minute, and 40 to go.
TEST(TuneView, ProgressCountsOnlyTheTimeOfThisCommand) {
  EXPECT_EQ(tune_progress(40, 60, 100, 60),
            "tuning [======....]  60%  60 of 100 steps  0.3/s  2m00s left");
  EXPECT_EQ(tune_progress(40, 40, 100, 60),
            "tuning [===========..................]  40%  40 of 100 steps");
}

TEST(TuneView, AJobThatAdaptsToTheSlotsStillDoes) {
  pb::Job job;
  const std::string all = report_on(job, {.dp = 2, .tp = 2});
  EXPECT_HAS(all, "data_parallel_degree=-1");
  EXPECT_HAS(all, "tensor_parallel_degree=2");
  EXPECT_HAS(all, "fewer than 2 slots the job waits");
  EXPECT_LACKS(all, "max_slots");
  const std::string half = report_on(job, {.dp = 2});
  EXPECT_HAS(half, "data_parallel_degree=-1");
  EXPECT_HAS(half, "elastic.max_slots=2");
  EXPECT_LACKS(half, "the job waits");
  job.mutable_elastic()->set_min_slots(3);
  EXPECT_HAS(report_on(job, {.dp = 2, .tp = 2}), "fewer than 4 slots");
}

TEST(TuneView, AGivenDegreeIsThatOfTheBestMesh) {
  pb::Job job;
  job.mutable_parallel()->set_data_parallel_degree(4);
  const std::string fixed = report_on(job, {.dp = 2});
  EXPECT_HAS(fixed, "data_parallel_degree=2");
  EXPECT_HAS(fixed, "fewer than 2 slots the job waits");
  EXPECT_LACKS(fixed, "max_slots");
  job.mutable_elastic()->add_layouts("dp4");
  EXPECT_HAS(report_on(job, {.dp = 2}), "data_parallel_degree=-1");
}

}  // namespace
}  // namespace remesh::ctl
