#include "parallel/comm/mpi_comm.h"

// The C interface only; Open MPI's C++ one needs another library.
#define OMPI_SKIP_MPICXX 1

#include <dlfcn.h>
#include <fmt/format.h>
#include <mpi.h>
#include <sched.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "parallel/comm/direct_reduce.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"

namespace remesh::comm {
namespace {

// MPI counts are ints; longer messages go in pieces of this size.
constexpr size_t kMaxMessage = size_t{1} << 30;
// Tags of the collectives: four per operation, reused after a million.
constexpr int kTagCycle = 1 << 20;

void check_mpi(int rc, const char* what) { CHECK_MSG(rc == MPI_SUCCESS, what); }

bool mpi_finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

// While one exists, MPI yields the core when it waits inside a call (to start,
// to split a communicator, to end), as ranks that outnumber the cores must.
// Other calls are polls of Progress, which waits in its own way. Open MPI reads
// the parameter mpi_yield_when_idle only at its start; without this function of
// its, it stays as it was set then.
class YieldInMpi {
 public:
  YieldInMpi() { set(true); }
  ~YieldInMpi() { set(false); }
  YieldInMpi(const YieldInMpi&) = delete;
  YieldInMpi& operator=(const YieldInMpi&) = delete;

 private:
  static void set(bool yield) {
    static const auto function = reinterpret_cast<bool (*)(bool)>(
        dlsym(RTLD_DEFAULT, "opal_progress_set_yield_when_idle"));
    if (function != nullptr) function(yield);
  }
};

class MpiBatch final : public Batch {
 public:
  explicit MpiBatch(MPI_Comm comm) : comm_(comm) {}

  void send(const void* data, size_t bytes, int to, int tag) override {
    for_pieces(bytes, [&](size_t at, int len) {
      check_mpi(MPI_Isend(static_cast<const std::byte*>(data) + at, len,
                          MPI_BYTE, to, tag, comm_, add(-1)),
                "MPI_Isend");
    });
  }
  void recv(void* data, size_t bytes, int from, int tag) override {
    for_pieces(bytes, [&](size_t at, int len) {
      check_mpi(MPI_Irecv(static_cast<std::byte*>(data) + at, len, MPI_BYTE,
                          from, tag, comm_, add(len)),
                "MPI_Irecv");
    });
  }
  void broadcast(std::byte* data, size_t bytes, int root) {
    for_pieces(bytes, [&](size_t at, int len) {
      check_mpi(MPI_Ibcast(data + at, len, MPI_BYTE, root, comm_, add(-1)),
                "MPI_Ibcast");
    });
  }
  void barrier() { check_mpi(MPI_Ibarrier(comm_, add(-1)), "MPI_Ibarrier"); }

  bool advance() override {
    if (requests_.empty()) return true;
    int done = 0;
    statuses_.resize(requests_.size());
    check_mpi(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(),
                          &done, statuses_.data()),
              "MPI_Testall");
    if (done == 0) return false;
    check_lengths();
    requests_.clear();
    lengths_.clear();
    return true;
  }

 private:
  // An empty message is still a message.
  template <typename F>
  static void for_pieces(size_t bytes, const F& f) {
    size_t at = 0;
    do {
      const size_t len = std::min(kMaxMessage, bytes - at);
      f(at, static_cast<int>(len));
      at += len;
    } while (at < bytes);
  }
  MPI_Request* add(int expected_bytes) {
    lengths_.push_back(expected_bytes);
    requests_.push_back(MPI_REQUEST_NULL);
    return &requests_.back();
  }
  void check_lengths() const {
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (lengths_[i] < 0) continue;
      int count = 0;
      check_mpi(MPI_Get_count(&statuses_[i], MPI_BYTE, &count),
                "MPI_Get_count");
      CHECK_MSG(count == lengths_[i], "a message of unexpected size");
    }
  }

  MPI_Comm comm_;
  std::vector<MPI_Request> requests_;
  std::vector<int> lengths_;  // expected bytes of a recv; -1: not a recv
  std::vector<MPI_Status> statuses_;
};

