#include "bench/memory/peak_memory.h"

#include <dirent.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <utility>

#include "tests/testing/process.h"

namespace remesh::bench {
namespace {

constexpr auto kPause = std::chrono::milliseconds(2);
// Looking for new ranks takes longer than reading what they use, and a rank
// starts MPI, which takes longer still, before it needs memory.
constexpr int kRoundsPerSearch = 15;
constexpr uint64_t kStatBlock = 512;

std::vector<pid_t> ranks_with(const std::string& mark) {
  std::vector<pid_t> out;
  for (const testing::Seen& p : testing::processes_with(mark))
    if (p.command.find("remesh-trainer") != std::string::npos)
      out.push_back(p.pid);
  return out;
}

// 0 if the process has ended.
uint64_t private_bytes(pid_t pid) {
  std::ifstream in(fmt::format("/proc/{}/statm", pid));
  uint64_t size = 0, resident = 0, not_private = 0;
  if (!(in >> size >> resident >> not_private)) return 0;
  return (resident - not_private) * static_cast<uint64_t>(getpagesize());
}

// Of the files in a folder; without exceptions, because files and folder may
// vanish at any time.
uint64_t bytes_in(const std::string& folder) {
  DIR* const dir = opendir(folder.c_str());
  if (dir == nullptr) return 0;
  uint64_t sum = 0;
  while (const dirent* e = readdir(dir)) {
    struct stat s {};
    if (fstatat(dirfd(dir), e->d_name, &s, 0) == 0 && S_ISREG(s.st_mode))
      sum += static_cast<uint64_t>(s.st_blocks) * kStatBlock;
  }
  closedir(dir);
  return sum;
}

}  // namespace

HostMemory::HostMemory(std::string mark, std::vector<std::string> folders)
    : mark_(std::move(mark)),
      folders_(std::move(folders)),
      thread_([this](const std::stop_token& stop) { watch(stop); }) {}

HostPeak HostMemory::take() {
  const HostPeak now = look(ranks_with(mark_));
  const std::lock_guard lock(mutex_);
  const HostPeak peak = std::exchange(peak_, {});
  return now.total > peak.total ? now : peak;
}

HostPeak HostMemory::look(const std::vector<pid_t>& ranks) const {
  HostPeak now{.shared = shared()};
  now.total = now.shared;
  for (const pid_t pid : ranks) now.total += private_bytes(pid);
  return now;
}

uint64_t HostMemory::shared() const {
  uint64_t sum = 0;
  for (const std::string& f : folders_) sum += bytes_in(f);
  return sum;
}

void HostMemory::watch(const std::stop_token& stop) {
  std::vector<pid_t> ranks;
  for (int round = 0; !stop.stop_requested(); ++round) {
    if (round % kRoundsPerSearch == 0) ranks = ranks_with(mark_);
    const HostPeak now = look(ranks);
    {
      const std::lock_guard lock(mutex_);
      if (now.total > peak_.total) peak_ = now;
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace remesh::bench
