// Messages between pipeline stages alone, with passes simulated by the test.
#include "worker/engine/pipe_links.h"

#include <chrono>
#include <thread>

#include "parallel/geometry/schedule.h"
#include "tests/testing/expect.h"
#include "tests/testing/local_comm.h"

namespace remesh::engine {
namespace {

using geometry::Pass;
using geometry::PipeOp;
using geometry::Schedule;
using geometry::ScheduleKind;

constexpr int64_t kElements = 4;
constexpr uint64_t kBytes = 4 * kElements;

float value(int stage, int microbatch) {
  return static_cast<float>(100 * stage + microbatch);
}

// One rank's messages of a step or an evaluation, as an engine exchanges them.
// Of the schedule's microbatches it has the first `present`.
class Rank {
 public:
  Rank(const Schedule& schedule, int present, comm::Comm& comm)
      : schedule_(schedule),
        present_(present),
        me_(comm.rank()),
        links_(*backend_, kElements, waited_s_) {
    links_.connect(comm);
    for (const int n : geometry::slots_needed(schedule, me_)) {
      outputs_.emplace_back(static_cast<size_t>(n),
                            std::vector<float>(kElements));
      free_.emplace_back();
      for (int s = 0; s < n; ++s) free_.back().push_back(s);
      slot_of_.emplace_back(static_cast<size_t>(schedule.num_microbatches));
    }
  }

  void run(bool evaluate) {
    std::vector<PipeOp> ops = schedule_.ranks[static_cast<size_t>(me_)];
    std::erase_if(ops,
                  [&](const PipeOp& op) { return op.microbatch >= present_; });
    std::vector<PipeLinks::Message> messages;
    for (const PipeOp& op : ops)
      if (const int from = source(op); from >= 0)
        messages.push_back({.from = from % schedule_.pp,
                            .tag = tag(op, from),
                            .elements = kElements});
    ASSERT_OK(links_.expect(std::move(messages)));
    for (const PipeOp& op : ops) evaluate ? forward(op) : run(op);
    links_.finish();
  }
  const PipeLinks& links() const { return links_; }

 private:
  int stage(const PipeOp& op) const { return schedule_.stage(me_, op.chunk); }
  // The stage that a pass has its input from; -1: none.
  int source(const PipeOp& op) const {
    if (op.pass == Pass::kForward) return stage(op) - 1;
    const bool has =
        op.pass == Pass::kBackward && stage(op) + 1 < schedule_.num_stages();
    return has ? stage(op) + 1 : -1;
  }
  int tag(const PipeOp& op, int from) const {
    return 2 * (op.microbatch * schedule_.num_stages() + from) +
           (op.pass == Pass::kForward ? 0 : 1);
  }

  void receive(const PipeOp& op) {
    const int from = source(op);
    if (from < 0) return;
    ASSERT_OK_AND(const auto in, links_.receive());
    EXPECT_EQ(in[kElements - 1], value(from, op.microbatch));
  }
  void send_copy(const PipeOp& op, int to) {
    const std::vector<float> out(kElements, value(stage(op), op.microbatch));
    ASSERT_OK(links_.send_copy(out, to % schedule_.pp, tag(op, stage(op))));
  }

  void forward(const PipeOp& op) {
    receive(op);
    if (stage(op) + 1 < schedule_.num_stages()) send_copy(op, stage(op) + 1);
  }

  void run(const PipeOp& op) {
    const auto c = static_cast<size_t>(op.chunk);
    int& slot = slot_of_[c][static_cast<size_t>(op.microbatch)];
    const auto key = [&] { return slot * schedule_.chunks + op.chunk; };
    if (op.pass == Pass::kForward) {
      ASSERT_FALSE(free_[c].empty());
      slot = free_[c].back();
      free_[c].pop_back();
      links_.sent(key());
    }
    receive(op);
    const int at = stage(op);
    if (op.pass == Pass::kForward && at + 1 < schedule_.num_stages()) {
      std::vector<float>& out = outputs_[c][static_cast<size_t>(slot)];
      out.assign(kElements, value(at, op.microbatch));
      links_.send(key(), out, (at + 1) % schedule_.pp, tag(op, at));
    } else if (op.pass == Pass::kBackward && at > 0) {
      send_copy(op, at - 1);
    }
    if (op.pass == schedule_.last_pass()) free_[c].push_back(slot);
  }

  const Schedule& schedule_;
  const int present_, me_;
  std::unique_ptr<kernels::Backend> backend_ = kernels::make_cpu_backend(1);
  double waited_s_ = 0;
  PipeLinks links_;
  std::vector<std::vector<std::vector<float>>> outputs_;  // by chunk and slot
  std::vector<std::vector<int>> free_, slot_of_;          // by chunk
};

void run_all(const Schedule& schedule, int present, bool evaluate) {
  SCOPED_TRACE(testing::Message()
               << geometry::schedule_name(schedule.kind) << " pp "
               << schedule.pp << " chunks " << schedule.chunks
               << " microbatches " << present << " of "
               << schedule.num_microbatches << " evaluate " << evaluate);
  comm::on_ranks(schedule.pp, [&](comm::Comm& comm) {
    Rank rank(schedule, present, comm);
    rank.run(evaluate);
    EXPECT_LE(rank.links().bytes(), (3 + 1) * kBytes);
  });
}

// Ranks wait for each other in the same places whatever their speed, so that
// one run of a schedule shows whether it can finish.
TEST(PipeLinks, EveryScheduleFinishesWithOneCopy) {
  for (const int pp : {2, 3, 4, 6})
    for (const int chunks : {1, 2, 3})
      for (const int m : {1, 2, 3, 4, 6, 12}) {
        for (const ScheduleKind kind :
             {ScheduleKind::kGpipe, ScheduleKind::k1F1B, ScheduleKind::kZbH1,
              ScheduleKind::kInterleaved1F1B}) {
          const auto schedule = geometry::make_schedule(kind, pp, m, chunks);
          if (!schedule.ok()) continue;
          for (const int present : {m, m - 1})
            run_all(*schedule, present, /*evaluate=*/false);
        }
        run_all(geometry::forward_schedule(pp, chunks, m), m,
                /*evaluate=*/true);
      }
}

TEST(PipeLinks, ARankHoldsOneCopyHoweverSlowItsNeighbour) {
  constexpr int kMessages = 8;
  auto comms = comm::make_local_comms(2);
  const auto backend = kernels::make_cpu_backend(1);
  std::jthread sender([&] {
    double waited_s = 0;
    PipeLinks links(*backend, kElements, waited_s);
    links.connect(*comms[0]);
    for (int i = 0; i < kMessages; ++i)
      ASSERT_OK(
          links.send_copy(std::vector<float>(kElements, value(0, i)), 1, i));
    links.finish();
    EXPECT_EQ(links.bytes(), kBytes);
  });
  // Time for the sender to send all, if it does not wait.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  double waited_s = 0;
  PipeLinks links(*backend, kElements, waited_s);
  links.connect(*comms[1]);
  std::vector<PipeLinks::Message> messages;
  for (int i = 0; i < kMessages; ++i)
    messages.push_back({.from = 0, .tag = i, .elements = kElements});
  ASSERT_OK(links.expect(std::move(messages)));
  for (int i = 0; i < kMessages; ++i) {
    ASSERT_OK_AND(const auto in, links.receive());
    EXPECT_EQ(in[0], value(0, i));
  }
  EXPECT_EQ(links.bytes(), 3 * kBytes);
}

}  // namespace
}  // namespace remesh::engine
