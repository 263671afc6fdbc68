#include "checkpoint/memory/segment.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <new>
#include <utility>

#include "checkpoint/memory/segment_directory.h"
#include "proto/base/clock.h"
#include "proto/base/descriptor.h"
#include "proto/base/file_system.h"
#include "proto/base/xxh3.h"

namespace remesh::memory {
namespace {

constexpr uint64_t kMagic = 0x31746174536d6572ULL;  // "remStat1"
constexpr uint64_t kVersion = 1;
constexpr int kBuffers = 2;
constexpr size_t kSlots = 2 * kBuffers;  // two records per buffer
constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = uint64_t{2} << 20;
constexpr uint64_t kPopulatedAtOnce = uint64_t{1} << 30;
constexpr int kCollapse = 25;  // MADV_COLLAPSE, which glibc 2.36 lacks
constexpr int64_t kMaxCapacity = int64_t{1} << 48;

using Word = std::atomic<uint64_t>;
static_assert(Word::is_always_lock_free);

uint64_t round_up(uint64_t n, uint64_t unit) {
  return (n + unit - 1) / unit * unit;
}

uint64_t vector_bytes(int64_t capacity) {
  return round_up(static_cast<uint64_t>(capacity) * sizeof(float), kPage);
}

// Orders all stores before it, including non-temporal ones, before those after.
void store_fence() {
#ifdef __x86_64__
  __builtin_ia32_sfence();
#endif
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

Status lock(const std::string& path, int fd) {
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) return ok_status();
  if (errno == EWOULDBLOCK)
    return unavailable(path + ": another process has it open for writing");
  return errno_error(path, errno);
}

}  // namespace

// Describes a buffer. Atomic words, because readers run during a write.
struct StateSegment::Record {
  alignas(64) Word sequence;  // 0: invalid
  Word num_words;
  Word checksum;  // xxh3 of the words, seeded with the sequence
  std::array<Word, kMaxInfoWords> words;
};

struct StateSegment::Header {
  uint64_t magic, version, job, capacity, bytes;
  uint64_t checksum;  // of the above
  std::array<Record, kSlots> records;

