// A worker name belongs to the key that registered it.
#include <gtest/gtest.h>

#include <algorithm>

#include "coordinator/core/coordinator.h"
#include "tests/unit/core/builders.h"

namespace remesh::core {
namespace {

class OwnersTest : public ::testing::Test {
 protected:
  OwnersTest() {
    options_.job.mutable_train()->set_steps(1000);
    options_.job.mutable_elastic()->set_dead_after_ms(60'000);
    core_.emplace(options_);
    actions_ = core_->start(now_);
  }
  void hear(const std::string& worker, const std::string& key,
            uint64_t incarnation = 1) {
    pb::Report r = report(worker, ++seq_, incarnation);
    r.set_state(pb::Report::IDLE);
    actions_ = core_->on(received(r, key), now_);
  }
  void restart() {
    options_.restored = core_->durable();
    core_.emplace(options_);
    actions_ = core_->start(now_);
  }
  bool may(const std::string& key, Claim claim) const {
    return core_->owners().may_use("w", key, claim, core_->roster());
  }
  // In the journal of the next coordinator.
  void own(const std::string& worker, const std::string& key) {
    if (!options_.restored) options_.restored.emplace();
    pb::NameOwners::Owner* o =
        options_.restored->mutable_name_owners()->add_owners();
    o->set_worker(worker);
    o->set_key(key);
  }
  std::vector<pb::EventRecord> events() const {
    std::vector<pb::EventRecord> out;
    for (const Action& a : actions_)
      if (const auto* e = std::get_if<EmitEvent>(&a)) out.push_back(e->record);
    return out;
  }

  Options options_;
  std::optional<Coordinator> core_;
  std::vector<Action> actions_;
  int64_t now_ = 0;
  uint64_t seq_ = 0;
};

TEST_F(OwnersTest, TheFirstKeyOwnsANameAndTheJournalKnows) {
  EXPECT_TRUE(may("any", Claim::kNone));
  hear("w", "first");
  ASSERT_FALSE(actions_.empty());
  const auto* persisted = std::get_if<Persist>(actions_.data());
  ASSERT_NE(persisted, nullptr) << "before anything that depends on it";
  ASSERT_EQ(persisted->durable.name_owners().owners_size(), 1);
  EXPECT_EQ(persisted->durable.name_owners().owners(0).key(), "first");
  EXPECT_TRUE(may("first", Claim::kNone));
  EXPECT_FALSE(may("other", Claim::kNone));
  EXPECT_TRUE(
      core_->owners().may_use("w2", "other", Claim::kNone, core_->roster()));
  hear("w", "first");
  EXPECT_EQ(core_->durable().name_owners().owners_size(), 1);
  restart();
  EXPECT_EQ(core_->owners().owner_of("w"), "first");
  EXPECT_FALSE(may("other", Claim::kNone));
}

TEST_F(OwnersTest, ANameIsTakenOverByItsOwnerOrAfterADeath) {
  hear("w", "first");
  EXPECT_TRUE(may("next", Claim::kNow));
  EXPECT_FALSE(may("next", Claim::kWhenDead)) << "it lives";
  now_ += 1;
  actions_ = core_->on(PeerLost{"w", "its key is not allowed"}, now_);
  EXPECT_TRUE(may("next", Claim::kWhenDead));
  EXPECT_FALSE(may("next", Claim::kNone));
  hear("w", "next");
  EXPECT_EQ(core_->owners().owner_of("w"), "next");
  EXPECT_EQ(core_->durable().name_owners().owners_size(), 1);
  EXPECT_FALSE(may("first", Claim::kWhenDead));
  EXPECT_EQ(core_->owners().workers_of("next"), std::vector<std::string>{"w"});
  EXPECT_TRUE(core_->owners().workers_of("first").empty());
}

TEST_F(OwnersTest, AWorkerWhoseKeyIsRevokedIsLostAtOnce) {
  hear("w", "first");
  actions_ = core_->on(PeerLost{"w", "its key is not allowed"}, ++now_);
  const auto told = events();
  const auto lost = std::find_if(
      told.begin(), told.end(),
      [](const pb::EventRecord& e) { return e.event() == "worker_lost"; });
  ASSERT_NE(lost, told.end());
  EXPECT_EQ(lost->worker(), "w");
  EXPECT_EQ(lost->cause(), "its key is not allowed");
  EXPECT_FALSE(core_->roster().considers_live("w", 1));
  // A broken connection alone may come back.
  hear("w2", "other");
  actions_ = core_->on(PeerLost{"w2", ""}, ++now_);
  EXPECT_TRUE(core_->roster().considers_live("w2", 1));
}

TEST_F(OwnersTest, IncarnationsOfOneKeyAreRateLimited) {
  uint64_t life = 0;
  const auto flood = [&] {
    int taken = 0;
    for (int i = 0; i < 6'000; ++i) {
      hear("w", "flood", ++life);
      taken += core_->roster().considers_live("w", life) ? 1 : 0;
    }
    return taken;
  };
  EXPECT_EQ(flood(), 4096);
  hear("other", "another");
  EXPECT_TRUE(core_->roster().find("other") != nullptr);
  now_ += 1000;
  EXPECT_EQ(flood(), 64);
  const pb::Report known = report("w", ++seq_, life - 6'000 + 64);
  (void)core_->on(received(known, "flood"), now_);
  EXPECT_TRUE(core_->roster().newest_is(known))
      << "those that were taken are heard";
}

// Not those of others, and of workers that are gone.
TEST_F(OwnersTest, TheKeyWithTheMostNamesLosesTheOldest) {
  own("honest", "another");
  for (int i = 0; i < 16'382; ++i) own("w" + std::to_string(i), "flood");
  own("late", "third");
  core_.emplace(options_);
  actions_ = core_->start(now_);
  hear("w0", "flood");
  hear("new", "flood");
  EXPECT_EQ(core_->owners().owner_of("honest"), "another");
  EXPECT_EQ(core_->owners().owner_of("late"), "third");
  EXPECT_EQ(core_->owners().owner_of("w0"), "flood") << "a member";
  EXPECT_EQ(core_->owners().owner_of("w1"), "");
  EXPECT_EQ(core_->owners().owner_of("w2"), "flood");
  EXPECT_EQ(core_->owners().owner_of("new"), "flood");
  EXPECT_EQ(core_->durable().name_owners().owners_size(), 16'384);
}

// As those that a job secret admits, each of which has one name.
TEST_F(OwnersTest, OfKeysWithAsManyNamesTheLastOneLosesOne) {
  for (int i = 0; i < 16'384; ++i)
    own("w" + std::to_string(i), "key-" + std::to_string(i));
  core_.emplace(options_);
  actions_ = core_->start(now_);
  hear("new", "another");
  EXPECT_EQ(core_->owners().owner_of("new"), "another");
  EXPECT_EQ(core_->owners().owner_of("w0"), "key-0");
  EXPECT_EQ(core_->owners().owner_of("w16383"), "");
  EXPECT_EQ(core_->durable().name_owners().owners_size(), 16'384);
}

TEST_F(OwnersTest, WithoutKeysNobodyOwnsAName) {
  hear("w", "");
  EXPECT_EQ(core_->durable().name_owners().owners_size(), 0);
}

}  // namespace
}  // namespace remesh::core
