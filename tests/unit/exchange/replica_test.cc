// Replicas are complete or absent.
#include "checkpoint/exchange/replica.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "checkpoint/memory/replica_placement.h"
#include "proto/base/check.h"
#include "tests/testing/local_comm.h"
#include "tests/testing/seed.h"
#include "tests/testing/segment_states.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/exchange/wrapped_comm.h"

namespace remesh::exchange {
namespace {

using memory::StateSegment;

constexpr uint64_t kJob = 4;

int64_t elements_of(int rank) { return 1000 + 333 * rank; }

StateSegment::Committed update(StateSegment& s, int rank, int64_t step) {
  return memory::update(s, memory::info_of(step, elements_of(rank), rank));
}

std::unique_ptr<StateSegment> make(const std::string& path, int rank) {
  auto s = StateSegment::create(path, kJob, elements_of(rank));
  CHECK_MSG(s.ok(), s.status().to_string().c_str());
  return std::move(*s);
}

// One rank's segments and Replicator, by a placement.
struct Rank {
  Rank(const ShmDir& dir, comm::Comm& comm, const memory::ReplicaPlacement& p,
       const ReplicaOptions& options)
      : me(comm.rank()), own(make(dir / ("own" + std::to_string(me)), me)) {
    const auto at = static_cast<size_t>(me);
    std::vector<KeptReplica> mine;
    for (const int r : p.kept[at]) {
      kept.push_back(make(
          dir / ("replica" + std::to_string(r) + "-" + std::to_string(me)), r));
      mine.push_back({r, elements_of(r), kept.back().get()});
    }
    replicator =
        std::make_unique<Replicator>(comm, *own, p.holders[at], mine, options);
  }
  int me;
  std::unique_ptr<StateSegment> own;
  std::vector<std::unique_ptr<StateSegment>> kept;
  std::unique_ptr<Replicator> replicator;
};

memory::ReplicaPlacement ring(int n, int copies) {
  std::vector<memory::RankHost> places;
  for (int r = 0; r < n; ++r)
    places.push_back({std::to_string(r), std::to_string(r)});
  return memory::place_replicas(places, {}, copies);
}

TEST(Replica, EveryStepIsReplicatedDuringTheUpdates) {
  constexpr int kRanks = 4;
  const ShmDir dir;
  const memory::ReplicaPlacement p = ring(kRanks, 2);
  for (const int64_t piece : {int64_t{1}, int64_t{400}, int64_t{1} << 20}) {
    const ShmDir folder;
    comm::on_ranks(kRanks, [&](comm::Comm& comm) {
      const int r = comm.rank();
      Rank rank(folder, comm, p,
                {.piece_bytes = piece == 1 ? 64 : piece, .window = 2});
      std::mt19937 random(static_cast<unsigned>(r));
      auto c = update(*rank.own, r, 1);
      for (int64_t step = 2; step < 8; ++step) {
        rank.replicator->start(c);
        for (unsigned i = random() % 20; i > 0; --i)
          (void)rank.replicator->poll();
        // The update of the next step writes the other buffer concurrently.
        c = update(*rank.own, r, step);
        EXPECT_OK(rank.replicator->finish());
        EXPECT_TRUE(rank.replicator->done());
        for (size_t k = 0; k < rank.kept.size(); ++k) {
          const int of = p.kept[static_cast<size_t>(r)][k];
          EXPECT_EQ(newest_step(*rank.kept[k], of), step - 1);
          const auto found = rank.kept[k]->contents();
          EXPECT_TRUE(found.states[0].info.replica);
          EXPECT_TRUE(found.states[0].info.content.has_value());
        }
      }
    });
  }
}

void poll_both(Replicator& a, Replicator& b) {
  for (bool done = false; !done;) {
    done = a.poll();
    done = b.poll() && done;
  }
}

// The sender dies during a replica: the receiver's segment, as a restarted
// daemon reads it, has the previous step.
TEST(Replica, APartialReplicaReplacesNothing) {
  const ShmDir dir;
  auto comms = comm::make_local_comms(2);
  const ReplicaOptions options{.piece_bytes = 512, .window = 2};
  auto own = make(dir / "own", 0);
  auto copy = make(dir / "copy", 0);
  const int holder = 1;
  Replicator from(*comms[0], *own, std::span(&holder, 1), {}, options);
  Replicator to(*comms[1], *own, {}, {{0, elements_of(0), copy.get()}},
                options);
  const auto both = [&](int times) {
    for (int i = 0; i < times; ++i) {
      (void)from.poll();
      (void)to.poll();
    }
  };
  ASSERT_OK_AND(const auto seen, StateSegment::open(dir / "copy", kJob,
                                                    StateSegment::Mode::kRead));
  int64_t whole = -1;
  for (int64_t step = 1; step < 6; ++step) {
    const auto c = update(*own, 0, step);
    from.start(c);
    to.start(c);
    int polls = 0;
    while (!to.done()) {
      both(1);
      ++polls;
      const int64_t now = newest_step(*seen, 0);
      EXPECT_EQ(now, to.done() ? step : whole);
    }
    EXPECT_GT(polls, 10);
    while (!from.done()) both(1);
    whole = step;
  }
}

TEST(Replica, ADamagedReplicaReplacesNothing) {
  const int64_t messages = 2 + 3 * 2;  // record, two pieces per vector, hash
  for (int flipped = 0; flipped < messages; ++flipped) {
    const ShmDir dir;
    auto comms = comm::make_local_comms(2);
    FlippingComm flipping(*comms[0], static_cast<int>(messages) + flipped);
    const ReplicaOptions options{.piece_bytes = 2048, .window = 2};
    auto own = make(dir / "own", 0);
    auto copy = make(dir / "copy", 0);
    const int holder = 1;
    Replicator from(flipping, *own, std::span(&holder, 1), {}, options);
    Replicator to(*comms[1], *own, {}, {{0, elements_of(0), copy.get()}},
                  options);
    Status last;
    for (int64_t step = 1; step < 4; ++step) {
      const auto c = update(*own, 0, step);
      from.start(c);
      to.start(c);
      poll_both(from, to);
      last = to.finish();
      if (step == 2) {
        EXPECT_EQ(last.code(), Code::kCorrupt) << "message " << flipped;
        EXPECT_EQ(newest_step(*copy, 0), 1);
      } else {
        EXPECT_OK(last);
        EXPECT_EQ(newest_step(*copy, 0), step);
      }
    }
  }
}

TEST(Replica, AnEmptyStateIsComplete) {
  const ShmDir dir;
  auto own = StateSegment::create(dir / "own", kJob, 0);
  auto copy = StateSegment::create(dir / "copy", kJob, 0);
  ASSERT_TRUE(own.ok() && copy.ok());
  const auto c = memory::update(**own, memory::info_of(3, 0, 0));
  auto comms = comm::make_local_comms(2);
  const int holder = 1;
  Replicator from(*comms[0], **own, std::span(&holder, 1), {}, {});
  Replicator to(*comms[1], **own, {}, {{0, 0, copy->get()}}, {});
  from.start(c);
  to.start(c);
  poll_both(from, to);
  EXPECT_OK(to.finish());
  EXPECT_EQ((*copy)->contents().states.size(), 1U);
}

// Steps that the ranks of a child process have finished, replicas included.
struct Finished {
  Finished()
      : page(mmap(nullptr, 4096, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    CHECK(page != MAP_FAILED);
  }
  ~Finished() { munmap(page, 4096); }
  Finished(const Finished&) = delete;
  Finished& operator=(const Finished&) = delete;
  std::atomic<int64_t>& of(int rank) {
    return static_cast<std::atomic<int64_t>*>(page)[rank];
  }
  void* page;
};

// All ranks are killed at once while they update and send. What every rank has
// finished is in each replica.
TEST(Replica, AKillAtAnyInstantLeavesACompleteReplica) {
  const uint32_t seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  constexpr int kRanks = 2;
  const memory::ReplicaPlacement p = ring(kRanks, 1);
  int64_t most = 0;
  // Longer where the machine is slow.
  for (unsigned i = 0; i < 25 || (most <= 2 && i < 100); ++i) {
    const ShmDir dir;
    Finished finished;
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      comm::on_ranks(kRanks, [&](comm::Comm& comm) {
        const int r = comm.rank();
        Rank rank(dir, comm, p, {.piece_bytes = 1024, .window = 2});
        for (int64_t step = 1;; ++step) {
          rank.replicator->start(update(*rank.own, r, step));
          (void)rank.replicator->finish();
          finished.of(r) = step;
        }
      });
      _exit(0);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(
        3000 + random() % (i < 25 ? 15000 : i * 10000)));
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    const int64_t all = std::min(finished.of(0).load(), finished.of(1).load());
    for (int r = 0; r < kRanks; ++r) {
      const auto own = StateSegment::open(dir / ("own" + std::to_string(r)),
                                          kJob, StateSegment::Mode::kRead);
      const auto copy = StateSegment::open(
          dir / ("replica" + std::to_string(r) + "-" + std::to_string(1 - r)),
          kJob, StateSegment::Mode::kRead);
      if (!own.ok() || !copy.ok()) continue;  // killed before they were made
      const int64_t mine = newest_step(**own, r);
      const int64_t kept = newest_step(**copy, r);
      EXPECT_LE(kept, mine);
      if (all > 0) {
        EXPECT_GE(kept, all);
      }
      most = std::max(most, kept);
    }
  }
  EXPECT_GT(most, 2);
}

TEST(Replica, ALocalReplicaIsCopiedInPieces) {
  const ShmDir dir;
  auto own = make(dir / "own", 1);
  auto copy = make(dir / "copy", 1);
  LocalReplica local(*own, *copy, 256);
  int64_t whole = -1;
  for (int64_t step = 1; step < 5; ++step) {
    local.start(update(*own, 1, step));
    int polls = 0;
    while (!local.poll()) {
      ++polls;
      ASSERT_EQ(newest_step(*copy, 1), whole);
    }
    EXPECT_GT(polls, 10);
    EXPECT_EQ(newest_step(*copy, 1), step);
    whole = step;
  }
}

}  // namespace
}  // namespace remesh::exchange
