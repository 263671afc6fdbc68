#include "bench/targets.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <string>

#include "tests/testing/expect.h"

namespace remesh::bench {
namespace {

struct Reported {
  int code;
  std::string text;
};

Reported report(const Targets& targets) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* const out = open_memstream(&text, &size);
  const int code = targets.report(out);
  std::fclose(out);
  Reported r{code, {text, size}};
  std::free(text);
  return r;
}

TEST(Targets, NoTargetsSucceed) {
  EXPECT_EQ(report(Targets(false)).code, 0);
  EXPECT_EQ(report(Targets(true)).code, 0);
}

TEST(Targets, TheLimitIsMet) {
  Targets t(false);
  t.at_most("pause", 0.5, 0.5);
  t.at_least("ratio", 6, 6);
  const Reported r = report(t);
  EXPECT_EQ(r.code, 0);
  EXPECT_LACKS(r.text, "NOT MET");
}

TEST(Targets, OneMissedTargetFails) {
  for (const bool most : {true, false}) {
    Targets t(false);
    t.at_most("pause", 0.5, most ? 0.51 : 0.4);
    t.at_least("ratio", 6, most ? 7 : 5.9);
    const Reported r = report(t);
    EXPECT_EQ(r.code, 1);
    EXPECT_HAS(r.text, most ? "0.510   NOT MET" : "5.900   NOT MET");
  }
}

TEST(Targets, AFigureThatIsNotANumberIsMissed) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Targets most(false);
  most.at_most("pause", 0.5, nan);
  EXPECT_EQ(report(most).code, 1);
  Targets least(false);
  least.at_least("ratio", 0.5, nan);
  EXPECT_EQ(report(least).code, 1);
}

TEST(Targets, ASmokeRunJudgesRequirementsOnly) {
  Targets t(true);
  t.at_most("pause", 0.5, 100);
  const Reported before = report(t);
  EXPECT_EQ(before.code, 0);
  EXPECT_HAS(before.text, "targets not judged");
  t.require("losses agree", true);
  EXPECT_EQ(report(t).code, 0);
  t.require("steps are complete", false);
  const Reported after = report(t);
  EXPECT_EQ(after.code, 1);
  EXPECT_HAS(after.text, "steps are complete");
  EXPECT_LACKS(after.text, "losses agree");
}

}  // namespace
}  // namespace remesh::bench
