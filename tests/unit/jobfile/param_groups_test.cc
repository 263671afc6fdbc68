#include "parallel/jobfile/param_groups.h"

#include "tests/testing/expect.h"
#include "tests/testing/llama.h"

namespace remesh::jobfile {
namespace {

TEST(ParamGroups, SayWhatTheyChange) {
  ASSERT_OK_AND(const auto group,
                parse_param_group("*norm*  lr=0.5 weight_decay=0 "));
  EXPECT_EQ(group.pattern, "*norm*");
  EXPECT_EQ(group.lr, 0.5);
  EXPECT_EQ(group.weight_decay, 0.0);
  EXPECT_FALSE(group.frozen);
  EXPECT_TRUE(parse_param_group("a frozen")->frozen);
  for (const char* text : {"", "  ", "*norm*", "a lr=", "a lr=-1", "a lr=1x",
                           "a thawed", "a frozen lr=1", "a lr=inf"})
    EXPECT_FALSE(parse_param_group(text).ok()) << text;
}

TEST(ParamGroups, TheFirstThatMatchesCounts) {
  const auto problem = [](std::vector<std::string> groups, int rank = 0) {
    pb::Optimizer optimizer;
    optimizer.mutable_groups()->Assign(groups.begin(), groups.end());
    geometry::ModelConfig model = geometry::llama(8, 1, 2, 2, 16, 16);
    if (rank > 0)
      model.lora = {.rank = rank, .alpha = 1, .targets = {"q_proj"}};
    const auto of = param_groups(optimizer, model);
    return of.ok() ? "" : of.status().message();
  };
  EXPECT_EQ(problem({"model.embed* frozen", "*norm* lr=0.1", "* lr=2"}), "");
  EXPECT_HAS(problem({"* lr=2", "*norm* lr=0.1"}), "no parameter has");
  EXPECT_HAS(problem({"*nrom* lr=2"}), "\"*nrom*\": no parameter has");
  EXPECT_HAS(problem({"* frozen"}), "all parameters are frozen");
  // The parameters of the model may be named though adapters are trained.
  EXPECT_EQ(problem({"*norm* lr=0.1", "*lora_A* lr=2"}, 4), "");
  EXPECT_HAS(problem({"*lora_C* lr=2"}, 4), "no parameter has");
  EXPECT_HAS(problem({"*lora* frozen"}, 4), "all parameters are frozen");
}

}  // namespace
}  // namespace remesh::jobfile
