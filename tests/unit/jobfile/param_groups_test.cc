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
  EXPECT_NE(problem({"* lr=2", "*norm* lr=0.1"}).find("no parameter has"),
            std::string::npos);
  EXPECT_NE(problem({"*nrom* lr=2"}).find("\"*nrom*\": no parameter has"),
            std::string::npos);
  EXPECT_NE(problem({"* frozen"}).find("all parameters are frozen"),
            std::string::npos);
  // The parameters of the model may be named though adapters are trained.
  EXPECT_EQ(problem({"*norm* lr=0.1", "*lora_A* lr=2"}, 4), "");
  EXPECT_NE(problem({"*lora_C* lr=2"}, 4).find("no parameter has"),
            std::string::npos);
  EXPECT_NE(problem({"*lora* frozen"}, 4).find("all parameters are frozen"),
            std::string::npos);
}

}  // namespace
}  // namespace remesh::jobfile
