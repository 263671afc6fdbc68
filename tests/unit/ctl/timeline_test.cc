// Traces, plans and what a run measures of itself, as people see them.
#include "coordinator/ctl/timeline.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "coordinator/ctl/plan_view.h"
#include "coordinator/ctl/status_view.h"
#include "parallel/geometry/layout.h"
#include "tests/testing/expect.h"
#include "tests/testing/resolved_job.h"
#include "tests/testing/text_message.h"

namespace remesh::ctl {
namespace {

using geometry::Pass;
using geometry::PipeOp;
using Json = nlohmann::json;

constexpr int64_t kUnix = 1'763'750'000'000'000;

// A rank's file, as worker/trace writes it.
class File {
 public:
  File(int rank, const std::string& mesh, const std::string& schedule,
       int64_t microbatches, int chunks = 1)
      : rank_(rank) {
    json_["otherData"] = {{"generation", 2},  {"rank", rank},
                          {"mesh", mesh},     {"schedule", schedule},
                          {"chunks", chunks}, {"microbatches", microbatches},
                          {"dropped", 0}};
    json_["traceEvents"] = Json::array();
    json_["traceEvents"].push_back(
        {{"ph", "M"},
         {"pid", rank},
         {"tid", 0},
         {"name", "process_name"},
         {"args", {{"name", fmt::format("rank {}", rank)}}}});
  }
  void span(const std::string& category, int64_t begin, int64_t end,
            const Json& args = Json::object(), int tid = 0) {
    json_["traceEvents"].push_back({{"ph", "X"},
                                    {"pid", rank_},
                                    {"tid", tid},
                                    {"ts", kUnix + begin},
                                    {"dur", end - begin},
                                    {"name", category},
                                    {"cat", category},
                                    {"args", args}});
  }
  std::string text() const { return json_.dump(); }
  RankTrace parsed() const {
    auto t = parse_trace(text(), "f.json");
    EXPECT_OK(t);
    return t.ok() ? *t : RankTrace{};
  }

