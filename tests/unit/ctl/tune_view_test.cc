#include "coordinator/ctl/tune_view.h"

#include <gtest/gtest.h>

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

bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(TuneView, AJobThatAdaptsToTheSlotsStillDoes) {
  pb::Job job;
  const std::string all = report_on(job, {.dp = 2, .tp = 2});
  EXPECT_TRUE(mentions(all, "data_parallel_degree=-1")) << all;
  EXPECT_TRUE(mentions(all, "tensor_parallel_degree=2")) << all;
  EXPECT_TRUE(mentions(all, "fewer than 2 slots the job waits")) << all;
  EXPECT_FALSE(mentions(all, "max_slots")) << all;
  const std::string half = report_on(job, {.dp = 2});
  EXPECT_TRUE(mentions(half, "data_parallel_degree=-1")) << half;
  EXPECT_TRUE(mentions(half, "elastic.max_slots=2")) << half;
  EXPECT_FALSE(mentions(half, "the job waits")) << half;
  job.mutable_elastic()->set_min_slots(3);
  EXPECT_TRUE(
      mentions(report_on(job, {.dp = 2, .tp = 2}), "fewer than 4 slots"));
}

TEST(TuneView, AGivenDegreeIsThatOfTheBestMesh) {
  pb::Job job;
  job.mutable_parallel()->set_data_parallel_degree(4);
  const std::string fixed = report_on(job, {.dp = 2});
  EXPECT_TRUE(mentions(fixed, "data_parallel_degree=2")) << fixed;
  EXPECT_TRUE(mentions(fixed, "fewer than 2 slots the job waits")) << fixed;
  EXPECT_FALSE(mentions(fixed, "max_slots")) << fixed;
  job.mutable_elastic()->add_layouts("dp4");
  EXPECT_TRUE(mentions(report_on(job, {.dp = 2}), "data_parallel_degree=-1"));
}

}  // namespace
}  // namespace remesh::ctl
