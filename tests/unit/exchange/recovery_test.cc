// End-to-end test of state in memory: generations of random meshes update,
// replicate and are killed at random instants; now and then a host is lost.
// What is found afterwards is always a complete state, and never older than the
// newest finished step.
//
// A generation is a process, its ranks are threads; each host has one worker,
// whose segments are files in its own folder. The update is a function of step,
// parameter and element, so that every bit can be checked on any mesh.
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <random>
#include <set>
#include <thread>

#include "checkpoint/exchange/exchange.h"
#include "checkpoint/exchange/replica.h"
#include "checkpoint/manifest/conversions.h"
#include "checkpoint/memory/replica_placement.h"
#include "checkpoint/memory/segment_directory.h"
#include "coordinator/core/state_choice.h"
#include "tests/testing/expect.h"
#include "tests/testing/local_comm.h"
#include "tests/testing/seed.h"
#include "tests/testing/temp_dir.h"
#include "tests/unit/exchange/states.h"

namespace remesh::exchange {
namespace {

namespace fs = std::filesystem;
using core::Holding;
using core::StateChoice;
using geometry::ParamTable;
using geometry::Sharding;
using memory::StateInfo;
using memory::StateSegment;
using Mode = memory::StateSegment::Mode;

constexpr uint64_t kJob = 77;
constexpr int kHosts = 4;

uint64_t salt_of(int64_t step) { return static_cast<uint64_t>(step) * 7919; }

// Written by the generation, read by the test after its death.
struct Told {
  std::atomic<int64_t> finished{-1};  // newest step that all ranks secured
  std::atomic<int64_t> first{-1};     // of this generation
};

// The assignment of a generation.
struct Orders {
  int64_t generation = 0;
  Sharding to;
  std::vector<Process> processes;  // ranks, then hosts without one
  bool fresh = false;
  int64_t step = 0;
  int64_t from_generation = 0;
  Sharding from;
  std::vector<OldState> sources;
  std::vector<std::string> segments;  // of the sources
  std::vector<std::string> before;    // all files before it
};

class Rank {
 public:
  Rank(const std::string& root, const ParamTable& table, const Orders& orders,
       comm::Comm& comm, Told& told)
      : root_(root),
        table_(table),
        o_(orders),
        comm_(comm),
        told_(told),
        me_(comm.rank()),
        has_rank_(me_ < orders.to.layout.world()) {}

  void run() {
    if (has_rank_) {
      const auto shard = make_rank_shard(table_, o_.to, me_);
      CHECK(shard.ok());
      pieces_ = held_pieces(*shard);
      info_ = {.step = o_.step,
               .generation = o_.generation,
               .rank = me_,
               .sharding = o_.to,
               .model = model_id(table_),
               .elements = shard->zero.state_elements()};
    }
    if (!o_.fresh)
      restore();
    else if (has_rank_)
      update(o_.step);
    // Processes that only send leave the group of the mesh.
    const auto mesh = comm_.split(has_rank_ ? 0 : -1, me_);
    if (!has_rank_) return;
    replicate(*mesh);
    secure(*mesh);
    remove_old();
    for (int64_t step = o_.step + 1;; ++step) {
      update(step);
      replicator_->start(current_);
      for (int i = 0; i < 5; ++i) (void)replicator_->poll();
      secure(*mesh);
    }
  }

 private:
  std::string folder(int process) const {
    return root_ + "/" +
           std::to_string(o_.processes[static_cast<size_t>(process)].host);
  }
  // Ranks of one worker use distant numbers.
  std::unique_ptr<StateSegment> make(int64_t elements) {
    const int number =
        static_cast<int>(o_.generation * 1000 + me_ * 20 + made_++);
    auto s = StateSegment::create(
        memory::segment_path(folder(me_), kJob, number), kJob, elements);
    CHECK_MSG(s.ok(), s.status().to_string().c_str());
    return std::move(*s);
  }

  void update(int64_t step) {
    if (!own_) own_ = make(info_.elements);
    const int to = current_.sequence == 0 ? 0 : 1 - current_.buffer;
    own_->begin(to);
    const auto out = own_->write(to, info_.elements);
    for_each_element(table_, pieces_, [&](int64_t at, size_t param, int64_t e) {
      for (size_t v = 0; v < geometry::kNumStateVectors; ++v) {
        const uint32_t bits = bits_at(salt_of(step), param, e, v);
        std::memcpy(&out[v][static_cast<size_t>(at)], &bits, sizeof(bits));
      }
    });
    info_.step = step;
    current_ = own_->commit(info_);
  }

  StateSegment::Committed find(const StateSegment& s, size_t source) const {
    for (const auto& c : s.contents().states)
      if (c.info.step == o_.step && c.info.generation == o_.from_generation &&
          c.info.rank == o_.sources[source].rank)
        return c;
    CHECK_MSG(false, "a source is not what it was");
    return {};
  }