 private:
  int rank_;
  Json json_;
};

TEST(Timeline, FilesThatAViewerCouldNotShowAreRefused) {
  File good(0, "dp1", "1f1b", 1);
  good.span("step", 0, 100, {{"step", 1}});
  good.span("forward", 10, 50, {{"microbatch", 0}});
  good.span("wait", 10, 50);
  good.span("wait", 50, 50);
  EXPECT_EQ(good.parsed().spans.size(), 4U);
  const auto refused = [](const std::string& text, const std::string& why) {
    const auto t = parse_trace(text, "f.json");
    EXPECT_EQ(t.status().code(), Code::kCorrupt) << why;
    EXPECT_SAYS(t, why);
  };
  File overlapping = good;
  overlapping.span("data", 40, 120);
  refused(overlapping.text(), "'data' begins in 'wait' of lane 0 and ends");
  File negative = good;
  negative.span("data", 40, 30);
  refused(negative.text(), "event 5 has a negative length");
  refused(good.text().substr(0, 200), "no JSON");
  refused("[]", "no JSON with traceEvents");
  refused(R"({"traceEvents":[],"otherData":{"rank":1}})", "otherData lacks");
  std::string odd = good.text();
  odd.replace(odd.find("\"ph\":\"X\""), 8, "\"ph\":\"Q\"");
  refused(odd, "of a kind");
  // In lanes of their own they may overlap.
  File lanes = good;
  lanes.span("collective", 40, 120, Json::object(), 1);
  EXPECT_EQ(lanes.parsed().spans.size(), 5U);
}

TEST(Timeline, RanksBecomeOneFileThatBeginsAtZero) {
  File a(0, "dp1,pp2", "1f1b", 1), b(1, "dp1,pp2", "1f1b", 1);
  a.span("step", 500, 900, {{"step", 1}});
  b.span("step", 300, 800, {{"step", 1}});
  b.span("wait", 400, 400);  // too short to be seen
  const Json all = Json::parse(merge_traces({a.parsed(), b.parsed()}));
  ASSERT_EQ(all.at("traceEvents").size(), 4U);
  EXPECT_EQ(all.at("traceEvents")[1].at("ts"), 200);
  EXPECT_EQ(all.at("traceEvents")[3].at("ts"), 0);
  EXPECT_EQ(all.at("traceEvents")[3].at("dur"), 500);
  EXPECT_EQ(all.at("otherData").at("begin_unix_us"), kUnix + 300);
  EXPECT_EQ(all.at("traceEvents")[2].at("args").at("name"), "rank 1 pp1");
}

TEST(Timeline, SharesCountEachMomentOnce) {
  File f(0, "dp2", "1f1b", 1);
  f.span("step", 0, 1000, {{"step", 1}});
  f.span("forward", 0, 400, {{"microbatch", 0}});
  f.span("collective", 100, 200);
  f.span("wait", 120, 180);  // inside: not again
  f.span("wait", 500, 600);
  f.span("bubble", 700, 900);
  f.span("collective", 0, 900, Json::object(), 1);  // beside: hidden
  f.span("wait", 1100, 1200);                       // in no step
  const RankShares s = shares_of(f.parsed());
  EXPECT_DOUBLE_EQ(s.step_s, 1000e-6);
  EXPECT_DOUBLE_EQ(s.exposed_s, 200e-6);
  EXPECT_DOUBLE_EQ(s.bubble_s, 200e-6);
  EXPECT_DOUBLE_EQ(s.compute_s(), 600e-6);
}

// Ranks that keep to a schedule exactly, with waits between and in the passes,
// measure the bubble that simulate() foretells.
TEST(Timeline, AScheduleKeptExactlyHasItsOwnBubble) {
  constexpr int kPp = 3, kMicrobatches = 5;
  const geometry::PassCosts costs{
      .forward = 200, .backward = 300, .weight = 100};
  for (const char* name : {"gpipe", "1f1b", "zb-h1"}) {
    const auto kind = geometry::parse_schedule(name);
    const auto schedule = geometry::make_schedule(*kind, kPp, kMicrobatches);
    const auto timing = geometry::simulate(*schedule, costs);
    // As simulate() does: an op starts when its rank and input are ready.
    std::map<std::tuple<int, int, int>, double> done;  // pass, stage, mb
    std::vector<size_t> next(kPp, 0);
    std::vector<double> free(kPp, 0);
    std::vector<File> files;
    for (int r = 0; r < kPp; ++r)
      files.emplace_back(r, "dp1,pp3", name, kMicrobatches);
    for (auto& f : files) f.span("step", -1000, 100'000, {{"step", 4}});
    for (bool moved = true; moved;) {
      moved = false;
      for (int r = 0; r < kPp; ++r) {
        const auto& ops = schedule->ranks[static_cast<size_t>(r)];
        size_t& n = next[static_cast<size_t>(r)];
        if (n == ops.size()) continue;
        const PipeOp op = ops[n];
        double start = free[static_cast<size_t>(r)];
        const auto needs = [&](Pass pass, int stage) {
          const auto it =
              done.find({static_cast<int>(pass), stage, op.microbatch});
          if (it == done.end()) return false;
          start = std::max(start, it->second);
          return true;
        };
        if (op.pass == Pass::kForward && r > 0 && !needs(Pass::kForward, r - 1))
          continue;
        if (op.pass == Pass::kBackward && r + 1 < kPp &&
            !needs(Pass::kBackward, r + 1))
          continue;
        const double length =
            op.pass == Pass::kForward ? costs.forward
            : op.pass == Pass::kWeight
                ? costs.weight
                : costs.backward +
                      (schedule->split_backward ? 0 : costs.weight);
        const char* category = op.pass == Pass::kForward    ? "forward"
                               : op.pass == Pass::kBackward ? "backward"
                                                            : "weight";
        // The wait for the input is inside the pass.
        const auto from = static_cast<int64_t>(free[static_cast<size_t>(r)]);
        const auto begin = static_cast<int64_t>(start);
        const auto end = static_cast<int64_t>(start + length);
        const bool first = n == 0;
        files[static_cast<size_t>(r)].span(category, first ? begin : from, end,
                                           {{"microbatch", op.microbatch}});
        if (!first && begin > from)
          files[static_cast<size_t>(r)].span("bubble", from, begin);
        done[{static_cast<int>(op.pass), r, op.microbatch}] = start + length;
        free[static_cast<size_t>(r)] = start + length;
        ++n;
        moved = true;
      }
    }
    std::vector<RankTrace> traces;
    for (const File& f : files) traces.push_back(f.parsed());
    ASSERT_OK_AND(const auto bubble, pipeline_bubble(traces));
    EXPECT_EQ(bubble.steps, 1);
    EXPECT_NEAR(bubble.measured, timing->bubble_share, 1e-3) << name;
    EXPECT_NEAR(bubble.scheduled, timing->bubble_share, 1e-3) << name;
    EXPECT_NEAR(bubble.uneven, timing->bubble_share, 1e-3) << name;
    EXPECT_NEAR(bubble.replayed, timing->bubble_share, 1e-3) << name;
    EXPECT_HAS(trace_report(traces), "with all passes alike, ratio 1.00");
  }
}

// One slow pass delays the other stage: no bubble of the schedule's, but none
// of the messages' either.
TEST(Timeline, AnUnsteadyPassIsSeparatedFromTheSchedule) {
  // 1F1B over two stages, two microbatches; forward and backward 10 ms each,
  // but for the second stage's first backward pass, which takes 50.
  File first(0, "dp1,pp2", "1f1b", 2), second(1, "dp1,pp2", "1f1b", 2);
  const auto pass = [](File& f, const char* kind, int64_t mb, int64_t begin,
                       int64_t end) {
    f.span(kind, begin, end, {{"microbatch", mb}});
  };
  for (File* f : {&first, &second}) f->span("step", 0, 100'000, {{"step", 1}});
  pass(first, "forward", 0, 0, 10'000);
  pass(first, "forward", 1, 10'000, 20'000);
  pass(first, "backward", 0, 70'000, 80'000);
  pass(first, "backward", 1, 90'000, 100'000);
  pass(second, "forward", 0, 10'000, 20'000);
  pass(second, "backward", 0, 20'000, 70'000);
  pass(second, "forward", 1, 70'000, 80'000);
  pass(second, "backward", 1, 80'000, 90'000);
  ASSERT_OK_AND(const auto bubble,
                pipeline_bubble({first.parsed(), second.parsed()}));
  EXPECT_NEAR(bubble.measured, 1 - 120.0 / 200, 1e-6);
  EXPECT_NEAR(bubble.replayed, bubble.measured, 1e-6);
  EXPECT_LT(bubble.scheduled, bubble.measured - 0.02);
}

TEST(Timeline, WithoutAPipelineThereIsNoBubble) {
  File f(0, "dp1", "1f1b", 1);
  f.span("step", 0, 100, {{"step", 1}});
  EXPECT_EQ(pipeline_bubble({f.parsed()})->steps, 0);
  EXPECT_LACKS(trace_report({f.parsed()}), "schedule");
}

TEST(Plan, PrintsMeshStagesAndMemoryOrTheReason) {
  const pb::Job job = resolved_job({"data.path=/d", "model.flavor=tiny",
                                    "parallel.pipeline_parallel_degree=2",
                                    "parallel.pipeline_schedule=zb-h1",
                                    "parallel.zero_stage=1"});
  ASSERT_OK_AND(const auto text,
                plan_text(job, {.slots = 5, .hosts = 1, .cores = 4}));
  for (const char* part :
       {"mesh dp2,pp2: 4 of 5 slots on 1 worker, 1 spare",
        "(multiples of 2 slots)", "ZeRO 1, zb-h1, no recomputation",
        "stage 0: embedding, layers 0-1", "stage 1: layers 2-3, head",
        "scheduled bubble: ",
        "4 microbatches of 4 x 256 tokens per step, 2 per data-parallel rank",
        "  besides: ", " inside of operations, ", " to save a checkpoint, ",
        " of old state while another mesh takes over\n"})
    EXPECT_HAS(text, part);
  EXPECT_EQ(plan_text(job, {.slots = 1, .cores = 4}).status().code(),
            Code::kExhausted);
  const auto refused =
      plan_text(job, {.slots = 8, .cores = 4, .layout = "tp3"});
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  ASSERT_OK_AND(const auto asked,
                plan_text(job, {.slots = 8, .cores = 4, .layout = "tp2,cp2"}));
  EXPECT_HAS(asked, "\nmesh dp1,tp2,cp2: 4 of 8");
}

pb::JobStatus measured() {
  auto s = text_message<pb::JobStatus>(R"(
      coordinator_pid: 7 job: "j" state: RUNNING mesh { pp: 2 }
      parallel { zero_stage: 2 zero_shard_group: 2 }
      recompute: "full" recompute_every: 2
      pinned: "dp1,pp2" predicted_bubble: 0.1
      last {
        step: 3 flops_per_s: 3.12e11 gemm_flops_per_s: 4e11 mfu: 0.39
        exposed_comm: 0.05 bubble: 0.125
      }
      workers { ranks { rank: 0 exposed_comm: 0.25 } })");
  pb::RankStatus* r = s.mutable_workers(0)->mutable_ranks(0);
  r->set_rss_bytes(3u << 30);
  r->mutable_memory()->set_weights(100 << 20);
  r->mutable_memory()->set_buffers(5 << 20);
  r->mutable_predicted()->set_weights(110 << 20);
  return s;
}

TEST(Status, ShowsSpeedSharesSettingsAndMemory) {
  const std::string text = status_text(measured(), {}, {});
  for (const char* part :
       {"dp1,pp2 (requested)",
        "ZeRO 2 in groups of 2, 1f1b, recompute full every 2 layers",
        "312G FLOP/s, GEMM efficiency 78.0%, MFU 39.0%",
        "exposed comm 5.0%, bubble 12.5% (10.0% scheduled)", "100M", "105M",
        "110M", "3.0G", "25.0%"})
    EXPECT_HAS(text, part);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    EXPECT_LE(line.size(), 80U) << line;
  pb::JobStatus bare;
  EXPECT_LACKS(status_text(bare, {}, {}), "FLOP/s");
  // Without train.peak_flops there is no MFU.
  pb::JobStatus unknown_peak = measured();
  unknown_peak.mutable_last()->clear_mfu();
  EXPECT_LACKS(status_text(unknown_peak, {}, {}), "MFU");
}

TEST(Status, JsonHasAllOfIt) {
  const Json j = Json::parse(status_json(measured(), {}));
  EXPECT_EQ(j.at("settings").at("zero_stage"), 2);
  EXPECT_EQ(j.at("settings").at("pipeline_schedule"), "1f1b");
  EXPECT_EQ(j.at("settings").at("pinned_mesh"), "dp1,pp2");
  EXPECT_EQ(j.at("settings").at("predicted_bubble"), 0.1);
  EXPECT_EQ(j.at("last").at("gemm_efficiency"), 0.78);
  EXPECT_EQ(j.at("last").at("mfu"), 0.39);
  EXPECT_EQ(j.at("last").at("bubble"), 0.125);
  const Json& rank = j.at("workers")[0].at("ranks")[0];
  EXPECT_EQ(rank.at("exposed_comm"), 0.25);
  EXPECT_EQ(rank.at("memory").at("total"), 105 << 20);
  EXPECT_EQ(rank.at("predicted_memory").at("weights"), 110 << 20);
  EXPECT_FALSE(rank.contains("bubble"));
}

}  // namespace
}  // namespace remesh::ctl
