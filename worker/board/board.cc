#include "worker/board/board.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <new>

#include "proto/base/descriptor.h"

namespace remesh::board {
namespace {

constexpr uint64_t kMagic = 0x34645242686d6572ULL;  // "remhBRd4"
constexpr size_t kRing = 4096;
constexpr size_t kText = 2048;

// A text with a version (seqlock), which is odd during a write.
struct Text {
  std::atomic<uint32_t> version{0};
  std::atomic<uint32_t> length{0};
  std::array<std::atomic<char>, kText> data{};

  void write(std::string_view s) {
    version.fetch_add(1, std::memory_order_acq_rel);
    const size_t n = std::min(s.size(), kText);
    for (size_t i = 0; i < n; ++i)
      data[i].store(s[i], std::memory_order_relaxed);
    length.store(static_cast<uint32_t>(n), std::memory_order_relaxed);
    version.fetch_add(1, std::memory_order_release);
  }
  std::string read() const {
    // A writer that died during a write leaves an odd version. Partial text is
    // better than none.
    for (int tries = 0;; ++tries) {
      const uint32_t before = version.load(std::memory_order_acquire);
      std::string out(
          std::min<size_t>(length.load(std::memory_order_relaxed), kText),
          '\0');
      for (size_t i = 0; i < out.size(); ++i)
        out[i] = data[i].load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      if ((before % 2 == 0 && before == version.load()) || tries == 3)
        return out;
    }
  }
};

}  // namespace

pb::StepMetrics to_metrics(const StepRecord& r, int64_t generation,
                           const pb::Mesh& mesh) {
  pb::StepMetrics m;
  m.set_step(r.step);
  m.set_loss(r.loss);
  m.set_grad_norm(r.grad_norm);
  m.set_lr(r.lr);
  if (r.skipped) m.set_skipped(true);
  m.set_tokens(r.tokens);
  m.set_tokens_per_s(r.tokens_per_s);
  m.set_step_s(r.step_s);
  m.set_generation(generation);
  *m.mutable_mesh() = mesh;
  m.set_time(r.time);
  if (!std::isnan(r.val_loss)) m.set_val_loss(r.val_loss);
  for (int32_t i = 0; i < r.validated; ++i)
    m.add_val_losses(r.val_losses.at(static_cast<size_t>(i)));
  if (r.flops_per_s > 0) m.set_flops_per_s(r.flops_per_s);
  if (r.gemm_flops_per_s > 0) m.set_gemm_flops_per_s(r.gemm_flops_per_s);
  if (r.mfu > 0) m.set_mfu(r.mfu);
  if (r.exposed_comm >= 0) m.set_exposed_comm(r.exposed_comm);
  if (r.bubble >= 0) m.set_bubble(r.bubble);
  if (r.has_digest) m.set_digest(r.digest);
  return m;
}

struct Board::Page {
  uint64_t magic = kMagic;
  int64_t generation = 0;
  int32_t rank = 0;
  std::atomic<uint32_t> phase{0};
  std::atomic<uint64_t> progress{0};
  std::atomic<int64_t> step{0};
  std::atomic<int64_t> microbatch{0};
  std::atomic<int64_t> committed_step{-1};
  std::atomic<int64_t> checkpoint_step{-1};
  std::atomic<int64_t> declined_stops{0};
  std::atomic<int64_t> failed_saves{0};
  std::atomic<double> exposed_comm{-1};
  std::atomic<double> bubble{-1};
  std::array<std::atomic<uint64_t>, std::size(kMemoryPurposes)> memory{};
  std::atomic<uint64_t> restored_digest{0};
  std::atomic<bool> has_restored_digest{false};
  std::atomic<double> link_bytes_per_s{0};
  std::atomic<uint32_t> request{0};
  std::atomic<int64_t> checkpoint_request{0};
  std::atomic<int64_t> daemon_beat_ms{0};
  std::atomic<uint64_t> ring_head{0};  // next to write
  std::atomic<uint64_t> ring_tail{0};  // next to read
  Text error;
  std::atomic<uint32_t> checkpoint_code{0};
  Text checkpoint_error;
  FlightMemory flight;
  std::array<StepRecord, kRing> ring{};
};

Board::Board(int fd, Page* page)
    : fd_(fd),
      page_(page),
      flight_(&page->flight, &page->step, &page->microbatch) {}

Result<std::unique_ptr<Board>> Board::create(int64_t generation, int rank) {
  Descriptor fd(memfd_create("remesh-board", MFD_CLOEXEC));
  if (fd.get() < 0) return errno_error("board: memfd_create", errno);
  if (ftruncate(fd.get(), sizeof(Page)) != 0)
    return errno_error("board: ftruncate", errno);
  void* p = mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED,
                 fd.get(), 0);
  if (p == MAP_FAILED) return errno_error("board: mmap", errno);
  Page* page = new (p) Page;
  page->generation = generation;
  page->rank = rank;
  return std::unique_ptr<Board>(new Board(fd.release(), page));
}

