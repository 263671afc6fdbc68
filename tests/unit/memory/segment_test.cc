// State segments: only what was committed is found, and a segment that is
// damaged, foreign or too large is refused with the reason.
#include "checkpoint/memory/segment.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "checkpoint/memory/segment_directory.h"
#include "tests/testing/seed.h"
#include "tests/testing/segment_states.h"
#include "tests/testing/temp_dir.h"

namespace remesh::memory {
namespace {

using Mode = StateSegment::Mode;

constexpr uint64_t kJob = 0x1234;

std::unique_ptr<StateSegment> make(const std::string& path, int64_t capacity) {
  auto s = StateSegment::create(path, kJob, capacity);
  CHECK_MSG(s.ok(), s.status().to_string().c_str());
  return std::move(*s);
}

TEST(StateInfo, DecodesExactlyWhatWasEncoded) {
  const uint32_t seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 2000; ++i) {
    StateInfo info = info_of(static_cast<int64_t>(random() % 1000), 5);
    info.sharding.bounds.clear();
    const size_t stages = random() % (i % 50 == 0 ? 1025 : 9);
    for (size_t b = 0; b <= stages && stages <= 1024; ++b)
      info.sharding.bounds.push_back(static_cast<int64_t>(random() % 100000));
    info.model = random();
    info.replica = random() % 2 == 0;
    if (random() % 2 == 0) info.content = {random(), random(), random()};
    const std::vector<uint64_t> words = encode(info);
    ASSERT_LE(words.size(), kMaxInfoWords);
    ASSERT_OK_AND(const auto back, decode(words));
    ASSERT_EQ(back, info);
    // Other words give another state or an error, never a crash.
    std::vector<uint64_t> wrong = words;
    wrong[random() % wrong.size()] ^= uint64_t{1} << random() % 64;
    const auto other = decode(wrong);
    if (other.ok()) {
      EXPECT_FALSE(*other == info);
    }
    const std::vector<uint64_t> cut(
        words.begin(),
        words.begin() + static_cast<ptrdiff_t>(random() % words.size()));
    EXPECT_FALSE(decode(cut).ok());
  }
}

// A reader would take the new state for the one that it began to read.
TEST(StateSegment, ANumberIsNotUsedAgain) {
  const ShmDir dir;
  const std::string path = dir / "s";
  StateSegment::Committed first;
  {
    auto s = make(path, 10);
    s->begin(0);
    first = s->commit(info_of(7, 10));
  }
  ASSERT_OK_AND(const auto reader, StateSegment::open(path, kJob, Mode::kRead));
  EXPECT_TRUE(reader->is_valid(first));
  for (const bool commits : {false, true}) {
    ASSERT_OK_AND(auto s, StateSegment::open(path, kJob, Mode::kWrite));
    s->begin(0);
    if (commits) s->commit(info_of(8, 10));
    EXPECT_FALSE(reader->is_valid(first));
  }
  EXPECT_EQ(reader->contents().states.size(), 1U);
}

TEST(StateSegment, EveryReaderFindsWhatWasCommitted) {
  const ShmDir dir;
  const std::string path = dir / "s";
  {
    auto s = make(path, 1000);
    EXPECT_TRUE(s->contents().states.empty());
    s->begin(0);
    fill(s->write(0, 1000), info_of(7, 1000));
    EXPECT_TRUE(s->contents().states.empty());
    s->commit(info_of(7, 1000));
    s->begin(1);
    fill(s->write(1, 900), info_of(8, 900));
    s->commit(info_of(8, 900));
  }
  ASSERT_OK_AND(const auto s, StateSegment::open(path, kJob, Mode::kRead));
  const auto c = s->contents();
  ASSERT_EQ(c.states.size(), 2U);
  EXPECT_EQ(c.states[0].info, info_of(8, 900));
  EXPECT_EQ(c.states[1].info, info_of(7, 1000));
  EXPECT_EQ(newest_step(*s), 8);
  EXPECT_EQ(s->capacity(), 1000);
  struct stat st {};
  ASSERT_EQ(stat(path.c_str(), &st), 0);
  EXPECT_EQ(static_cast<uint64_t>(st.st_size), segment_bytes(1000));
  EXPECT_EQ(st.st_mode & 0777, 0600U);
}

TEST(StateSegment, ABufferBeingWrittenHasNoRecord) {
  const ShmDir dir;
  auto s = make(dir / "s", 10);
  s->begin(0);
  const auto first = s->commit(info_of(1, 10));
  s->begin(1);
  s->commit(info_of(2, 10));
  EXPECT_TRUE(s->is_valid(first));
  s->begin(0);
  EXPECT_FALSE(s->is_valid(first));
  ASSERT_EQ(s->contents().states.size(), 1U);
  EXPECT_EQ(s->contents().states[0].info.step, 2);
}

// A generation reuses a state in place: both records are valid until a third is
// written, and at every instant there is a valid one.
TEST(StateSegment, AStateCanBeRedescribed) {
  const ShmDir dir;
  auto s = make(dir / "s", 10);
  s->begin(0);
  const auto old = s->commit(info_of(5, 10));
  StateInfo info = info_of(5, 10);
  info.generation = 4;
  info.rank = 0;
  const auto taken = s->redescribe(old, info);
  EXPECT_TRUE(s->is_valid(old));
  EXPECT_TRUE(s->is_valid(taken));
  ASSERT_EQ(s->contents().states.size(), 2U);
  EXPECT_EQ(s->contents().states[0].info.generation, 4);
  // Generation 4 failed; 5 starts from what 3 left.
  info.generation = 5;
  const auto again = s->redescribe(old, info);
  EXPECT_TRUE(s->is_valid(old));
  EXPECT_FALSE(s->is_valid(taken));
  EXPECT_TRUE(s->is_valid(again));
  // 6 starts from the record of 5.
  info.generation = 6;
  s->redescribe(again, info);
  EXPECT_FALSE(s->is_valid(old));
  EXPECT_TRUE(s->is_valid(again));
  s->begin(0);
  EXPECT_TRUE(s->contents().states.empty());
}

// Sequence numbers continue after the file is reopened.
TEST(StateSegment, TheNewestCommitIsTheNewestAfterReopening) {
  const ShmDir dir;
  make(dir / "s", 4);
  for (int step = 1; step < 6; ++step) {
    ASSERT_OK_AND(auto s, StateSegment::open(dir / "s", kJob, Mode::kWrite));
    s->begin(step % 2);
    s->commit(info_of(step, 4));
    ASSERT_EQ(s->contents().states[0].info.step, step);
  }
}

TEST(StateSegment, OneWriterAtATime) {
  const ShmDir dir;
  auto s = make(dir / "s", 4);
  const auto second = StateSegment::open(dir / "s", kJob, Mode::kWrite);
  EXPECT_EQ(second.status().code(), Code::kUnavailable);
  EXPECT_OK(StateSegment::open(dir / "s", kJob, Mode::kRead));
  s.reset();
  EXPECT_OK(StateSegment::open(dir / "s", kJob, Mode::kWrite));
}

TEST(StateSegment, ContentIsVerifiedWhenItHasAHash) {
  const ShmDir dir;
  auto s = make(dir / "s", 100);
  s->begin(0);
  StateInfo info = info_of(3, 100);
  fill(s->write(0, 100), info);
  info.content = content_hash(s->read(0, 100));
  const auto c = s->commit(info);
  EXPECT_OK(s->verify_content(c));
  for (size_t v = 0; v < geometry::kNumStateVectors; ++v) {
    float& x = s->write(0, 100)[v][99];
    const float kept = x;
    x = -x;
    EXPECT_EQ(s->verify_content(c).code(), Code::kCorrupt);
    x = kept;
  }
}

void flip(const std::string& path, int64_t at) {
  std::fstream f(path, std::ios::in | std::ios::out | std::ios::binary);
  f.seekg(at);
  const char c = static_cast<char>(f.get() ^ 0x10);
  f.seekp(at);
  f.put(c);
}

// Every byte of the header is damaged in turn: a reader finds what was
// committed or less, never anything else.
TEST(StateSegment, HeaderDamageIsFound) {
  const ShmDir dir;
  const std::string path = dir / "s";
  int64_t header = 0;
  {
    auto s = make(path, 0);
    header = static_cast<int64_t>(s->bytes());
    s->begin(0);
    s->commit(info_of(1, 0));
    s->begin(1);
    s->commit(info_of(2, 0));
  }
  int refused = 0, damaged = 0;
  for (int64_t at = 0; at < header; ++at) {
    flip(path, at);
    const auto s = StateSegment::open(path, kJob, Mode::kRead);
    if (!s.ok()) {
      ++refused;
      EXPECT_FALSE(s.status().message().empty());
    } else {
      const auto c = (*s)->contents();
      damaged += static_cast<int>(c.damaged.size());
      for (const auto& state : c.states)
        ASSERT_TRUE(state.info == info_of(1, 0) || state.info == info_of(2, 0))
            << "byte " << at << ": " << to_string(state.info);
    }
    flip(path, at);
  }
  EXPECT_EQ(refused, 48);  // magic to checksum
  EXPECT_GT(damaged, 2 * 8 * 20);
}

TEST(StateSegment, AnotherSizeJobOrKindIsRefused) {
  const ShmDir dir;
  const std::string path = dir / "s";
  const uint64_t bytes = make(path, 5000)->bytes();
  const auto code = [&](uint64_t job) {
    return StateSegment::open(path, job, Mode::kRead).status().code();
  };
  EXPECT_EQ(code(kJob), Code::kOk);
  EXPECT_EQ(code(kJob + 1), Code::kInvalidArgument);
  for (const uint64_t size : {uint64_t{0}, uint64_t{100}, bytes / 2, bytes - 1,
                              bytes + 1, 2 * bytes}) {
    ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(size)), 0);
    EXPECT_EQ(code(kJob), Code::kCorrupt) << size;
  }
  ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(bytes)), 0);
  const std::string link = dir / "link";
  ASSERT_EQ(symlink(path.c_str(), link.c_str()), 0);
  EXPECT_FALSE(StateSegment::open(link, kJob, Mode::kRead).ok());
  EXPECT_EQ(StateSegment::open(dir.path(), kJob, Mode::kRead).status().code(),
            Code::kInvalidArgument);
  EXPECT_EQ(StateSegment::open(dir / "none", kJob, Mode::kRead).status().code(),
            Code::kNotFound);
}

