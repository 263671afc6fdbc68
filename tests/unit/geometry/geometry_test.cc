
#include "parallel/geometry/layout.h"
#include "parallel/geometry/model_work.h"
#include "parallel/geometry/param_table.h"
#include "tests/testing/expect.h"
#include "tests/testing/llama.h"

namespace remesh::geometry {
namespace {

TEST(Layout, RankAndCoordAreInverseOnEveryMesh) {
  for (int dp = 1; dp <= 3; ++dp)
    for (int pp = 1; pp <= 3; ++pp)
      for (int tp = 1; tp <= 3; ++tp)
        for (int cp = 1; cp <= 2; ++cp) {
          const Layout l{.dp = dp, .pp = pp, .tp = tp, .cp = cp};
          for (int r = 0; r < l.world(); ++r) EXPECT_EQ(l.rank(l.coord(r)), r);
          EXPECT_EQ(*Layout::parse(l.to_string()), l);
        }
}

TEST(Layout, ParseRefusesWithTheReason) {
  for (const char* bad : {"", "dp", "dp0", "xx2", "dp2,dp3", "dp2;tp2", "dp-1",
                          "dp2,", "dp99999999999"}) {
    const auto r = Layout::parse(bad);
    ASSERT_FALSE(r.ok()) << bad;
    EXPECT_SAYS(r, "like dp2,pp2,tp2");
  }
}

TEST(ParamTable, CountsTheParametersOfKnownModels) {
  ModelConfig c = llama(4096, 32, 32, 8, 14336, 128256);
  EXPECT_EQ(ParamTable::make(c).num_elements(), 8030261248);  // Llama 3 8B
  c.tie_embeddings = true;
  EXPECT_EQ(ParamTable::make(c).num_elements(),
            8030261248 - int64_t{128256} * 4096);
}

TEST(ParamTable, ParametersFollowEachOther) {
  const ModelConfig c = llama(8, 2, 2, 1, 12, 11);
  const ParamTable t = ParamTable::make(c);
  int64_t next = 0;
  for (size_t i = 0; i < t.size(); ++i) {
    EXPECT_EQ(t.offset(i), next);
    next += t[i].numel();
  }
  EXPECT_EQ(t.num_elements(), next);
}

TEST(ModelConfig, RefusesHeadsThatDoNotDivide) {
  ModelConfig c = llama(10, 1, 3, 3, 4, 5);
  EXPECT_SAYS(c.validate(), "must divide model.dim = 10");
}

// The exact mean counts the token itself, half a key more than half of the
// tokens.
TEST(ModelWork, CountsTheKeysInsideAWindow) {
  ModelConfig c;
  for (const int64_t T : {1, 6, 100})
    for (c.sliding_window = 0; c.sliding_window < 110; ++c.sliding_window) {
      double sum = 0;
      for (int64_t i = 0; i < T; ++i)
        sum += static_cast<double>(
            c.sliding_window == 0 ? i + 1 : std::min(i + 1, c.sliding_window));
      EXPECT_NEAR(mean_keys(c, T), sum / static_cast<double>(T), 0.5)
          << c.sliding_window << " of " << T;
    }
}

}  // namespace
}  // namespace remesh::geometry