// All operations of this process that are in progress. Waiting for one advances
// all, so that ranks that wait for different operations cannot block each
// other.
class Progress {
 public:
  void add(StateMachine* m) { active_.push_back(m); }
  void remove(StateMachine* m) { std::erase(active_, m); }
  bool idle() const { return active_.empty(); }
  const std::shared_ptr<ScratchPool>& scratch() const { return scratch_; }
  void poll() {
    for (size_t i = 0; i < active_.size();) {
      if (active_[i]->advance())
        active_.erase(active_.begin() + static_cast<std::ptrdiff_t>(i));
      else
        ++i;
    }
  }
  bool contains(const StateMachine* m) const {
    return std::ranges::find(active_, m) != active_.end();
  }
  // Yields the core between polls, which costs nothing while nobody else wants
  // it. Where somebody does, be it another rank or another program, a thread
  // that spins or yields has used up its share of the core when the message
  // arrives, and waits for its next time slice; one that slept runs at once. So
  // it sleeps between polls after a millisecond, or as soon as a yield has cost
  // a time slice, and for a while after that.
  void wait(const StateMachine* m) {
    constexpr int64_t kYieldNs = 1'000'000, kCrowdedNs = 50'000'000;
    constexpr timespec kSleep{.tv_sec = 0, .tv_nsec = 50'000};
    if (!contains(m)) return;
    const int64_t start = monotonic_ns();
    for (int64_t now = start; contains(m); poll()) {
      if (now < crowded_until_ns_ || now - start > kYieldNs) {
        nanosleep(&kSleep, nullptr);
        now = monotonic_ns();
      } else {
        const int64_t before = now;
        sched_yield();
        now = monotonic_ns();
        if (now - before > kYieldNs) crowded_until_ns_ = now + kCrowdedNs;
      }
    }
  }

 private:
  std::vector<StateMachine*> active_;
  int64_t crowded_until_ns_ = 0;
  std::shared_ptr<ScratchPool> scratch_ = std::make_shared<ScratchPool>();
};

class MpiRequest final : public Request {
 public:
  MpiRequest(std::shared_ptr<Progress> progress,
             std::unique_ptr<StateMachine> m)
      : progress_(std::move(progress)), machine_(std::move(m)) {
    if (!machine_->advance()) progress_->add(machine_.get());
  }
  ~MpiRequest() override { wait(); }
  void wait() override { progress_->wait(machine_.get()); }
  bool test() override {
    progress_->poll();
    return !progress_->contains(machine_.get());
  }

 private:
  std::shared_ptr<Progress> progress_;
  std::unique_ptr<StateMachine> machine_;
};

// Owns two communicators, so that the collectives' messages never match the
// caller's.
class MpiComm final : public Comm {
 public:
  // Takes ownership of `p2p`.
  MpiComm(std::shared_ptr<Progress> progress, MPI_Comm p2p)
      : progress_(std::move(progress)), p2p_(p2p) {
    const YieldInMpi yield;
    check_mpi(MPI_Comm_dup(p2p_, &coll_), "MPI_Comm_dup");
    MPI_Comm_rank(p2p_, &rank_);
    MPI_Comm_size(p2p_, &size_);
  }
  MpiComm(const MpiComm&) = delete;
  MpiComm& operator=(const MpiComm&) = delete;
  ~MpiComm() override {
    if (mpi_finalized()) return;
    MPI_Comm_free(&coll_);
    MPI_Comm_free(&p2p_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void barrier() override {
    auto batch = std::make_unique<MpiBatch>(coll_);
    batch->barrier();
    run(std::move(batch));
  }
  void broadcast(std::span<std::byte> data, int root) override {
    CHECK(root >= 0 && root < size_);
    auto batch = std::make_unique<MpiBatch>(coll_);
    batch->broadcast(data.data(), data.size(), root);
    run(std::move(batch));
  }
  void all_reduce(std::span<float> data, Op op) override {
    run(reduce(data, op));
  }
  void all_reduce(std::span<double> data, Op op) override {
    run(reduce(data, op));
  }
  void all_reduce(std::span<int64_t> data, Op op) override {
    run(reduce(data, op));
  }

  RequestPtr start_all_reduce(std::span<float> data, Op op) override {
    return start(reduce(data, op));
  }
  RequestPtr start_all_gather(std::span<const std::byte> mine,
                              std::span<std::byte> all) override {
    CHECK(all.size() == mine.size() * static_cast<size_t>(size_));
    const Group g = group();
    auto batch = std::make_unique<MpiBatch>(coll_);
    const auto part = [&](int r) {
      return all.data() + static_cast<size_t>(r) * mine.size();
    };
    if (mine.data() != part(rank_))
      std::copy(mine.begin(), mine.end(), part(rank_));
    for (int d = 1; d < size_; ++d) {
      const int from = (rank_ - d + size_) % size_;
      batch->recv(part(from), mine.size(), from, g.base_tag);
    }
    for (int d = 1; d < size_; ++d)
      batch->send(mine.data(), mine.size(), (rank_ + d) % size_, g.base_tag);
    return start(std::move(batch));
  }
  RequestPtr start_reduce_scatter(std::span<const float> all,
                                  std::span<float> mine) override {
    CHECK(all.size() == mine.size() * static_cast<size_t>(size_));
    return start(DirectReduce<float>::reduce_scatter(
        group(), Op::kSum, all.data(), mine.data(), mine.size()));
  }
  RequestPtr start_send(std::span<const std::byte> data, int to,
                        int tag) override {
    CHECK(to >= 0 && to < size_ && tag >= 0);
    auto batch = std::make_unique<MpiBatch>(p2p_);
    batch->send(data.data(), data.size(), to, tag);
    return start(std::move(batch));
  }
  RequestPtr start_recv(std::span<std::byte> data, int from, int tag) override {
    CHECK(from >= 0 && from < size_ && tag >= 0);
    auto batch = std::make_unique<MpiBatch>(p2p_);
    batch->recv(data.data(), data.size(), from, tag);
    return start(std::move(batch));
  }

  std::unique_ptr<Comm> split(int color, int key) override {
    // MPI_Comm_split blocks inside MPI, where no other operation advances.
    CHECK_MSG(progress_->idle(), "split() while requests are in progress");
    MPI_Comm sub = MPI_COMM_NULL;
    const YieldInMpi yield;
    check_mpi(
        MPI_Comm_split(coll_, color < 0 ? MPI_UNDEFINED : color, key, &sub),
        "MPI_Comm_split");
    if (sub == MPI_COMM_NULL) return nullptr;
    return std::make_unique<MpiComm>(progress_, sub);
  }

 private:
  Group group() {
    const int tag = 4 * sequence_;
    sequence_ = (sequence_ + 1) % kTagCycle;
    return {.rank = rank_,
            .size = size_,
            .base_tag = tag,
            .new_batch =
                [comm = coll_] { return std::make_unique<MpiBatch>(comm); },
            .scratch = progress_->scratch()};
  }
  template <typename T>
  std::unique_ptr<StateMachine> reduce(std::span<T> data, Op op) {
    return DirectReduce<T>::all_reduce(group(), op, data.data(), data.size());
  }
  RequestPtr start(std::unique_ptr<StateMachine> m) {
    return std::make_unique<MpiRequest>(progress_, std::move(m));
  }
  void run(std::unique_ptr<StateMachine> m) {
    MpiRequest(progress_, std::move(m)).wait();
  }

  std::shared_ptr<Progress> progress_;
  MPI_Comm p2p_ = MPI_COMM_NULL;
  MPI_Comm coll_ = MPI_COMM_NULL;
  int rank_ = 0;
  int size_ = 1;
  int sequence_ = 0;  // of collectives, the same on every rank
};

class MpiWorldImpl final : public MpiWorld {
 public:
  MpiWorldImpl() : progress_(std::make_shared<Progress>()) {
    MPI_Comm dup = MPI_COMM_NULL;
    check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &dup), "MPI_Comm_dup");
    world_ = std::make_unique<MpiComm>(progress_, dup);
  }
  MpiWorldImpl(const MpiWorldImpl&) = delete;
  MpiWorldImpl& operator=(const MpiWorldImpl&) = delete;
  ~MpiWorldImpl() override {
    if (!mpi_finalized()) finalize();
  }