  void restore() {
    auto plan =
        plan_exchange(table_, o_.from, o_.sources, o_.to, o_.processes, me_);
    CHECK_MSG(plan.ok(), plan.status().to_string().c_str());
    std::vector<std::unique_ptr<StateSegment>> open(o_.sources.size());
    std::vector<geometry::ConstStateView> views(o_.sources.size());
    for (size_t i = 0; i < open.size(); ++i) {
      if (o_.sources[i].host != o_.processes[static_cast<size_t>(me_)].host)
        continue;
      const bool mine = plan->reuse == static_cast<int>(i);
      auto s = StateSegment::open(o_.segments[i], kJob,
                                  mine ? Mode::kWrite : Mode::kRead);
      CHECK_MSG(s.ok(), s.status().to_string().c_str());
      open[i] = std::move(*s);
      const auto c = find(*open[i], i);
      views[i] = open[i]->read(c.buffer, c.info.elements);
    }
    geometry::StateView target;
    if (has_rank_ && plan->reuse < 0) {
      own_ = make(plan->elements);
      own_->begin(0);
      target = own_->write(0, plan->elements);
    }
    const Status done =
        run_exchange(comm_, *plan, views, target, ok_status(), {});
    CHECK_MSG(done.ok(), done.to_string().c_str());
    if (!has_rank_) return;
    if (plan->reuse < 0) {
      current_ = own_->commit(info_);
      return;
    }
    const auto i = static_cast<size_t>(plan->reuse);
    own_ = std::move(open[i]);
    current_ = own_->redescribe(find(*own_, i), info_);
  }

  void replicate(comm::Comm& mesh) {
    std::vector<memory::RankHost> places;
    std::vector<int> groups;
    for (int r = 0; r < o_.to.layout.world(); ++r) {
      const std::string host =
          std::to_string(o_.processes[static_cast<size_t>(r)].host);
      places.push_back({host, host});
      groups.push_back(replica_group(o_.to, r));
    }
    const auto p = memory::place_replicas(places, groups, 1);
    std::vector<KeptReplica> kept;
    for (const int r : p.kept[static_cast<size_t>(me_)]) {
      const auto shard = make_rank_shard(table_, o_.to, r);
      kept_.push_back(make(shard->zero.state_elements()));
      kept.push_back({r, shard->zero.state_elements(), kept_.back().get()});
    }
    replicator_ = std::make_unique<Replicator>(
        mesh, *own_, p.holders[static_cast<size_t>(me_)], kept,
        ReplicaOptions{.piece_bytes = 4096});
    replicator_->start(current_);
  }

  // The agreement of the next step: after it, this one is finished.
  void secure(comm::Comm& mesh) {
    const Status done = replicator_->finish();
    CHECK_MSG(done.ok(), done.to_string().c_str());
    mesh.barrier();
    if (me_ != 0) return;
    told_.finished.store(info_.step);
    if (told_.first.load() < 0 && info_.step > o_.step)
      told_.first.store(info_.step);
  }

  void remove_old() {
    const std::string mine = folder(me_);
    for (const std::string& path : o_.before)
      if (path.starts_with(mine + "/") && first_of_host() &&
          !reused_.contains(path))
        fs::remove(path);
  }
  // One rank per host cleans up, except what a rank there reused.
  bool first_of_host() {
    const int host = o_.processes[static_cast<size_t>(me_)].host;
    for (int r = 0; r < o_.to.layout.world(); ++r) {
      if (o_.processes[static_cast<size_t>(r)].host != host) continue;
      if (r < me_) return false;
      if (o_.fresh) continue;
      const auto plan =
          plan_exchange(table_, o_.from, o_.sources, o_.to, o_.processes, r);
      if (plan->reuse >= 0)
        reused_.insert(o_.segments[static_cast<size_t>(plan->reuse)]);
    }
    return true;
  }

