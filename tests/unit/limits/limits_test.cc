// What a message may contain: each limit, at it and beyond.
#include <fmt/format.h>
#include <google/protobuf/unknown_field_set.h>

#include <limits>
#include <string>
#include <utility>

#include "proto/limits/plausible.h"
#include "tests/testing/expect.h"
#include "tests/testing/text_message.h"

namespace remesh::limits {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr Known kKnown{.generation = 7, .epoch = 1'000, .steps = 1'000};

pb::Report good_report() {
  auto r = text_message<pb::Report>(R"(
      worker: "node-7.rack_2" seq: 3 host: "node-7" slots: 2 cores: 8
      generation: 7 coordinator_epoch: 1000
      ranks { rank: 5 } metrics { step: 12 } holdings { rank: 5 })");
  r.set_incarnation(uint64_t{50'000} << 20);
  return r;
}

TEST(Plausible, AReportAtEveryLimitIsAccepted) {
  pb::Report r = good_report();
  EXPECT_OK(check(r, kKnown));
  r.set_slots(kMaxSlots);
  r.set_cores(kMaxCores);
  r.set_generation(kKnown.generation + kMaxGenerationLead);
  r.set_coordinator_epoch(kKnown.epoch + kMaxEpochLeadMs);
  r.set_incarnation(kMaxIncarnation);
  while (r.ranks_size() < kMaxSlots)
    r.add_ranks()->set_rank(kMaxRanks + 1 - r.ranks_size());
  while (r.metrics_size() < kMaxMetrics)
    r.add_metrics()->set_step(kKnown.steps);
  while (r.holdings_size() < kMaxHoldings)
    r.add_holdings()->mutable_sharding()->mutable_mesh()->set_dp(kMaxRanks);
  while (r.metrics(0).val_losses_size() < kMaxValidated)
    r.mutable_metrics(0)->add_val_losses(1);
  r.set_host(std::string(kMaxHost, 'h'));
  r.mutable_ranks(0)->set_step(kKnown.steps + 1);
  r.mutable_ranks(0)->set_committed_step(kKnown.steps);
  r.mutable_ranks(0)->set_checkpoint_step(kKnown.steps);
  r.set_build("h\xc3\xb6\xe2\x82\xac\xf0\x9f\x98\x80\xf4\x8f\xbf\xbf");
  EXPECT_OK(check(r, kKnown));
}

void expect_refused(const char* field, const pb::Report& r) {
  const Status s = check(r, kKnown);
  EXPECT_EQ(s.code(), Code::kInvalidArgument) << field;
  EXPECT_SAYS(s, field);
  EXPECT_EQ(s.message(), printable(s.message())) << "obeyed by a terminal";
}

TEST(Plausible, WhatIsBeyondALimitIsRefusedByName) {
  // The field that the error names, and what the report has besides.
  const std::pair<const char*, std::string> fields[] = {
      {"worker", "worker: ''"},
      {"worker", "worker: '../up'"},
      {"worker", "worker: '" + std::string(65, 'w') + "'"},
      {"host", R"(host: '\x1b[31mred')"},
      {"host", R"(host: 'a\xc2\x9b' '1m')"},
      {"host", R"(host: 'a\x9b 1m')"},  // C1 as a byte
      {"host", R"(host: 'caf\xe9')"},   // Latin-1
      {"host", R"(host: 'a\xc3')"},     // cut
      {"host", R"(host: '\xc0\xaf')"},  // overlong
      {"host", R"(host: '\xe0\x80\xaf')"},
      {"host", R"(host: '\xed\xa0\x80')"},  // a surrogate
      {"host", R"(host: '\xf4\x90\x80\x80')"},
      {"host", "host: '" + std::string(kMaxHost + 1, 'h') + "'"},
      {"build", R"(build: '\x7f')"},
      {"slots", "slots: -1"},
      {"slots", fmt::format("slots: {}", kMaxSlots + 1)},
      {"cores", "cores: -1"},
      {"bytes", fmt::format("memory_bytes: {}", ~uint64_t{0})},
      {"bytes", fmt::format("state_room: {}", ~uint64_t{0})},
      {"generation", "generation: -1"},
      {"generation", fmt::format("generation: {}", kHuge)},
      {"generation", fmt::format("generation: {}", 8 + kMaxGenerationLead)},
      {"coordinator_epoch", fmt::format("coordinator_epoch: {}", ~uint64_t{1})},
      {"incarnation", fmt::format("incarnation: {}", ~uint64_t{0})},
      {"incarnation", fmt::format("incarnation: {}", kMaxIncarnation + 1)},
      {"ranks", "slots: 0"},
      {"ranks.rank", "ranks { rank: -1 }"},
      {"ranks.rank", fmt::format("ranks {{ rank: {} }}", kMaxRanks)},
      {"ranks.step", fmt::format("ranks {{ step: {} }}", kHuge)},
      {"ranks.step", "ranks { step: 1002 }"},
      {"ranks.committed_step", "ranks { committed_step: -2 }"},
      {"ranks.committed_step", "ranks { committed_step: 1001 }"},
      {"ranks.checkpoint_step",
       fmt::format("ranks {{ checkpoint_step: {} }}", kHuge)},
      {"ranks.checkpoint_step",
       "ranks { committed_step: 5 checkpoint_step: 7 }"},
      {"ranks.checkpoint_step",
       "ranks { committed_step: 1000 checkpoint_step: 1001 }"},
      {"ranks.exit_time", "ranks { exit_time: inf }"},
      {"metrics.step", "metrics { step: 1001 }"},
      {"metrics.step", "metrics { step: 0 }"},
      {"metrics.step_s", "metrics { step: 12 step_s: nan }"},
      {"degree", "metrics { step: 12 mesh { pp: 0 } }"},
      {"holdings.step", fmt::format("holdings {{ step: {} }}", kHuge)},
      {"holdings.segment", R"(holdings { segment: '\xff' })"},
      {"sharding.chunks", "holdings { sharding { chunks: 0 } }"},
      {"origins.generation", "origins { generation: 8 }"},
      {"origins.generation", "origins { generation: 0 }"},
      {"origins.from", "origins { generation: 7 from: 7 }"},
      {"origins.from", "origins { generation: 7 from: -1 }"},
      {"origins.step", "origins { generation: 7 step: -1 }"},
      {"ranks of a mesh",
       "holdings { sharding { mesh { dp: 46341 tp: 2 cp: 46341 } } }"},
  };
  for (const auto& [field, text] : fields) {
    SCOPED_TRACE(text);
    pb::Report r = good_report();
    merge_text(text, &r);
    expect_refused(field, r);
  }
}

TEST(Plausible, ListsBeyondALimitAreRefusedByName) {
  pb::Report members = good_report();
  members.mutable_ranks(0)->mutable_at()->mutable_ranks()->Resize(
      kMaxMembers + 1, 1);
  expect_refused("members of a group", members);
  pb::Report losses = good_report();
  losses.mutable_metrics(0)->mutable_val_losses()->Resize(kMaxValidated + 1, 1);
  expect_refused("validation losses", losses);
  pb::Report steps = good_report();
  while (steps.metrics_size() <= kMaxMetrics) steps.add_metrics()->set_step(1);
  expect_refused("steps", steps);
  pb::Report states = good_report();
  while (states.holdings_size() <= kMaxHoldings) states.add_holdings();
  expect_refused("states", states);
  pb::Report origins = good_report();
  while (origins.origins_size() <= kMaxOrigins)
    origins.add_origins()->set_generation(7);
  expect_refused("origins", origins);
}

// However far a message moves what is known, the next one cannot overflow.
TEST(Plausible, KnownNumbersDoNotOverflow) {
  pb::Report r = good_report();
  const Known most{.generation = kHuge, .epoch = ~uint64_t{0}};
  const int64_t generation = kMaxNumber - kMaxGenerationLead;
  const uint64_t epoch = kMaxNumber - kMaxEpochLeadMs;
  r.set_generation(generation);
  r.set_coordinator_epoch(epoch);
  EXPECT_OK(check(r, most));
  r.set_generation(generation + 1);
  EXPECT_FALSE(check(r, most).ok());
  r.set_generation(generation);
  r.set_coordinator_epoch(epoch + 1);
  EXPECT_FALSE(check(r, most).ok());
}

TEST(Plausible, FencesHaveThreeIndices) {
  pb::Envelope e;
  pb::FenceIn* f = e.mutable_fence_in();
  f->set_worker("a");
  f->set_index(kMaxFenceIndex);
  EXPECT_OK(check(e));
  for (const int64_t index : {int64_t{-1}, kMaxFenceIndex + 1, kHuge}) {
    f->set_index(index);
    EXPECT_FALSE(check(e).ok());
  }
}

TEST(Plausible, ADirectiveWithAnImpossibleAssignmentIsRefused) {
  const auto good = text_message<pb::Directive>(
      "assignment { ranks { rank: 0 worker: 'a' } }");
  EXPECT_OK(check(good));
  for (const std::string& text :
       {fmt::format("generation: {}", kHuge),
        fmt::format("epoch: {}", ~uint64_t{0}),
        std::string("report_every_ms: -1"),
        std::string("assignment { ranks { rank: 2 worker: 'a' } }"),
        std::string(
            "assignment { ranks { rank: 1 worker: 'a' local_slot: -1 } }"),
        std::string("assignment { ranks { rank: 1 worker: 'a/b' } }"),
        std::string("assignment { mesh { dp: 0 } }"),
        std::string(R"(assignment { run_dir: '/run\n' })"),
        std::string(R"(run_dir: '/run\n')")}) {
    SCOPED_TRACE(text);
    pb::Directive d = good;
    merge_text(text, &d);
    EXPECT_FALSE(check(d).ok());
  }
}

// What a later release adds to an enumeration reads as the default here: fresh
// weights, in this case.
TEST(Plausible, ASourceOfALaterReleaseIsRefused) {
  pb::Directive d;
  pb::Source* source = d.mutable_assignment()->mutable_source();
  source->set_kind(pb::Source::MEMORY);
  EXPECT_OK(check(d));
  std::string bytes = source->SerializeAsString();
  bytes.back() = 99;
  ASSERT_TRUE(source->ParseFromString(bytes));
  EXPECT_EQ(source->kind(), pb::Source::INIT);
  EXPECT_FALSE(check(d).ok());
}

TEST(Plausible, TextsForPeopleAreCleanedInsteadOfRefused) {
  pb::Report r = good_report();
  r.mutable_ranks(0)->set_last_log(
      "\x1b[31mloss\tis 3\xc2\x9b"
      "1m \xc3\xa9");
  r.mutable_ranks(0)->add_log_tail(std::string(5000, 'x') + "\n");
  r.mutable_ranks(0)->set_error("plain");
  r.set_hardware_error(std::string(5000, 'x'));
  ASSERT_OK(check(r, kKnown));
  clean(&r);
  EXPECT_EQ(r.ranks(0).last_log(), "?[31mloss?is 3??1m \xc3\xa9");
  EXPECT_EQ(r.ranks(0).log_tail(0).size(), kMaxText);
  EXPECT_EQ(r.ranks(0).error(), "plain");
  EXPECT_EQ(r.hardware_error().size(), kMaxText);
}

// A megabyte of it would be in every status.
TEST(Plausible, WhatNobodyReadsOfAReportIsRemoved) {
  const pb::Report good = good_report();
  pb::Report r = good;
  r.mutable_holdings(0)->set_worker("w");
  r.mutable_holdings(0)->set_host("h");
  const auto add_unknown = [](google::protobuf::Message* m) {
    m->GetReflection()->MutableUnknownFields(m)->AddVarint(1000, 1);
  };
  add_unknown(&r);
  add_unknown(r.mutable_ranks(0));
  add_unknown(r.mutable_metrics(0));
  clean(&r);
  EXPECT_EQ(r.SerializeAsString(), good.SerializeAsString());
}

}  // namespace
}  // namespace remesh::limits
