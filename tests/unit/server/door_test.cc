// Which key may say what, and which worker names it may use.
#include "coordinator/server/door.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "coordinator/core/coordinator.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/wire/protocol.h"
#include "tests/testing/expect.h"
#include "tests/testing/files.h"
#include "tests/testing/hooked_file_system.h"

namespace remesh::server {
namespace {

using rundir::AllowedKey;

constexpr double kNow = 2'000'000'000;

pb::Envelope report_of(const std::string& worker) {
  pb::Envelope e;
  e.mutable_report()->set_worker(worker);
  return e;
}
pb::Envelope fence_of(const std::string& worker) {
  pb::Envelope e;
  e.mutable_fence_in()->set_worker(worker);
  return e;
}
pb::Envelope command(pb::Command::Kind kind) {
  pb::Envelope e;
  e.mutable_command()->set_kind(kind);
  return e;
}

mode_t mode_of(const std::string& path) {
  struct stat st {};
  return stat(path.c_str(), &st) == 0 ? st.st_mode & 07777 : 0;
}

class DoorTest : public ::testing::Test {
 protected:
  // A coordinator that listens.
  void open(double now = kNow) {
    ASSERT_OK_AND(door_,
                  Door::open(*fs_, {.run = run_, .job = "job", .make = true}));
    server_ =
        std::move(wire::Server::bind("tcp://127.0.0.1:0", door_->server_keys()))
            .value();
    door_->attach(server_.get(), now);
  }
  // Adds a key to the list; returns its public key.
  std::string allow(const std::string& role, const std::string& name,
                    const std::string& workers = "*", int64_t expires = 0,
                    const std::string& replaces = "") {
    if (!rundir::has_keys(*fs_, run_).value()) {
      EXPECT_OK(rundir::make_keys(*fs_, run_));
    }
    auto keys = rundir::read_allowed(run_).value();
    keys.push_back({.public_key = wire::new_key_pair().public_key,
                    .role = role,
                    .name = name,
                    .workers = workers,
                    .expires = expires,
                    .replaces = replaces});
    EXPECT_OK(rundir::write_allowed(*fs_, run_, keys));
    return keys.back().public_key;
  }
  void disallow(const std::string& public_key) {
    auto keys = rundir::read_allowed(run_).value();
    std::erase_if(
        keys, [&](const AllowedKey& k) { return k.public_key == public_key; });
    EXPECT_OK(rundir::write_allowed(*fs_, run_, keys));
  }
  // What the door does at that time once it has looked at its files.
  std::vector<std::string> refresh(double now) {
    std::vector<std::string> gone;
    for (const int before = door_->scans(); door_->scans() == before;) {
      for (std::string& key : door_->refresh(now))
        gone.push_back(std::move(key));
      usleep(1000);
    }
    return gone;
  }
  Status enrol(const std::string& by, const wire::Ticket& ticket) {
    return door_->server_keys()->enrol(by, ticket);
  }
  static wire::Ticket ticket(const std::string& worker,
                             const std::string& job = "job") {
    return {wire::new_key_pair().public_key, worker, job,
            static_cast<int64_t>(time(nullptr)) + wire::kTicketGoodForS};
  }

