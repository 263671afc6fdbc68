// Per-block checksums, and files written with direct I/O, compared with the
// straightforward implementation.
#include "checkpoint/store/blocks.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <random>
#include <string>
#include <thread>

#include "tests/testing/expect.h"
#include "tests/testing/memory_file_system.h"
#include "tests/testing/temp_dir.h"

namespace remesh::store {
namespace {

constexpr uint64_t kSeed = 31;

std::span<const std::byte> bytes_of(const std::string& s) {
  return std::as_bytes(std::span(s.data(), s.size()));
}

std::string random_text(size_t n, std::mt19937_64& rng) {
  std::string s(n, '\0');
  for (char& c : s) c = static_cast<char>(rng());
  return s;
}

// In pieces of any size.
Status write_blocks(FileSystem& fs, const std::string& path,
                    const std::string& data, uint64_t block_bytes,
                    std::mt19937_64& rng, pb::ShardFile& shard) {
  ASSIGN_OR_RETURN(const auto file, fs.create(path));
  BlockWriter out(*file, block_bytes);
  for (size_t at = 0; at < data.size();) {
    const size_t most = rng() % 4 == 0 ? 200000 : 300;
    const size_t n = std::min<size_t>(rng() % most, data.size() - at);
    RETURN_IF_ERROR(out.append(bytes_of(data).subspan(at, n)));
    at += n;
  }
  return out.finish(shard);
}

TEST(Blocks, OnePassAndReadingBackGiveTheSame) {
  std::mt19937_64 rng(kSeed);
  for (int trial = 0; trial < 60; ++trial) {
    MemoryFileSystem fs;
    const uint64_t block = trial % 2 == 0 ? 64 + rng() % 1000 : 1 << 18;
    const std::string data = random_text(rng() % 900000, rng);
    pb::ShardFile one, two;
    ASSERT_OK(write_blocks(fs, "one", data, block, rng, one));
    ASSERT_OK(write_file(fs, "two", data));
    ASSERT_OK(append_sums(**fs.open("two"), data.size(), two, block));
    EXPECT_EQ(one.SerializeAsString(), two.SerializeAsString());
    const std::string a = *read_file(fs, "one", 1 << 30);
    EXPECT_EQ(a, *read_file(fs, "two", 1 << 30));
    EXPECT_EQ(a.size(), one.bytes());
    EXPECT_EQ(a.substr(0, data.size()), data);
    ASSERT_OK_AND(const auto bad, find_bad_blocks(fs, "one", one));
    EXPECT_TRUE(bad.empty());
  }
}

TEST(Blocks, OnlyTheBlocksReadAreVerified) {
  std::mt19937_64 rng(kSeed);
  constexpr uint64_t kBlock = 1000;
  MemoryFileSystem fs;
  const std::string data = random_text(87654, rng);
  pb::ShardFile shard;
  ASSERT_OK(write_blocks(fs, "f", data, kBlock, rng, shard));
  const std::string good = *read_file(fs, "f", 1 << 30);
  for (int trial = 0; trial < 300; ++trial) {
    const size_t hit = rng() % data.size();
    std::string text = good;
    text[hit] = static_cast<char>(text[hit] ^ 8);
    ASSERT_OK(write_file(fs, "f", text));
    const auto bad = find_bad_blocks(fs, "f", shard);
    ASSERT_EQ(bad->size(), 1U);
    EXPECT_LE((*bad)[0].begin, hit);
    EXPECT_GT((*bad)[0].end, hit);
    ASSERT_OK_AND(const auto file,
                  open_verified(fs.open("f").value(), "f", shard));
    EXPECT_EQ(*file->size(), data.size());
    for (int k = 0; k < 30; ++k) {
      const size_t begin = rng() % data.size();
      const size_t n = rng() % std::min<size_t>(data.size() - begin + 1,
                                                k % 2 == 0 ? 90000 : 50);
      std::string out(n, '\0');
      const Status s = file->read_at(
          begin, std::as_writable_bytes(std::span(out.data(), n)));
      const bool touched = n > 0 && begin / kBlock <= hit / kBlock &&
                           (begin + n - 1) / kBlock >= hit / kBlock;
      EXPECT_EQ(s.ok(), !touched) << begin << " " << n << " " << hit;
      if (s.ok()) {
        EXPECT_EQ(out, data.substr(begin, n));
      } else {
        EXPECT_SAYS(s, "f: bytes");
      }
    }
  }
}

class StreamedTest : public testing::Test {
 protected:
  const TempDir dir_;
  const std::unique_ptr<FileSystem> fs_ = posix_file_system();
};

TEST_F(StreamedTest, HoldsWhatWasWrittenForAnySequenceOfCalls) {
  std::mt19937_64 rng(kSeed);
  for (int trial = 0; trial < 12; ++trial) {
    const std::string path = dir_ / "f" + std::to_string(trial);
    std::string want;
    {
      // Room for little, or for all of it.
      ASSERT_OK_AND(
          const auto file,
          fs_->create_streamed(
              path, {.room = trial % 2 == 0 ? 0 : uint64_t{1} << 40}));
      // Up to several buffers, and an end of any length.
      const size_t size = trial < 3 ? trial * 5000 : rng() % (20 << 20);
      while (want.size() < size) {
        const std::string part = random_text(
            std::min(size - want.size(), 1 + rng() % (3 << 20)), rng);
        ASSERT_OK(file->write_at(want.size(), bytes_of(part)));
        want += part;
      }
      if (trial % 3 == 1 && want.size() > 10) {
        // Not in order, and reading: allowed too.
        ASSERT_OK(file->write_at(3, bytes_of("abc")));
        want.replace(3, 3, "abc");
        std::string back(7, '\0');
        ASSERT_OK(file->read_at(
            0, std::as_writable_bytes(std::span(back.data(), 7))));
        EXPECT_EQ(back, want.substr(0, 7));
        ASSERT_OK(file->write_at(want.size(), bytes_of("end")));
        want += "end";
      }
      EXPECT_EQ(*file->size(), want.size());
      ASSERT_OK(file->sync());
      ASSERT_OK(file->close());
    }
    ASSERT_OK_AND(const auto back, read_file(*fs_, path, 1 << 30));
    EXPECT_TRUE(back == want) << trial;
  }
}

TEST_F(StreamedTest, ReportsAFailureNoLaterThanSync) {
  std::mt19937_64 rng(kSeed);
  const std::string part = random_text(1 << 20, rng);
  rlimit old = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  rlimit small = old;
  small.rlim_cur = 10 << 20;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  Status status;
  {
    const auto file = fs_->create_streamed(dir_ / "f");
    for (uint64_t i = 0; status.ok() && i < 64; ++i)
      status = (*file)->write_at(i * part.size(), bytes_of(part));
    if (status.ok()) status = (*file)->sync();
    // The failure is permanent.
    EXPECT_FALSE((*file)->sync().ok());
  }
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_FALSE(status.ok());
  EXPECT_SAYS(status, dir_ / "f");
}

TEST_F(StreamedTest, FailsSoonWithTheReasonWhenCancelled) {
  std::atomic<bool> give_up{false};
  std::atomic<int> moved{0};
  const std::string part(3 << 20, 'x');
  const auto file =
      fs_->create_streamed(dir_ / "f", {.room = uint64_t{1} << 40,
                                        .give_up = &give_up,
                                        .moved = [&] { ++moved; }});
  uint64_t at = 0;
  for (; at < 8 * part.size(); at += part.size())
    ASSERT_OK((*file)->write_at(at, bytes_of(part)));
  give_up = true;
  Status written;
  for (int i = 0; i < 3 && written.ok(); ++i, at += part.size())
    written = (*file)->write_at(at, bytes_of(part));
  EXPECT_EQ(written.code(), Code::kCancelled) << written.to_string();
  EXPECT_EQ((*file)->sync().code(), Code::kCancelled);
  EXPECT_LE(moved, 8);
}

TEST_F(StreamedTest, IdlesAfterABufferUntilSomeoneWaits) {
  std::atomic<bool> hurry{false};
  std::atomic<int> moved{0};
  const std::string part(5 << 20, 'x');
  // Practically forever after the first.
  const auto file = fs_->create_streamed(dir_ / "f", {.room = uint64_t{1} << 40,
                                                      .moved = [&] { ++moved; },
                                                      .idle = 1e9,
                                                      .hurry = &hurry});
  uint64_t at = 0;
  for (; at < 8 * part.size(); at += part.size())
    ASSERT_OK((*file)->write_at(at, bytes_of(part)));
  while (moved == 0) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(moved, 1);
  hurry = true;
  ASSERT_OK((*file)->sync());
  EXPECT_GT(moved, 1);
  EXPECT_EQ(*fs_->size(dir_ / "f"), at);
}

TEST_F(StreamedTest, DoesNotIdleWhenCancelled) {
  std::atomic<bool> give_up{false};
  const std::string part(5 << 20, 'x');
  const auto file = fs_->create_streamed(
      dir_ / "f",
      {.room = uint64_t{1} << 40, .give_up = &give_up, .idle = 1e9});
  for (uint64_t at = 0; at < 3 * part.size(); at += part.size())
    ASSERT_OK((*file)->write_at(at, bytes_of(part)));
  give_up = true;
  EXPECT_EQ((*file)->sync().code(), Code::kCancelled);
}

TEST_F(StreamedTest, CanBeDestroyedUnfinished) {
  const std::string part(5 << 20, 'x');
  const auto file = fs_->create_streamed(dir_ / "f");
  ASSERT_OK((*file)->write_at(0, bytes_of(part)));
}

}  // namespace
}  // namespace remesh::store