  const std::string root_;
  const ParamTable& table_;
  const Orders& o_;
  comm::Comm& comm_;
  Told& told_;
  const int me_;
  const bool has_rank_;
  int made_ = 0;
  std::vector<geometry::Piece> pieces_;
  StateInfo info_;
  std::unique_ptr<StateSegment> own_;
  std::vector<std::unique_ptr<StateSegment>> kept_;
  StateSegment::Committed current_;
  std::unique_ptr<Replicator> replicator_;
  std::set<std::string> reused_;
};

[[noreturn]] void run_generation(const std::string& root,
                                 const ParamTable& table, const Orders& orders,
                                 Told& told) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  auto comms =
      comm::make_local_comms(static_cast<int>(orders.processes.size()));
  std::vector<std::thread> threads;
  for (auto& comm : comms)
    threads.emplace_back([&] {
      // Never destroyed: its process is killed.
      (new Rank(root, table, orders, *comm, told))->run();
    });
  for (std::thread& t : threads) t.join();
  _exit(0);
}

// What all workers hold; every bit of each state is checked.
std::vector<Holding> inventory_of(const std::string& root,
                                  const ParamTable& table,
                                  std::vector<std::string>* files) {
  std::vector<Holding> out;
  for (int h = 0; h < kHosts; ++h) {
    const std::string folder = root + "/" + std::to_string(h);
    memory::remove_unfinished(folder, kJob);
    for (const auto& file : memory::list_segments(folder, kJob)) {
      files->push_back(file.path);
      const auto s = StateSegment::open(file.path, kJob, Mode::kRead);
      EXPECT_OK(s);
      for (const auto& c : (*s)->contents().states) {
        State state(c.info.elements);
        const auto v = (*s)->read(c.buffer, c.info.elements);
        for (size_t k = 0; k < geometry::kNumStateVectors; ++k)
          state.v[k].assign(v[k].begin(), v[k].end());
        EXPECT_TRUE(
            same_bits(state, state_of(table, c.info.sharding, c.info.rank,
                                      salt_of(c.info.step))))
            << to_string(c.info);
        const std::string name = std::to_string(h);
        out.push_back(
            {manifest::holding_of(c.info, file.path), c.info.sharding});
        out.back().info.set_worker(name);
        out.back().info.set_host(name);
      }
    }
  }
  return out;
}

Orders plan_generation(std::mt19937& random, const ParamTable& table,
                       int64_t generation, const StateChoice& choice,
                       const std::vector<Holding>& holdings) {
  Orders o;
  o.generation = generation;
  o.to = geometry::random_sharding(random, table.config(), 5);
  std::set<int> used;
  // At least two hosts, so that the loss of one can be survived.
  for (int r = 0; r < o.to.layout.world(); ++r) {
    const int host = static_cast<int>(random() % kHosts);
    o.processes.push_back({host, host});
    used.insert(host);
  }
  for (int h = 0; h < kHosts; ++h)
    if (!used.contains(h)) o.processes.push_back({h, h});
  o.fresh = choice.kind == pb::Source::INIT;
  o.step = choice.step;
  o.from_generation = choice.generation;
  for (const size_t i : choice.sources) {
    o.from = holdings[i].sharding;
    const pb::StateHolding& info = holdings[i].info;
    const int host = std::stoi(info.host());
    o.sources.push_back({info.rank(), host, host});
    o.segments.push_back(info.segment());
  }
  return o;
}

// Half of the generations start training, however slow the machine; the others
// are killed before.
void wait_for_some_steps(std::mt19937& random, const Told& told, int64_t from) {
  const int64_t steps = static_cast<int64_t>(random() % 5);
  const bool trains = random() % 2 == 0;
  const auto begin = std::chrono::steady_clock::now();
  while (trains && told.finished.load() < from + steps &&
         std::chrono::steady_clock::now() < begin + std::chrono::seconds(20))
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  std::this_thread::sleep_for(
      std::chrono::microseconds(random() % (trains ? 2000 : 15000)));
}

TEST(Recovery, NoFinishedStepIsLostWhateverIsKilled) {
  const uint32_t seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const ShmDir dir;
  const ParamTable table = ParamTable::make(geometry::random_config(random));
  void* page = mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  for (int h = 0; h < kHosts; ++h)
    fs::create_directory(dir / std::to_string(h));
  int64_t finished = 0;
  std::vector<core::FirstStep> first_steps;
  bool safe = false;
  int lost_hosts = 0, lost_in_change = 0;
  for (int64_t g = 1; g <= 60 && !HasFailure(); ++g) {
    std::vector<std::string> files;
    core::Inventory in;
    in.holdings = inventory_of(dir.path(), table, &files);
    in.first_steps = first_steps;
    const StateChoice choice = core::choose_state(&table, in);
    ASSERT_GE(choice.step, finished) << choice.why;
    // Nothing was finished yet: start again.
    ASSERT_TRUE(choice.kind == pb::Source::MEMORY || finished == 0);
    Orders orders = plan_generation(random, table, g, choice, in.holdings);
    orders.before = files;
    Told& told = *new (page) Told;
    const pid_t child = fork();
    if (child == 0) run_generation(dir.path(), table, orders, told);
    wait_for_some_steps(random, told, choice.step);
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        << "generation " << g << " ended by itself";
    finished = std::max(finished, told.finished.load());
    if (told.first.load() >= 0) first_steps.push_back({g, told.first.load()});
    std::set<int> hosts;
    for (int r = 0; r < orders.to.layout.world(); ++r)
      hosts.insert(orders.processes[static_cast<size_t>(r)].host);
    const bool secured = told.finished.load() >= 0;
    // A host is lost with its states, possibly during a change of mesh, if the
    // state has been secured on two hosts since the last loss.
    safe = (safe || secured) && hosts.size() > 1;
    if (safe && random() % 2 == 0) {
      const std::string host = dir / std::to_string(random() % kHosts);
      fs::remove_all(host);
      fs::create_directory(host);
      ++lost_hosts;
      lost_in_change += secured ? 0 : 1;
      safe = false;
    }
  }
  munmap(page, sizeof(Told));
  EXPECT_GT(finished, 10);
  EXPECT_GT(lost_hosts, 3);
  RecordProperty("lost_in_change", lost_in_change);
}

}  // namespace
}  // namespace remesh::exchange