  uint64_t own_checksum() const {
    return xxh3(this, offsetof(Header, checksum));
  }
};

namespace {

uint64_t header_bytes() {
  return round_up(sizeof(StateSegment::Header), kPage);
}

uint64_t bytes_with(int64_t capacity, uint64_t buffers) {
  CHECK(capacity >= 0 && capacity <= kMaxCapacity);
  const uint64_t bytes = header_bytes() + buffers * geometry::kNumStateVectors *
                                              vector_bytes(capacity);
  return bytes < kHugePage ? bytes : round_up(bytes, kHugePage);
}

uint64_t record_checksum(uint64_t sequence, std::span<const uint64_t> words) {
  return xxh3(words.data(), words.size_bytes(), sequence);
}

enum class Seen { kNothing, kState, kDamage };

// A consistent snapshot of one record, even while it is being written.
Seen read_record(const StateSegment::Record& r, uint64_t* sequence,
                 std::vector<uint64_t>* words) {
  for (int tries = 0; tries < 100; ++tries) {
    *sequence = r.sequence.load(std::memory_order_acquire);
    if (*sequence == 0) return Seen::kNothing;
    const uint64_t n = r.num_words.load(std::memory_order_relaxed);
    words->resize(std::min<uint64_t>(n, kMaxInfoWords));
    for (size_t i = 0; i < words->size(); ++i)
      (*words)[i] = r.words[i].load(std::memory_order_relaxed);
    const uint64_t checksum = r.checksum.load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (r.sequence.load(std::memory_order_relaxed) != *sequence) continue;
    return checksum == record_checksum(*sequence, *words) && n == words->size()
               ? Seen::kState
               : Seen::kDamage;
  }
  return Seen::kNothing;  // rewritten all the time: treat it as invalid
}

}  // namespace

uint64_t segment_bytes(int64_t capacity) {
  return bytes_with(capacity, kBuffers);
}

uint64_t half_segment_bytes(int64_t capacity) {
  return bytes_with(capacity, 1);
}

ContentHash content_hash(const geometry::ConstStateView& state) {
  ContentHash h;
  for (size_t i = 0; i < geometry::kNumStateVectors; ++i)
    h[i] = xxh3(state[i].data(), state[i].size_bytes());
  return h;
}

StateSegment::StateSegment(std::string path, int fd, void* base, uint64_t bytes,
                           Mode mode)
    : path_(std::move(path)),
      fd_(fd),
      base_(static_cast<std::byte*>(base)),
      bytes_(bytes),
      mode_(mode),
      header_(static_cast<Header*>(base)) {}

StateSegment::~StateSegment() {
  munmap(base_, bytes_);
  close(fd_);  // releases the lock
}

// Maps at a multiple of the huge page size, which huge pages require.
Result<std::unique_ptr<StateSegment>> StateSegment::map(const std::string& path,
                                                        int fd, uint64_t bytes,
                                                        Mode mode) {
  Descriptor owned(fd);
  const uint64_t room = bytes + kHugePage;
  void* p = mmap(nullptr, room, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return errno_error(path + ": mmap", errno);
  auto* const begin = static_cast<std::byte*>(p);
  const auto address = reinterpret_cast<uint64_t>(p);
  std::byte* const at = begin + (round_up(address, kHugePage) - address);
  const int prot = mode == Mode::kWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  if (mmap(at, bytes, prot, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int err = errno;
    munmap(p, room);
    return errno_error(path + ": mmap", err);
  }
  std::byte* const end = at + round_up(bytes, kPage);
  if (at > begin) munmap(begin, static_cast<size_t>(at - begin));
  if (begin + room > end) munmap(end, static_cast<size_t>(begin + room - end));
  if (bytes >= kHugePage) (void)madvise(at, bytes, MADV_HUGEPAGE);  // advice
  return std::unique_ptr<StateSegment>(
      new StateSegment(path, owned.release(), at, bytes, mode));
}

namespace {

// Allocates whole huge pages, where the kernel can (6.1 or later), even if
// /dev/shm is mounted without them: in a virtual machine an update that goes
// through small pages may take ten times as long. It fills the holes of a huge
// page that has one page already. REQUIRES: `at` is a multiple of kHugePage.
void use_huge_pages(std::byte* at, uint64_t bytes) {
  const uint64_t whole = bytes / kHugePage * kHugePage;
  for (uint64_t i = 0; i < whole; i += kHugePage)
    if (madvise(at + i, kPage, MADV_POPULATE_WRITE) != 0) return;
  (void)madvise(at, whole, kCollapse);
}

}  // namespace

// Allocates every page, so that no later store fails for lack of memory.
Status StateSegment::populate(uint64_t bytes,
                              const std::function<void()>& tick) {
  for (uint64_t at = 0; at < bytes; at += kPopulatedAtOnce) {
    const uint64_t n = std::min(kPopulatedAtOnce, bytes - at);
    use_huge_pages(base_ + at, n);
    int err = madvise(base_ + at, n, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
    if (err == EINVAL)  // a kernel before 5.14
      err = posix_fallocate(fd_, static_cast<off_t>(at), static_cast<off_t>(n));
    if (err == EFAULT || err == ENOMEM || err == ENOSPC)
      return short_of_room(path_, bytes);
    if (err != 0) return errno_error(path_ + ": populate", err);
    if (tick) tick();
  }
  return ok_status();
}

Result<std::unique_ptr<StateSegment>> StateSegment::create(
    const std::string& path, uint64_t job, int64_t capacity, Extent extent,
    const std::function<void()>& tick) {
  const uint64_t bytes = segment_bytes(capacity);
  const uint64_t allocated =
      extent == Extent::kHalf ? half_segment_bytes(capacity) : bytes;
  RETURN_IF_ERROR(check_room(path, allocated));
  const std::string fresh = path + ".new";
  Descriptor fd(
      ::open(fresh.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (fd.get() < 0) {
    if (errno == EEXIST) return already_exists(fresh + " already exists");
    return errno_error(fresh, errno);
  }
  const auto fail = [&](Status status) {
    unlink(fresh.c_str());
    return status;
  };
  Status locked = lock(fresh, fd.get());
  if (!locked.ok()) return fail(std::move(locked));
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    return fail(errno_error(fresh + ": ftruncate", errno));
  auto segment = map(path, fd.release(), bytes, Mode::kWrite);
  if (!segment.ok()) return fail(segment.status());
  Status populated = (*segment)->populate(allocated, tick);
  if (!populated.ok()) return fail(std::move(populated));
  Header* const h = new ((*segment)->base_) Header{};
  h->magic = kMagic;
  h->version = kVersion;
  h->job = job;
  h->capacity = static_cast<uint64_t>(capacity);
  h->bytes = bytes;
  h->checksum = h->own_checksum();
  if (renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, path.c_str(),
                RENAME_NOREPLACE) != 0)
    return fail(errno == EEXIST ? already_exists(path + " already exists")
                                : errno_error(path, errno));
  return segment;
}

Result<std::unique_ptr<StateSegment>> StateSegment::open_unpopulated(
    const std::string& path, uint64_t job, Mode mode) {
  Descriptor fd(
      ::open(path.c_str(), (mode == Mode::kWrite ? O_RDWR : O_RDONLY) |
                               O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (fd.get() < 0) {
    if (errno == ENOENT) return not_found(path + " does not exist");
    return errno_error(path, errno);
  }
  struct stat st {};
  if (fstat(fd.get(), &st) != 0) return errno_error(path, errno);
  if (!S_ISREG(st.st_mode) || st.st_uid != geteuid())
    return invalid_argument(path + ": not a file of this user");
  const auto bytes = static_cast<uint64_t>(st.st_size);
  if (bytes < header_bytes())
    return corrupt(
        fmt::format("{}: {} bytes, less than a header", path, bytes));
  if (mode == Mode::kWrite) {
    RETURN_IF_ERROR(lock(path, fd.get()));
    // The previous holder of the lock may have removed it.
    if (!is_at(fd.get(), path)) return not_found(path + " no longer exists");
  }
  ASSIGN_OR_RETURN(auto segment, map(path, fd.release(), bytes, mode));
  const Header& h = *segment->header_;
  if (h.magic != kMagic) return corrupt(path + ": is not a state segment");
  if (h.version != kVersion)
    return corrupt(fmt::format("{}: version {}, this program supports {}", path,
                               h.version, kVersion));
  if (h.checksum != h.own_checksum())
    return corrupt(path + ": the header's checksum is wrong");
  if (h.capacity > static_cast<uint64_t>(kMaxCapacity) || h.bytes != bytes ||
      segment_bytes(static_cast<int64_t>(h.capacity)) != bytes)
    return corrupt(fmt::format("{}: {} bytes, made with {} for {} elements",
                               path, bytes, h.bytes, h.capacity));
  if (h.job != job)
    return invalid_argument(fmt::format(
        "{}: belongs to job {:016x}, not {:016x}", path, h.job, job));
  // The largest number may be that of a record which was made invalid since:
  // the clock is beyond it.
  segment->next_sequence_ = static_cast<uint64_t>(monotonic_ns());
  for (const Committed& c : segment->contents().states)
    segment->next_sequence_ = std::max(segment->next_sequence_, c.sequence + 1);
  return segment;
}

Result<std::unique_ptr<StateSegment>> StateSegment::open(
    const std::string& path, uint64_t job, Mode mode,
    const std::function<void()>& tick) {
  ASSIGN_OR_RETURN(auto segment, open_unpopulated(path, job, mode));
  if (mode == Mode::kWrite) RETURN_IF_ERROR(segment->complete(tick));
  return segment;
}

Status StateSegment::free_buffer(const std::string& path, uint64_t job,
                                 int buffer) {
  ASSIGN_OR_RETURN(auto segment, open_unpopulated(path, job, Mode::kWrite));
  segment->begin(buffer);
  const uint64_t bytes =
      geometry::kNumStateVectors * vector_bytes(segment->capacity());
  const uint64_t at = header_bytes() + static_cast<uint64_t>(buffer) * bytes;
  if (fallocate(segment->fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                static_cast<off_t>(at), static_cast<off_t>(bytes)) != 0)
    return errno_error(path + ": fallocate", errno);
  return ok_status();
}

int64_t StateSegment::capacity() const {
  return static_cast<int64_t>(header_->capacity);
}

float* StateSegment::vector(int buffer, size_t i) const {
  CHECK(buffer >= 0 && buffer < kBuffers);
  const uint64_t index =
      static_cast<uint64_t>(buffer) * geometry::kNumStateVectors + i;
  return reinterpret_cast<float*>(base_ + header_bytes() +
                                  index * vector_bytes(capacity()));
}

StateSegment::Contents StateSegment::contents() const {
  Contents out;
  for (size_t slot = 0; slot < kSlots; ++slot) {
    const int buffer = static_cast<int>(slot / 2);
    uint64_t sequence = 0;
    std::vector<uint64_t> words;
    const Seen seen = read_record(header_->records[slot], &sequence, &words);
    if (seen == Seen::kNothing) continue;
    Result<StateInfo> info =
        seen == Seen::kState ? decode(words) : corrupt("checksum is wrong");
    if (info.ok() && info->elements > capacity())
      info = corrupt("more elements than the segment's capacity");
    if (info.ok())
      out.states.push_back({buffer, sequence, std::move(*info)});
    else
      out.damaged.push_back(fmt::format("{}: record {} of buffer {}: {}", path_,
                                        slot % 2, buffer,
                                        info.status().message()));
  }
  std::sort(out.states.begin(), out.states.end(),
            [](const Committed& a, const Committed& b) {
              return a.sequence > b.sequence;
            });
  return out;
}

bool StateSegment::is_valid(const Committed& c) const {
  std::atomic_thread_fence(std::memory_order_acquire);
  for (size_t slot = 0; slot < kSlots; ++slot)
    if (header_->records[slot].sequence.load(std::memory_order_acquire) ==
        c.sequence)
      return static_cast<int>(slot / 2) == c.buffer;
  return false;
}

geometry::ConstStateView StateSegment::read(int buffer,
                                            int64_t elements) const {
  CHECK(elements >= 0 && elements <= capacity());
  const auto n = static_cast<size_t>(elements);
  return {.weights = {vector(buffer, 0), n},
          .exp_avg = {vector(buffer, 1), n},
          .exp_avg_sq = {vector(buffer, 2), n}};
}

Status StateSegment::verify_content(const Committed& c) const {
  if (!c.info.content) return ok_status();
  const ContentHash found = content_hash(read(c.buffer, c.info.elements));
  if (!is_valid(c))
    return unavailable(path_ + ": overwritten while it was being verified");
  for (size_t i = 0; i < geometry::kNumStateVectors; ++i)
    if (found[i] != (*c.info.content)[i])
      return corrupt(fmt::format("{}: {}: the checksum of {} is wrong", path_,
                                 to_string(c.info),
                                 i == 0   ? "the weights"
                                 : i == 1 ? "the first moment"
                                          : "the second moment"));
  return ok_status();
}

geometry::StateView StateSegment::write(int buffer, int64_t elements) {
  CHECK(mode_ == Mode::kWrite && elements >= 0 && elements <= capacity());
  const auto n = static_cast<size_t>(elements);
  return {.weights = {vector(buffer, 0), n},
          .exp_avg = {vector(buffer, 1), n},
          .exp_avg_sq = {vector(buffer, 2), n}};
}

void StateSegment::begin(int buffer) {
  CHECK(mode_ == Mode::kWrite && buffer >= 0 && buffer < kBuffers);
  for (size_t slot : {size_t{0}, size_t{1}})
    header_->records[static_cast<size_t>(buffer) * 2 + slot].sequence.store(
        0, std::memory_order_relaxed);
  store_fence();
  begun_ = buffer;
}

StateSegment::Committed StateSegment::publish(size_t slot, int buffer,
                                              const StateInfo& info) {
  CHECK(info.elements <= capacity());
  Record& r = header_->records[slot];
  r.sequence.store(0, std::memory_order_relaxed);
  store_fence();
  const std::vector<uint64_t> words = encode(info);
  const uint64_t sequence = next_sequence_++;
  for (size_t i = 0; i < words.size(); ++i)
    r.words[i].store(words[i], std::memory_order_relaxed);
  r.num_words.store(words.size(), std::memory_order_relaxed);
  r.checksum.store(record_checksum(sequence, words), std::memory_order_relaxed);
  store_fence();
  r.sequence.store(sequence, std::memory_order_release);
  return {buffer, sequence, info};
}

StateSegment::Committed StateSegment::commit(const StateInfo& info) {
  CHECK_MSG(begun_ >= 0, "commit() without begin()");
  const int buffer = std::exchange(begun_, -1);
  return publish(static_cast<size_t>(buffer) * 2, buffer, info);
}

StateSegment::Committed StateSegment::redescribe(const Committed& c,
                                                 const StateInfo& info) {
  CHECK(mode_ == Mode::kWrite && is_valid(c));
  CHECK(info.elements == c.info.elements && info.step == c.info.step);
  const size_t first = static_cast<size_t>(c.buffer) * 2;
  const bool in_first = header_->records[first].sequence.load(
                            std::memory_order_relaxed) == c.sequence;
  return publish(in_first ? first + 1 : first, c.buffer, info);
}

Status StateSegment::check_kept() const {
  struct stat st {};
  if (fstat(fd_, &st) != 0 || st.st_nlink > 0) return ok_status();
  return unavailable(
      path_ + ": the state in memory is not kept any more: " + kWhoRemoves);
}

}  // namespace remesh::memory