Result<std::unique_ptr<Board>> Board::open(int fd) {
  struct stat st {};
  if (fstat(fd, &st) != 0) return errno_error("board: fstat", errno);
  if (st.st_size != static_cast<off_t>(sizeof(Page)))
    return invalid_argument(
        "board: wrong size: daemon and trainer have different versions");
  void* p =
      mmap(nullptr, sizeof(Page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) return errno_error("board: mmap", errno);
  Page* page = static_cast<Page*>(p);
  if (page->magic != kMagic) {
    munmap(p, sizeof(Page));
    return invalid_argument(
        "board: wrong magic number: daemon and trainer have different "
        "versions");
  }
  return std::unique_ptr<Board>(new Board(fd, page));
}

Board::~Board() {
  munmap(page_, sizeof(Page));
  close(fd_);
}

int64_t Board::generation() const { return page_->generation; }
int Board::rank() const { return page_->rank; }

void Board::set_phase(pb::RankStatus::Phase phase) {
  page_->phase.store(static_cast<uint32_t>(phase));
  tick();
}
void Board::set_step(int64_t step) { page_->step.store(step); }
void Board::set_microbatch(int64_t microbatch) {
  page_->microbatch.store(microbatch);
  tick();
}
void Board::tick() { page_->progress.fetch_add(1); }
void Board::commit_step(int64_t step) {
  page_->committed_step.store(step);
  tick();
}
void Board::set_checkpoint_step(int64_t step) {
  page_->checkpoint_step.store(step);
}
void Board::decline_stop() { page_->declined_stops.fetch_add(1); }
void Board::set_shares(double exposed_comm, double bubble) {
  page_->exposed_comm.store(exposed_comm);
  page_->bubble.store(bubble);
}
void Board::set_restored_digest(uint64_t digest) {
  page_->restored_digest.store(digest);
  page_->has_restored_digest.store(true);
}
void Board::set_link(double bytes_per_s) {
  page_->link_bytes_per_s.store(bytes_per_s);
}
void Board::set_memory(const MemoryUse& m) {
  for (size_t i = 0; i < std::size(kMemoryPurposes); ++i)
    page_->memory[i].store(m.*kMemoryPurposes[i].bytes);
}
void Board::set_error(std::string_view text) { page_->error.write(text); }
// The code first, and it stays when the text goes: whoever reads a text finds
// its code, or that of a newer error.
void Board::set_checkpoint_error(const Status& error) {
  if (!error.ok())
    page_->checkpoint_code.store(static_cast<uint32_t>(error.code()));
  page_->checkpoint_error.write(error.ok() ? "" : error.to_string());
}
void Board::fail_save(const Status& error) {
  set_checkpoint_error(error);
  page_->failed_saves.fetch_add(1);
}

bool Board::push_step(const StepRecord& record) {
  const uint64_t head = page_->ring_head.load(std::memory_order_relaxed);
  if (head - page_->ring_tail.load(std::memory_order_acquire) >= kRing)
    return false;
  page_->ring[head % kRing] = record;
  page_->ring_head.store(head + 1, std::memory_order_release);
  return true;
}

uint32_t Board::request() const { return page_->request.load(); }
int64_t Board::checkpoint_request() const {
  return page_->checkpoint_request.load();
}
int64_t Board::daemon_beat_ms() const { return page_->daemon_beat_ms.load(); }

pb::RankStatus Board::snapshot() const {
  pb::RankStatus s;
  // The rank may have damaged it.
  const auto phase = static_cast<int>(page_->phase.load());
  s.set_phase(pb::RankStatus::Phase_IsValid(phase)
                  ? static_cast<pb::RankStatus::Phase>(phase)
                  : pb::RankStatus::UNKNOWN);
  s.set_progress(progress());
  s.set_step(page_->step.load());
  s.set_microbatch(page_->microbatch.load());
  s.set_committed_step(committed_step());
  s.set_checkpoint_step(page_->checkpoint_step.load());
  s.set_declined_stops(page_->declined_stops.load());
  s.set_failed_saves(page_->failed_saves.load());
  const double exposed_comm = page_->exposed_comm.load();
  if (exposed_comm >= 0) s.set_exposed_comm(exposed_comm);
  const double bubble = page_->bubble.load();
  if (bubble >= 0) s.set_bubble(bubble);
  MemoryUse memory;
  for (size_t i = 0; i < std::size(kMemoryPurposes); ++i)
    memory.*kMemoryPurposes[i].bytes = page_->memory[i].load();
  if (memory != MemoryUse{}) to_message(memory, s.mutable_memory());
  if (page_->has_restored_digest.load())
    s.set_restored_digest(page_->restored_digest.load());
  const double link = page_->link_bytes_per_s.load();
  if (link > 0) s.set_link_bytes_per_s(link);
  const std::string error = page_->error.read();
  if (!error.empty()) s.set_error(error);
  const std::string checkpoint_error = page_->checkpoint_error.read();
  const uint32_t code = page_->checkpoint_code.load();
  if (!checkpoint_error.empty()) s.set_checkpoint_error(checkpoint_error);
  if (!checkpoint_error.empty() && code <= static_cast<uint32_t>(Code::kEnded))
    s.set_checkpoint_code(code_name(static_cast<Code>(code)));
  return s;
}

int64_t Board::committed_step() const { return page_->committed_step.load(); }
uint64_t Board::progress() const { return page_->progress.load(); }

std::vector<StepRecord> Board::pop_steps() {
  std::vector<StepRecord> out;
  uint64_t tail = page_->ring_tail.load(std::memory_order_relaxed);
  const uint64_t head = page_->ring_head.load(std::memory_order_acquire);
  for (; tail != head && out.size() < kRing; ++tail)
    out.push_back(page_->ring[tail % kRing]);
  page_->ring_tail.store(head, std::memory_order_release);
  return out;
}

void Board::set_request(uint32_t bits) { page_->request.store(bits); }
void Board::set_checkpoint_request(int64_t number) {
  page_->checkpoint_request.store(number);
}
void Board::beat(int64_t now_ms) { page_->daemon_beat_ms.store(now_ms); }

}  // namespace remesh::board