TEST(StateSegment, AnotherUsersFilesAreNotRead) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  constexpr uid_t kOther = 12345;
  const ShmDir dir;
  const std::string path = dir / "s";
  make(path, 4);
  ASSERT_EQ(chown(path.c_str(), kOther, kOther), 0);
  EXPECT_EQ(StateSegment::open(path, kJob, Mode::kRead).status().code(),
            Code::kInvalidArgument);
  const std::string mine = dir / (shared_folder_prefix() + "x");
  std::filesystem::create_directory(mine);
  EXPECT_EQ(state_folders(dir.path()),
            std::vector<std::string>{mine + "/state"});
  ASSERT_EQ(chown(mine.c_str(), kOther, kOther), 0);
  EXPECT_TRUE(state_folders(dir.path()).empty());
}

TEST(StateSegment, CreateDoesNotReplaceAFile) {
  const ShmDir dir;
  auto s = make(dir / "s", 4);
  s->begin(0);
  s->commit(info_of(1, 4));
  EXPECT_EQ(StateSegment::create(dir / "s", kJob, 4).status().code(),
            Code::kAlreadyExists);
  EXPECT_EQ(s->contents().states.size(), 1U);
  EXPECT_FALSE(std::filesystem::exists(dir / "s.new"));
}

TEST(StateSegment, TooLittleSharedMemoryIsReportedWithNumbers) {
  const ShmDir dir;
  const int64_t huge = int64_t{1} << 42;
  const auto s = StateSegment::create(dir / "s", kJob, huge);
  EXPECT_EQ(s.status().code(), Code::kExhausted);
  EXPECT_SAYS(s, std::to_string(segment_bytes(huge)));
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

// Half of a segment is of use at once; a buffer that is given back takes no
// memory, and its state is gone.
TEST(StateSegment, ABufferCanBeFreed) {
  const ShmDir dir;
  const std::string path = segment_path(dir.path(), kJob, 0);
  constexpr int64_t kElements = 300'000;
  const auto allocated = [&] {
    struct stat st {};
    EXPECT_EQ(stat(path.c_str(), &st), 0);
    return static_cast<uint64_t>(st.st_blocks) * 512;
  };
  ASSERT_OK_AND(auto made, StateSegment::create(path, kJob, kElements,
                                                StateSegment::Extent::kHalf));
  EXPECT_EQ(allocated(), half_segment_bytes(kElements));
  ASSERT_OK(made->complete());
  EXPECT_EQ(allocated(), segment_bytes(kElements));
  for (const int buffer : {0, 1}) {
    made->begin(buffer);
    made->write(buffer, kElements).weights[7] = static_cast<float>(buffer + 1);
    (void)made->commit(info_of(buffer + 1, kElements));
  }
  EXPECT_EQ(StateSegment::free_buffer(path, kJob, 0).code(), Code::kUnavailable)
      << "its owner is alive";
  made.reset();
  ASSERT_OK(StateSegment::free_buffer(path, kJob, 0));
  EXPECT_LT(allocated(), segment_bytes(kElements) * 6 / 10);
  ASSERT_OK_AND(const auto read,
                StateSegment::open(path, kJob, StateSegment::Mode::kRead));
  const auto contents = read->contents();
  ASSERT_EQ(contents.states.size(), 1U);
  EXPECT_EQ(contents.states[0].info.step, 2);
  EXPECT_EQ(read->read(1, kElements).weights[7], 2.0F);
  const auto again = StateSegment::open(path, kJob, StateSegment::Mode::kWrite);
  ASSERT_OK(again);
  EXPECT_EQ(allocated(), segment_bytes(kElements));
}

// What smaps says of the mapping of `path`, in KiB.
int64_t mapped_kib(const std::string& path, const std::string& key) {
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find(" rw-s ") != line.npos) here = line.ends_with(path);
    if (here && line.starts_with(key + ":"))
      return std::stoll(line.substr(key.size() + 1));
  }
  return 0;
}