  Comm& world() override { return *world_; }
  int rank() const override { return world_->rank(); }
  int size() const override { return world_->size(); }

  void finalize() override {
    CHECK_MSG(progress_->idle(), "finalize() while requests are in progress");
    const YieldInMpi yield;
    check_mpi(MPI_Finalize(), "MPI_Finalize");
  }
  [[noreturn]] void abort(int exit_code, const std::string& message) override {
    std::fprintf(stderr, "rank %d of %d: %s\n", rank(), size(),
                 message.c_str());
    std::fflush(stderr);
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    _exit(exit_code);
  }

 private:
  std::shared_ptr<Progress> progress_;
  std::unique_ptr<MpiComm> world_;
};

}  // namespace

Result<std::unique_ptr<MpiWorld>> MpiWorld::init(const MpiExpect& expect) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized != 0)
    return internal(
        "MPI: already initialised in this process; a process can "
        "join only one world");
  // Short sleeps of Progress::wait() are to be short; the default adds 50 us.
  prctl(PR_SET_TIMERSLACK, 1000UL);
  // Serialized: one thread at a time, but not always the same one.
  int provided = 0;
  const int rc =
      MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
  if (rc != MPI_SUCCESS)
    return unavailable(fmt::format("MPI_Init_thread failed with code {}", rc));
  int rank = 0;
  int size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  std::string why;
  if (provided < MPI_THREAD_SERIALIZED)
    why = "this MPI library was built without MPI_THREAD_SERIALIZED";
  else if (expect.size >= 0 && size != expect.size)
    why = fmt::format("world of {}, expected {}", size, expect.size);
  else if (expect.rank >= 0 && rank != expect.rank)
    why = fmt::format("rank {}, expected {}", rank, expect.rank);
  if (why.empty()) return std::unique_ptr<MpiWorld>(new MpiWorldImpl());
  // Peers that accept the world would not take part in finalising.
  if (size == 1) MPI_Finalize();
  return unavailable("MPI: " + why +
                     (size == 1 ? " (no launcher found: MPI made a world of "
                                  "its own; is PMIX_RANK set?)"
                                : ""));
}

}  // namespace remesh::comm