  remesh::testing::TempDir dir_;
  const std::string run_ = dir_.path() + "/run";
  std::unique_ptr<FileSystem> fs_ = posix_file_system();
  std::unique_ptr<Door> door_;
  std::unique_ptr<wire::Server> server_;
};

TEST_F(DoorTest, KeysAreMadeForTheOwnerAlone) {
  open();
  EXPECT_EQ(mode_of(rundir::keys_path(run_)), 0700u);
  for (const char* name : {"coordinator", "worker", "operator"})
    EXPECT_EQ(mode_of(rundir::key_path(run_, name)), 0600u) << name;
  ASSERT_OK_AND(const auto worker,
                wire::read_key_file(rundir::key_path(run_, "worker")));
  ASSERT_OK_AND(const auto server,
                wire::read_public_key(rundir::server_key_path(run_)));
  EXPECT_EQ(worker.server, server);
  EXPECT_EQ(door_->server_keys()->own.public_key, server);
  EXPECT_EQ(door_->why_refused(worker.pair.public_key, report_of("w")), "");
  // The next coordinator uses the same ones.
  server_.reset();
  open();
  door_->remove_made_keys(*fs_);  // it did not make them
  EXPECT_TRUE(rundir::has_keys(*fs_, run_).value());
  EXPECT_EQ(door_->server_keys()->own.public_key, server);
}

TEST_F(DoorTest, KeysThatCannotBeExaminedNowAreNotReplaced) {
  ASSERT_OK(rundir::make_keys(*fs_, run_));
  ASSERT_OK_AND(const auto before,
                wire::read_public_key(rundir::server_key_path(run_)));
  HookedFileSystem stale([](const std::string& call, const auto&) {
    return call == "look_up" ? errno_error("keys", ESTALE) : ok_status();
  });
  EXPECT_EQ(rundir::make_keys(stale, run_).code(), Code::kIo);
  const auto door =
      Door::open(stale, {.run = run_, .job = "job", .make = true});
  EXPECT_EQ(door.status().code(), Code::kIo);
  EXPECT_EQ(*wire::read_public_key(rundir::server_key_path(run_)), before);
}

TEST_F(DoorTest, AKeyThatCannotBeAllowedIsNotLeft) {
  ASSERT_OK(rundir::make_keys(*fs_, run_));
  HookedFileSystem full([](const std::string& call, const auto&) {
    return call == "rename" ? errno_error("keys", ENOSPC) : ok_status();
  });
  const AllowedKey key{.role = "join", .name = "batch"};
  EXPECT_EQ(rundir::make_member(full, run_, key, "").status().code(),
            Code::kExhausted);
  EXPECT_OK(rundir::make_member(*fs_, run_, key, ""));
}

TEST_F(DoorTest, WithoutKeysItRefusesToOpenAndSaysHowToMakeThem) {
  const auto door = Door::open(*fs_, {.run = run_, .job = "job"});
  EXPECT_SAYS(door, "remesh key new coordinator");
  EXPECT_SAYS(door, "--no-auth");
  EXPECT_FALSE(std::filesystem::exists(run_));
}

TEST_F(DoorTest, AKeyFileOthersCanReadIsNotUsed) {
  ASSERT_OK(rundir::make_keys(*fs_, run_));
  chmod(rundir::key_path(run_, "coordinator").c_str(), 0644);
  EXPECT_SAYS(Door::open(*fs_, {.run = run_, .job = "job"}), "chmod 600");
}

TEST_F(DoorTest, AFolderOfKeysThatOthersMayChangeIsNotUsed) {
  const auto refused = [&](const char* why) {
    const auto door =
        Door::open(*fs_, {.run = run_, .job = "job", .make = true});
    return !door.ok() && door.status().message().find(why) != std::string::npos;
  };
  const std::string keys = rundir::keys_path(run_);
  // Someone else made it before the run started.
  std::filesystem::create_directories(dir_.path() + "/elsewhere");
  std::filesystem::create_directory(run_);
  std::filesystem::create_symlink(dir_.path() + "/elsewhere", keys);
  EXPECT_TRUE(refused("not a link"));
  EXPECT_TRUE(std::filesystem::is_empty(dir_.path() + "/elsewhere"));
  std::filesystem::remove(keys);
  ASSERT_OK(rundir::make_keys(*fs_, run_));
  chmod(keys.c_str(), 0770);
  EXPECT_TRUE(refused("chmod 700"));
  chmod(keys.c_str(), 0700);
  EXPECT_FALSE(refused(""));
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  ASSERT_EQ(chown(keys.c_str(), 12345, 0), 0);
  EXPECT_TRUE(refused("uid 12345"));
}

TEST_F(DoorTest, EachRoleMaySendItsOwnMessagesOnly) {
  const std::string worker = allow("worker", "a");
  const std::string oper = allow("operator", "b");
  const std::string viewer = allow("viewer", "c");
  const std::string join = allow("join", "d");
  open();
  const auto may = [&](const std::string& key, const pb::Envelope& e) {
    return door_->why_refused(key, e).empty();
  };
  for (const auto& e : {report_of("w"), fence_of("w")}) {
    EXPECT_TRUE(may(worker, e));
    for (const auto& other : {oper, viewer, join}) EXPECT_FALSE(may(other, e));
  }
  for (const auto kind :
       {pb::Command::STATUS, pb::Command::DRAIN, pb::Command::CHECKPOINT,
        pb::Command::STOP, pb::Command::MESH, pb::Command::SCALE}) {
    EXPECT_TRUE(may(oper, command(kind)));
    EXPECT_EQ(may(viewer, command(kind)), kind == pb::Command::STATUS);
    EXPECT_FALSE(may(worker, command(kind)));
    EXPECT_FALSE(may(join, command(kind)));
  }
  pb::Envelope directive;
  directive.mutable_directive();
  for (const auto& key : {worker, oper, viewer, join})
    EXPECT_FALSE(may(key, directive));
  EXPECT_FALSE(may(wire::new_key_pair().public_key, report_of("w")));
  EXPECT_FALSE(may("", command(pb::Command::STATUS)));
  EXPECT_HAS(door_->why_refused(viewer, command(pb::Command::STOP)),
             "role viewer");
}

// Door finds it by that name.
TEST(Envelope, EachMessageOfAWorkerHasTheWorkersName) {
  using google::protobuf::FieldDescriptor;
  const auto* body = pb::Envelope::descriptor()->FindOneofByName("body");
  for (int i = 0; i < body->field_count(); ++i) {
    if (body->field(i)->options().GetExtension(pb::sent_by) != "worker")
      continue;
    const auto* name =
        body->field(i)->message_type()->FindFieldByName("worker");
    ASSERT_NE(name, nullptr) << body->field(i)->name();
    EXPECT_EQ(name->cpp_type(), FieldDescriptor::CPPTYPE_STRING);
  }
}

TEST_F(DoorTest, AKeyMayUseOnlyItsWorkerNames) {
  const std::string key = allow("worker", "a", "rack1-*");
  open();
  EXPECT_EQ(door_->why_refused(key, report_of("rack1-7")), "");
  EXPECT_NE(door_->why_refused(key, report_of("rack2-7")), "");
  EXPECT_NE(door_->why_refused(key, fence_of("rack2-7")), "");
}

TEST_F(DoorTest, ARevokedOrExpiredKeyLosesItsRight) {
  const std::string revoked = allow("worker", "a");
  const std::string expires = allow("worker", "b", "*", kNow + 10);
  open();
  EXPECT_EQ(door_->why_refused(revoked, report_of("w")), "");
  EXPECT_EQ(door_->why_refused(expires, report_of("w")), "");
  EXPECT_TRUE(refresh(kNow + 1).empty());
  disallow(revoked);
  EXPECT_EQ(refresh(kNow + 2), std::vector<std::string>{revoked});
  EXPECT_NE(door_->why_refused(revoked, report_of("w")), "");
  EXPECT_EQ(door_->why_refused(expires, report_of("w")), "");
  EXPECT_EQ(refresh(kNow + 11), std::vector<std::string>{expires});
  EXPECT_NE(door_->why_refused(expires, report_of("w")), "");
  EXPECT_TRUE(refresh(kNow + 9).empty());
  EXPECT_EQ(door_->why_refused(expires, report_of("w")), "")
      << "the clock was ahead";
}

TEST_F(DoorTest, AListThatCannotBeReadChangesNothing) {
  const std::string key = allow("worker", "a");
  open();
  std::ofstream(rundir::allowed_path(run_), std::ios::app) << "nonsense\n";
  EXPECT_TRUE(refresh(kNow + 1).empty());
  EXPECT_HAS(door_->problem(), "allowed.toml");
  EXPECT_EQ(door_->why_refused(key, report_of("w")), "");
  server_.reset();
  const auto again = Door::open(*fs_, {.run = run_, .job = "job"});
  EXPECT_FALSE(again.ok());
}

// Workers that crash again and again make keys without end.
TEST_F(DoorTest, KeysOfWorkersThatAreLongGoneAreForgotten) {
  const std::string join = allow("join", "batch");
  const auto now = static_cast<double>(time(nullptr));
  open(now);
  std::vector<std::string> keys;
  for (int i = 0; i < 1100; ++i) {
    keys.push_back(ticket("node1").public_key);
    wire::Ticket t = ticket("node1");
    t.public_key = keys.back();
    ASSERT_OK(enrol(join, t)) << i;
  }
  EXPECT_TRUE(refresh(now + 1).empty());
  EXPECT_TRUE(refresh(now + 100'000).empty()) << "the clock was set";
  const double later = now + 100'000;
  for (int s = 20; s <= 580; s += 20) EXPECT_TRUE(refresh(later + s).empty());
  EXPECT_EQ(door_->why_refused(keys[7], report_of("node1")), "");
  EXPECT_TRUE(refresh(later + 600).empty());
  EXPECT_EQ(refresh(later + 620).size(), 1099U);
  EXPECT_EQ(door_->why_refused(keys[7], report_of("node1")), "");
  EXPECT_NE(door_->why_refused(keys[8], report_of("node1")), "");
}

TEST_F(DoorTest, OnlyAGoodTicketAdmitsAWorker) {
  const std::string join = allow("join", "batch", "node*");
  const std::string worker = allow("worker", "a");
  open(static_cast<double>(time(nullptr)));
  const wire::Ticket good = ticket("node1");
  EXPECT_OK(enrol(join, good));
  EXPECT_OK(enrol(join, good));  // it was not heard that it was
  EXPECT_EQ(door_->why_refused(good.public_key, report_of("node1")), "");
  EXPECT_NE(door_->why_refused(good.public_key, report_of("node2")), "");
  EXPECT_NE(door_->why_refused(good.public_key, command(pb::Command::STOP)),
            "");
  // Presented by somebody else, or by whom it admitted.
  EXPECT_FALSE(enrol(worker, ticket("node1")).ok());
  EXPECT_FALSE(enrol(good.public_key, ticket("node1")).ok());
  EXPECT_FALSE(enrol(wire::new_key_pair().public_key, ticket("node1")).ok());
  // For another job, another name, another member's key.
  EXPECT_FALSE(enrol(join, ticket("node1", "other")).ok());
  EXPECT_FALSE(enrol(join, ticket("mine")).ok());
  EXPECT_FALSE(enrol(join, ticket("node*")).ok());  // no name
  EXPECT_FALSE(enrol(join, ticket("node" + std::string(4000, '1'))).ok());
  wire::Ticket taken = ticket("node9");
  taken.public_key = worker;
  EXPECT_FALSE(enrol(join, taken).ok());
  taken.public_key = good.public_key;
  EXPECT_FALSE(enrol(join, taken).ok());
  // Expired, or good for ever. The clock may be set right soon.
  wire::Ticket old = ticket("node1");
  old.expires -= wire::kTicketGoodForS + 700;
  Status wrong = enrol(join, old);
  EXPECT_EQ(wrong.code(), Code::kUnavailable);
  EXPECT_SAYS(wrong, "is 21m");
  EXPECT_SAYS(wrong, "behind");
  old.expires += 1'000'000;
  wrong = enrol(join, old);
  EXPECT_EQ(wrong.code(), Code::kUnavailable);
  EXPECT_SAYS(wrong, "ahead of");
  // From a host whose clock is minutes behind or ahead.
  for (const int64_t minutes : {-9, 9}) {
    wire::Ticket skewed = ticket("node1");
    skewed.expires += 60 * minutes;
    EXPECT_OK(enrol(join, skewed)) << minutes;
  }
  for (const auto& t : {old, taken})
    if (t.public_key != good.public_key) {
      EXPECT_NE(door_->why_refused(t.public_key, report_of("node1")), "");
    }
}

TEST_F(DoorTest, RevokingAJoinKeyRevokesThoseItAdmitted) {
  const std::string join = allow("join", "batch");
  const double now = static_cast<double>(time(nullptr));
  open(now);
  const wire::Ticket t = ticket("node1");
  ASSERT_OK(enrol(join, t));
  allow("worker", "other");  // another change of the list keeps it
  EXPECT_TRUE(refresh(now + 1).empty());
  EXPECT_EQ(door_->why_refused(t.public_key, report_of("node1")), "");
  disallow(join);
  const auto gone = refresh(now + 2);
  EXPECT_EQ(std::set<std::string>(gone.begin(), gone.end()),
            (std::set<std::string>{join, t.public_key}));
  EXPECT_NE(door_->why_refused(t.public_key, report_of("node1")), "");
  EXPECT_FALSE(enrol(join, ticket("node2")).ok());
}

TEST_F(DoorTest, ANameIsClaimedOnlyWithTheRight) {
  using core::Claim;
  const std::string first = allow("worker", "a");
  const std::string other = allow("worker", "b");
  const std::string next = allow("worker", "a2", "*", 0, first);
  const std::string join = allow("join", "batch");
  open(static_cast<double>(time(nullptr)));
  EXPECT_EQ(door_->claim(other, first), Claim::kNone);
  EXPECT_EQ(door_->claim(next, first), Claim::kNow);
  EXPECT_EQ(door_->claim(next, other), Claim::kNone);
  const std::string unknown = wire::new_key_pair().public_key;
  EXPECT_EQ(door_->claim(other, unknown), Claim::kWhenDead);
  EXPECT_EQ(door_->claim(unknown, first), Claim::kNone);
  // A worker that is started again with the same job secret has a new key.
  const wire::Ticket t1 = ticket("node1");
  const wire::Ticket t2 = ticket("node1");
  ASSERT_OK(enrol(join, t1));
  ASSERT_OK(enrol(join, t2));
  EXPECT_EQ(door_->claim(t2.public_key, t1.public_key), Claim::kWhenDead);
  EXPECT_EQ(door_->claim(t2.public_key, first), Claim::kNone);
}

TEST_F(DoorTest, ARefusalSaysWhetherTheWorkerMayBeTakenLater) {
  const std::string own = allow("worker", "a", "rack1-*");
  const std::string join = allow("join", "batch");
  open(static_cast<double>(time(nullptr)));
  const wire::Ticket first = ticket("node1");
  const wire::Ticket again = ticket("node1");
  ASSERT_OK(enrol(join, first));
  ASSERT_OK(enrol(join, again));
  core::Options options;
  options.job.mutable_train()->set_steps(10);
  core::Coordinator core(options);
  (void)core.start(0);
  pb::Envelope report = report_of("node1");
  report.mutable_report()->set_incarnation(1);
  report.mutable_report()->set_slots(1);
  wire::set_protocol({}, report.mutable_report());
  (void)core.on(core::MessageReceived{report, first.public_key}, 0);
  ASSERT_NE(core.roster().find("node1"), nullptr);
  const auto kind = [&](const std::string& key, const pb::Envelope& said) {
    const auto refusal = door_->judge(key, said, core);
    return refusal ? pb::Refusal::Kind_Name(refusal->kind()) : "taken";
  };
  EXPECT_EQ(kind(first.public_key, report), "taken");
  EXPECT_EQ(kind(again.public_key, report), "RETRY") << "the first one lives";
  EXPECT_EQ(kind(own, report), "PERMANENT");
  const std::string any = allow("worker", "b");
  (void)refresh(static_cast<double>(time(nullptr)));
  EXPECT_EQ(kind(any, report), "PERMANENT") << "the name of another key";
  report.set_job("another");
  EXPECT_EQ(kind(first.public_key, report), "OTHER_JOB");
}

TEST_F(DoorTest, TheNextKeyIsUsedByTheNextCoordinator) {
  open();
  const std::string before = door_->server_keys()->own.public_key;
  ASSERT_OK(rundir::make_next_key(run_));
  EXPECT_FALSE(rundir::make_next_key(run_).ok());
  (void)refresh(kNow + 1);
  EXPECT_EQ(door_->server_keys()->own.public_key, before);
  server_.reset();
  open();
  const std::string after = door_->server_keys()->own.public_key;
  EXPECT_NE(after, before);
  EXPECT_EQ(*wire::read_public_key(rundir::server_key_path(run_)), after);
}

TEST_F(DoorTest, ListsAreReadStrictly) {
  const std::string key = wire::new_key_pair().public_key;
  const AllowedKey full{key, "worker", "a", "n*", 1'900'000'000, "x"};
  ASSERT_OK_AND(const auto back,
                rundir::parse_allowed(rundir::allowed_text({full})));
  ASSERT_EQ(back.size(), 1u);
  EXPECT_EQ(back.front().workers, "n*");
  EXPECT_EQ(back.front().expires, full.expires);
  EXPECT_EQ(back.front().replaces, "x");
  const std::string head = "[[key]]\npublic = \"" + key + "\"\n";
  for (const std::string& bad :
       {std::string("[[key]]\n"), head, head + "role = \"root\"\n",
        head + "role = \"coordinator\"\n",
        head + "role = \"viewer\"\nexpires = \"tomorrow\"\n",
        rundir::allowed_text({full, full})})
    EXPECT_FALSE(rundir::parse_allowed(bad).ok()) << bad;
}

}  // namespace
}  // namespace remesh::server