// Also where /dev/shm is mounted without them.
TEST(StateSegment, HasHugePagesIfTheKernelHas) {
  constexpr uint64_t kHugePage = 2 << 20;
  constexpr int kCollapse = 25;
  const ShmDir dir;
  const std::string path = segment_path(dir.path(), kJob, 0);
  ASSERT_OK_AND(auto made, StateSegment::create(path, kJob, 2'000'000));
  made->begin(1);
  float* const weights = made->write(1, 2'000'000).weights.data();
  const uint64_t before =
      kHugePage - reinterpret_cast<uintptr_t>(weights) % kHugePage;
  if (madvise(weights + before / sizeof(float), kHugePage, kCollapse) != 0)
    GTEST_SKIP() << "the kernel makes no huge pages of shared memory";
  EXPECT_GT(mapped_kib(path, "ShmemPmdMapped"), mapped_kib(path, "Size") / 2);
}

TEST(StateSegment, SizeIsAHeaderAndTwoBuffers) {
  for (const int64_t n : {0, 1, 1000, 1024, 1025, 1 << 20}) {
    const uint64_t data = 6 * static_cast<uint64_t>(n) * 4;
    EXPECT_GE(segment_bytes(n), data);
    EXPECT_LE(segment_bytes(n), data + (4 << 20));
    EXPECT_GE(segment_bytes(n + 1), segment_bytes(n));
  }
}

