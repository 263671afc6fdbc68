#include "worker/agent/shell/state_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <limits>
#include <set>

#include "checkpoint/manifest/conversions.h"
#include "checkpoint/memory/segment.h"
#include "checkpoint/memory/segment_directory.h"
#include "proto/base/text.h"

namespace remesh::agent {
namespace {

// Seconds since any of the job's segments was touched. A clock that was set
// back must not keep them forever, hence the absolute value.
int64_t age_of(const std::string& folder, uint64_t job) {
  const time_t now = time(nullptr);
  int64_t age = std::numeric_limits<int64_t>::max();
  for (const memory::SegmentFile& f : memory::list_segments(folder, job)) {
    struct stat st {};
    if (stat(f.path.c_str(), &st) == 0)
      age = std::min<int64_t>(age, std::abs(now - st.st_mtime));
  }
  return age;
}

std::vector<uint64_t> old_jobs(const std::string& folder, uint64_t but) {
  std::vector<uint64_t> out;
  for (const uint64_t job : memory::list_jobs(folder))
    if (job != but && age_of(folder, job) > kStateKeptS) out.push_back(job);
  return out;
}

// How long the machine slept since it was started, when no daemon could touch
// anything.
int64_t slept_s() {
  timespec with{}, without{};
  clock_gettime(CLOCK_BOOTTIME, &with);
  clock_gettime(CLOCK_MONOTONIC, &without);
  return with.tv_sec - without.tv_sec;
}

}  // namespace

InventoryTaken take_inventory(const std::string& folder, uint64_t job) {
  InventoryTaken out;
  out.job = job;
  memory::remove_unfinished(folder, job);
  for (const memory::SegmentFile& f : memory::list_segments(folder, job)) {
    const auto segment = memory::StateSegment::open(
        f.path, job, memory::StateSegment::Mode::kRead);
    if (!segment.ok()) {
      // NotFound: it was removed since it was listed, such as by a rank of
      // another worker that needed its room.
      if (segment.status().code() != Code::kNotFound)
        out.damaged.push_back(segment.status().message());
      continue;
    }
    memory::StateSegment::Contents contents = (*segment)->contents();
    for (const auto& c : contents.states)
      out.holdings.push_back(manifest::holding_of(c.info, f.path));
    for (std::string& d : contents.damaged) out.damaged.push_back(std::move(d));
  }
  return out;
}

std::string describe_states(const std::string& folder, uint64_t job,
                            const InventoryTaken& inventory) {
  uint64_t bytes = 0;
  const auto files = memory::list_segments(folder, job);
  for (const memory::SegmentFile& f : files) bytes += f.bytes;
  std::set<int64_t> steps;
  for (const pb::StateHolding& h : inventory.holdings) steps.insert(h.step());
  return fmt::format("{} states in {} segments ({}){}{}",
                     inventory.holdings.size(), files.size(),
                     format_bytes(bytes), steps.empty() ? "" : ": steps ",
                     fmt::join(steps, ", "));
}

bool has_states(const std::string& folder) {
  return !memory::list_jobs(folder).empty();
}

uint64_t bytes_of_others(const std::string& folder, uint64_t job) {
  uint64_t bytes = 0;
  for (const uint64_t other : memory::list_jobs(folder)) {
    if (other == job) continue;
    for (const memory::SegmentFile& f : memory::list_segments(folder, other))
      bytes += f.bytes;
  }
  return bytes;
}

bool has_old_states(const std::string& folder) {
  return !old_jobs(folder, /*but=*/0).empty();
}

int refresh_states(const std::string& folder, uint64_t job) {
  for (const memory::SegmentFile& f : memory::list_segments(folder, job))
    utimensat(AT_FDCWD, f.path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
  int removed = 0;
  for (const uint64_t old : old_jobs(folder, job))
    removed += memory::remove_segments(folder, old);
  return removed;
}

int64_t age_of_states(const std::string& folder) {
  int64_t age = std::numeric_limits<int64_t>::max();
  for (const uint64_t job : memory::list_jobs(folder))
    age = std::min(age, age_of(folder, job));
  return age;
}

int remove_unclaimed_states(const std::string& folder, int64_t limit_s) {
  const int64_t limit = limit_s < 0 ? limit_s : limit_s + slept_s();
  int removed = 0;
  for (const uint64_t job : memory::list_jobs(folder)) {
    if (age_of(folder, job) <= limit) continue;
    for (const memory::SegmentFile& f : memory::list_segments(folder, job))
      removed += memory::remove_unused(f.path) ? 1 : 0;
  }
  return removed;
}

}  // namespace remesh::agent
