#include "checkpoint/memory/segment_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string_view>

#include "checkpoint/memory/segment.h"
#include "proto/base/descriptor.h"
#include "proto/base/entries.h"
#include "proto/base/file_system.h"
#include "proto/base/number.h"
#include "proto/base/text.h"

namespace remesh::memory {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kUnfinished = ".new";
constexpr std::string_view kStart = "state-";

std::string prefix(uint64_t job) {
  return fmt::format("{}{:016x}-", kStart, job);
}

struct Name {
  int number = 0;
  bool finished = true;
};

// Parses a file name of that job; number -1 if it is not one.
Name parse(std::string_view name, const std::string& prefix) {
  if (!name.starts_with(prefix)) return {.number = -1};
  name.remove_prefix(prefix.size());
  Name out;
  if (name.ends_with(kUnfinished)) {
    out.finished = false;
    name.remove_suffix(kUnfinished.size());
  }
  out.number = std::max(-1, parse_number<int>(name).value_or(-1));
  return out;
}

// Calls f(path, name) for each file of the job.
template <typename F>
void for_each(const std::string& folder, uint64_t job, const F& f) {
  const std::string start = prefix(job);
  for (const fs::path& p : entries_of(folder)) {
    const Name name = parse(p.filename().string(), start);
    if (name.number >= 0) f(p.string(), name);
  }
}

// Bytes left in the file system of `path`, which need not exist yet.
bool room_at(const std::string& path, uint64_t* left, uint64_t* all) {
  struct statvfs room {};
  const std::string folder = fs::path(path).parent_path().string();
  if (statvfs(folder.empty() ? "." : folder.c_str(), &room) != 0) return false;
  *left = static_cast<uint64_t>(room.f_bavail) * room.f_frsize;
  *all = static_cast<uint64_t>(room.f_blocks) * room.f_frsize;
  // A tmpfs without a limit reports 0 of 0.
  if (*all == 0) *left = std::numeric_limits<uint64_t>::max();
  return true;
}

}  // namespace

std::string shared_folder_prefix() {
  return fmt::format("remesh-{}-", geteuid());
}

bool is_private_folder(const std::string& path) {
  struct stat st {};
  return lstat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode) &&
         st.st_uid == geteuid() && (st.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

std::vector<std::string> state_folders(const std::string& shared) {
  std::vector<std::string> out;
  for (const fs::path& p : entries_of(shared))
    if (p.filename().string().starts_with(shared_folder_prefix()) &&
        is_private_folder(p.string()))
      out.push_back((p / "state").string());
  std::sort(out.begin(), out.end());
  return out;
}

std::string owner_file(const std::string& shared_root) {
  return shared_root + "/owner";
}

std::string owner_of(const std::string& state_folder) {
  std::ifstream in(owner_file(fs::path(state_folder).parent_path()));
  std::string owner;
  std::getline(in, owner);
  return owner;
}

bool may_live(const std::string& owner) {
  if (owner.empty()) return true;
  const Descriptor fd(open((owner + "/lock").c_str(),
                           O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (fd.get() < 0) return errno != ENOENT && errno != ENOTDIR;
  return flock(fd.get(), LOCK_SH | LOCK_NB) != 0;
}

std::string segment_path(const std::string& folder, uint64_t job, int number) {
  return fmt::format("{}/{}{}", folder, prefix(job), number);
}

std::vector<uint64_t> list_jobs(const std::string& folder) {
  std::vector<uint64_t> out;
  for (const fs::path& p : entries_of(folder)) {
    const std::string name = p.filename().string();
    if (!name.starts_with(kStart)) continue;
    const char* const digits = name.data() + kStart.size();
    uint64_t job = 0;
    (void)std::from_chars(digits, name.data() + name.size(), job, 16);
    if (parse(name, prefix(job)).number >= 0) out.push_back(job);
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

std::vector<SegmentFile> list_segments(const std::string& folder,
                                       uint64_t job) {
  std::vector<SegmentFile> out;
  for_each(folder, job, [&](const std::string& path, const Name& name) {
    std::error_code error;
    const uint64_t bytes = fs::file_size(path, error);
    if (name.finished && !error) out.push_back({path, name.number, bytes});
  });
  std::sort(out.begin(), out.end(),
            [](const SegmentFile& a, const SegmentFile& b) {
              return a.number < b.number;
            });
  return out;
}

int free_number(const std::string& folder, uint64_t job) {
  std::vector<int> taken;
  for_each(folder, job, [&](const std::string&, const Name& name) {
    taken.push_back(name.number);
  });
  std::sort(taken.begin(), taken.end());
  int n = 0;
  for (const int t : taken)
    if (t == n) ++n;
  return n;
}

int remove_segments(const std::string& folder, uint64_t job) {
  int removed = 0;
  for_each(folder, job, [&](const std::string& path, const Name&) {
    if (unlink(path.c_str()) == 0) ++removed;
  });
  return removed;
}

bool remove_unused(const std::string& path) {
  const Descriptor fd(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (fd.get() < 0) return false;
  // Locked while it is removed, so that no process opens it meanwhile. Since it
  // was opened, another process may have removed it and made one of that name.
  return flock(fd.get(), LOCK_EX | LOCK_NB) == 0 && is_at(fd.get(), path) &&
         unlink(path.c_str()) == 0;
}

int remove_unfinished(const std::string& folder, uint64_t job) {
  int removed = 0;
  for_each(folder, job, [&](const std::string& path, const Name& name) {
    if (!name.finished && unlink(path.c_str()) == 0) ++removed;
  });
  return removed;
}

Status check_room(const std::string& path, uint64_t bytes) {
  uint64_t left = 0, all = 0;
  if (room_at(path, &left, &all) && left < bytes)
    return short_of_room(path, bytes);
  return ok_status();
}

Status short_of_room(const std::string& path, uint64_t bytes) {
  uint64_t left = 0, all = 0;
  if (!room_at(path, &left, &all))
    return exhausted(fmt::format("{}: no room for {} ({} bytes)", path,
                                 format_bytes(bytes), bytes));
  return exhausted(fmt::format(
      "{}: needs {} ({} bytes) of shared memory; {} ({} bytes) of {} are free: "
      "make it larger (mount -o remount,size=..., docker run --shm-size) or "
      "run fewer ranks here",
      path, format_bytes(bytes), bytes, format_bytes(left), left,
      format_bytes(all)));
}

}  // namespace remesh::memory