TEST(SegmentDirectory, ListsAndRemovesOnlyTheFilesOfTheJob) {
  const ShmDir dir;
  EXPECT_EQ(free_number(dir.path(), kJob), 0);
  for (const int n : {0, 1, 3})
    ASSERT_OK(StateSegment::create(segment_path(dir.path(), kJob, n), kJob, 8));
  ASSERT_OK(StateSegment::create(segment_path(dir.path(), 9, 0), 9, 8));
  const std::vector<std::string> foreign = {"other",
                                            "state-",
                                            "state-0000000000001234",
                                            "state-0000000000001234-x",
                                            "state-0000000000001234-1x",
                                            "state-0000000000001234--1"};
  for (const std::string& name : foreign) std::ofstream(dir / name) << "x";
  std::ofstream(segment_path(dir.path(), kJob, 2) + ".new") << "x";
  EXPECT_EQ(list_jobs(dir.path()), (std::vector<uint64_t>{9, kJob}));
  EXPECT_TRUE(list_jobs(dir / "none").empty());
  const auto files = list_segments(dir.path(), kJob);
  ASSERT_EQ(files.size(), 3U);
  EXPECT_EQ(files[2].number, 3);
  EXPECT_EQ(files[2].bytes, segment_bytes(8));
  EXPECT_EQ(free_number(dir.path(), kJob), 4);
  EXPECT_EQ(remove_unfinished(dir.path(), kJob), 1);
  EXPECT_EQ(free_number(dir.path(), kJob), 2);
  EXPECT_EQ(remove_segments(dir.path(), kJob), 3);
  EXPECT_TRUE(list_segments(dir.path(), kJob).empty());
  EXPECT_EQ(list_segments(dir.path(), 9).size(), 1U);
  for (const std::string& name : foreign)
    EXPECT_TRUE(std::filesystem::exists(dir / name)) << name;
  EXPECT_TRUE(list_segments(dir / "none", kJob).empty());
}

TEST(StateSegment, KnowsWhenItsFileWasRemoved) {
  const ShmDir dir;
  const std::string path = segment_path(dir.path(), kJob, 0);
  const auto s = make(path, 10);
  EXPECT_OK(s->check_kept());
  ASSERT_EQ(unlink(path.c_str()), 0);
  EXPECT_SAYS(s->check_kept(), "enable-linger");
}

}  // namespace
}  // namespace remesh::memory
