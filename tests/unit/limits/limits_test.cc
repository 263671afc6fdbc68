// What a message may contain: each limit, at it and beyond.
#include <google/protobuf/unknown_field_set.h>

#include <functional>
#include <limits>

#include "proto/limits/plausible.h"
#include "tests/testing/expect.h"

namespace remesh::limits {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr Known kKnown{.generation = 7, .epoch = 1'000, .steps = 1'000};

pb::Report good_report() {
  pb::Report r;
  r.set_worker("node-7.rack_2");
  r.set_incarnation(uint64_t{50'000} << 20);
  r.set_seq(3);
  r.set_host("node-7");
  r.set_slots(2);
  r.set_cores(8);
  r.set_generation(7);
  r.set_coordinator_epoch(1'000);
  r.add_ranks()->set_rank(5);
  r.add_metrics()->set_step(12);
  r.add_holdings()->set_rank(5);
  return r;
}

struct Change {
  const char* field;  // that the error names
  std::function<void(pb::Report*)> make;
};

TEST(Plausible, AReportAtEveryLimitIsAccepted) {
  pb::Report r = good_report();
  EXPECT_OK(check(r, kKnown));
  r.set_slots(kMaxSlots);
  r.set_cores(kMaxCores);
  r.set_generation(kKnown.generation + kMaxGenerationLead);
  r.set_coordinator_epoch(kKnown.epoch + kMaxEpochLeadMs);
  r.set_incarnation(kMaxIncarnation);
  while (r.ranks_size() < kMaxSlots) r.add_ranks()->set_rank(kMaxRanks - 1);
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

TEST(Plausible, WhatIsBeyondALimitIsRefusedByName) {
  const Change changes[] = {
      {"worker", [](auto* r) { r->set_worker(""); }},
      {"worker", [](auto* r) { r->set_worker("../up"); }},
      {"worker", [](auto* r) { r->set_worker(std::string(65, 'w')); }},
      {"host", [](auto* r) { r->set_host("\x1b[31mred"); }},
      {"host",
       [](auto* r) {
         r->set_host(
             "a\xc2\x9b"
             "1m");
       }},
      {"host", [](auto* r) { r->set_host("a\x9b 1m"); }},  // C1 as a byte
      {"host", [](auto* r) { r->set_host("caf\xe9"); }},   // Latin-1
      {"host", [](auto* r) { r->set_host("a\xc3"); }},     // cut
      {"host", [](auto* r) { r->set_host("\xc0\xaf"); }},  // overlong
      {"host", [](auto* r) { r->set_host("\xe0\x80\xaf"); }},
      {"host", [](auto* r) { r->set_host("\xed\xa0\x80"); }},  // a surrogate
      {"host", [](auto* r) { r->set_host("\xf4\x90\x80\x80"); }},
      {"holdings.segment",
       [](auto* r) { r->mutable_holdings(0)->set_segment("\xff"); }},
      {"host", [](auto* r) { r->set_host(std::string(kMaxHost + 1, 'h')); }},
      {"build", [](auto* r) { r->set_build("\x7f"); }},
      {"slots", [](auto* r) { r->set_slots(-1); }},
      {"slots", [](auto* r) { r->set_slots(kMaxSlots + 1); }},
      {"cores", [](auto* r) { r->set_cores(-1); }},
      {"bytes", [](auto* r) { r->set_memory_bytes(~uint64_t{0}); }},
      {"bytes", [](auto* r) { r->set_state_room(~uint64_t{0}); }},
      {"generation", [](auto* r) { r->set_generation(-1); }},
      {"generation", [](auto* r) { r->set_generation(kHuge); }},
      {"generation",
       [](auto* r) { r->set_generation(8 + kMaxGenerationLead); }},
      {"coordinator_epoch",
       [](auto* r) { r->set_coordinator_epoch(~uint64_t{1}); }},
      {"incarnation", [](auto* r) { r->set_incarnation(~uint64_t{0}); }},
      {"incarnation", [](auto* r) { r->set_incarnation(kMaxIncarnation + 1); }},
      {"ranks", [](auto* r) { r->set_slots(0); }},
      {"ranks.rank", [](auto* r) { r->mutable_ranks(0)->set_rank(-1); }},
      {"ranks.rank", [](auto* r) { r->mutable_ranks(0)->set_rank(kMaxRanks); }},
      {"ranks.step", [](auto* r) { r->mutable_ranks(0)->set_step(kHuge); }},
      {"ranks.committed_step",
       [](auto* r) { r->mutable_ranks(0)->set_committed_step(-2); }},
      {"ranks.checkpoint_step",
       [](auto* r) { r->mutable_ranks(0)->set_checkpoint_step(kHuge); }},
      {"ranks.step", [](auto* r) { r->mutable_ranks(0)->set_step(1002); }},
      {"ranks.committed_step",
       [](auto* r) { r->mutable_ranks(0)->set_committed_step(1001); }},
      {"ranks.checkpoint_step",
       [](auto* r) {
         r->mutable_ranks(0)->set_committed_step(5);
         r->mutable_ranks(0)->set_checkpoint_step(7);
       }},
      {"ranks.checkpoint_step",
       [](auto* r) {
         r->mutable_ranks(0)->set_committed_step(1000);
         r->mutable_ranks(0)->set_checkpoint_step(1001);
       }},
      {"metrics.step", [](auto* r) { r->mutable_metrics(0)->set_step(1001); }},
      {"ranks.exit_time",
       [](auto* r) {
         r->mutable_ranks(0)->set_exit_time(
             std::numeric_limits<double>::infinity());
       }},
      {"metrics.step", [](auto* r) { r->mutable_metrics(0)->set_step(0); }},
      {"metrics.step_s",
       [](auto* r) {
         r->mutable_metrics(0)->set_step_s(
             std::numeric_limits<double>::quiet_NaN());
       }},
      {"members of a group",
       [](auto* r) {
         r->mutable_ranks(0)->mutable_at()->mutable_ranks()->Resize(
             kMaxMembers + 1, 1);
       }},
      {"validation losses",
       [](auto* r) {
         r->mutable_metrics(0)->mutable_val_losses()->Resize(kMaxValidated + 1,
                                                             1);
       }},
      {"degree",
       [](auto* r) { r->mutable_metrics(0)->mutable_mesh()->set_pp(0); }},
      {"steps",
       [](auto* r) {
         while (r->metrics_size() <= kMaxMetrics) r->add_metrics()->set_step(1);
       }},
      {"states",
       [](auto* r) {
         while (r->holdings_size() <= kMaxHoldings) r->add_holdings();
       }},
      {"holdings.step",
       [](auto* r) { r->mutable_holdings(0)->set_step(kHuge); }},
      {"sharding.chunks",
       [](auto* r) {
         r->mutable_holdings(0)->mutable_sharding()->set_chunks(0);
       }},
      {"ranks of a mesh",
       [](auto* r) {
         auto* m = r->mutable_holdings(0)->mutable_sharding()->mutable_mesh();
         m->set_dp(46341);
         m->set_tp(2);
         m->set_cp(46341);
       }},
  };
  for (const Change& change : changes) {
    pb::Report r = good_report();
    change.make(&r);
    const Status s = check(r, kKnown);
    EXPECT_EQ(s.code(), Code::kInvalidArgument) << change.field;
    EXPECT_SAYS(s, change.field);
    EXPECT_EQ(s.message(), printable(s.message())) << "obeyed by a terminal";
  }
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
  pb::Directive good;
  pb::RankPlace* place = good.mutable_assignment()->add_ranks();
  place->set_rank(0);
  place->set_worker("a");
  EXPECT_OK(check(good));
  const std::function<void(pb::Directive*)> changes[] = {
      [](auto* d) { d->set_generation(kHuge); },
      [](auto* d) { d->set_epoch(~uint64_t{0}); },
      [](auto* d) { d->set_report_every_ms(-1); },
      [](auto* d) { d->mutable_assignment()->mutable_ranks(0)->set_rank(1); },
      [](auto* d) {
        d->mutable_assignment()->mutable_ranks(0)->set_local_slot(-1);
      },
      [](auto* d) {
        d->mutable_assignment()->mutable_ranks(0)->set_worker("a/b");
      },
      [](auto* d) { d->mutable_assignment()->mutable_mesh()->set_dp(0); },
      [](auto* d) { d->mutable_assignment()->set_run_dir("/run\n"); },
      [](auto* d) { d->set_run_dir("/run\n"); },
  };
  for (const auto& change : changes) {
    pb::Directive d = good;
    change(&d);
    EXPECT_FALSE(check(d).ok()) << d.ShortDebugString();
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
