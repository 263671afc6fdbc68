#include "worker/agent/shell/rank_logs.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <vector>

#include "proto/base/descriptor.h"
#include "proto/base/entries.h"
#include "proto/base/file_system.h"
#include "proto/rundir/file_tail.h"
#include "proto/rundir/paths.h"

namespace remesh::agent {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kTailBytes = 16 << 10;

// Another member of the group may have put a link in the place of a file, or of
// its folder. Returns the descriptor, or -1.
int open_no_link(const std::string& path, int flags) {
  const Descriptor folder(
      ::open(parent_path(path).c_str(),
             O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (folder.get() < 0) return -1;
  const std::string name = fs::path(path).filename().string();
  return ::openat(folder.get(), name.c_str(), flags | O_NOFOLLOW | O_CLOEXEC,
                  0666);
}

// Who may read the events of the run need not be allowed to read what a link
// leads to. Nobody writes to a pipe.
std::string tail_of(const std::string& path) {
  const Descriptor fd(open_no_link(path, O_RDONLY | O_NONBLOCK));
  struct stat st {};
  if (fstat(fd.get(), &st) != 0 || !S_ISREG(st.st_mode)) return "";
  return rundir::read_tail(fmt::format("/proc/self/fd/{}", fd.get()),
                           kTailBytes);
}

// A line without control characters and white space around it, truncated.
std::string clean_line(std::string_view text, size_t max_bytes) {
  std::string line;
  for (char c : text)
    if (static_cast<unsigned char>(c) >= 0x20 && c != 0x7f)
      line.push_back(c);
    else if (c == '\t')
      line.push_back(' ');
  const size_t first = line.find_first_not_of(' ');
  line = first == std::string::npos ? "" : line.substr(first);
  while (!line.empty() && line.back() == ' ') line.pop_back();
  if (line.size() <= max_bytes) return line;
  // Do not split a UTF-8 character.
  size_t end = max_bytes;
  while (end > 0 && (static_cast<unsigned char>(line[end]) & 0xC0) == 0x80)
    --end;
  return line.substr(0, end);
}

// Whether the rank printed to stdout or stderr after it last logged.
bool printed_last(const RankLogPaths& paths) {
  std::error_code log_error, out_error;
  const auto log_time = fs::last_write_time(paths.log, log_error);
  const auto out_time = fs::last_write_time(paths.out, out_error);
  return log_error || (!out_error && out_time >= log_time);
}

}  // namespace

RankOutputs::~RankOutputs() {
  for (const auto& [rank, fd] : fds_) close(fd);
}

Status RankOutputs::open(const std::string& folder,
                         const std::vector<int>& ranks) {
  std::error_code error;
  // A run directory that is gone is not made again.
  const fs::path run = fs::path(folder).parent_path().parent_path();
  if (fs::is_directory(run, error))
    fs::create_directories(folder, error);
  else if (!error)
    error = std::make_error_code(std::errc::no_such_file_or_directory);
  for (const int rank : ranks) {
    if (error) break;
    const int fd = open_no_link(rank_log_paths(folder, rank).out,
                                O_WRONLY | O_CREAT | O_TRUNC | O_APPEND);
    if (fd < 0) error.assign(errno, std::system_category());
    if (fd >= 0) fds_[rank] = fd;
  }
  if (!error || error == std::errc::no_space_on_device ||
      error.value() == EDQUOT)
    return ok_status();
  return io_error(folder + ": " + error.message() +
                  " (the run directory must be reachable by every worker)");
}

int RankOutputs::fd(int rank) const {
  const auto it = fds_.find(rank);
  return it == fds_.end() ? -1 : it->second;
}

void remove_old_logs(const std::string& run_dir, int64_t generation, int keep) {
  std::vector<std::pair<int64_t, fs::path>> old;
  for (const fs::path& path : entries_of(rundir::logs_path(run_dir))) {
    const auto g = rundir::parse_rank_logs_name(path.filename().string());
    if (g && *g < generation) old.emplace_back(*g, path);
  }
  std::sort(old.begin(), old.end());
  std::error_code ignored;
  for (size_t i = 0; i + static_cast<size_t>(keep) <= old.size(); ++i)
    fs::remove_all(old[i].second, ignored);
}

RankLogPaths rank_log_paths(const std::string& folder, int rank) {
  return {fmt::format("{}/rank-{}.log", folder, rank),
          fmt::format("{}/rank-{}.out", folder, rank)};
}

std::vector<std::string> last_lines(std::string_view text, size_t lines,
                                    size_t max_bytes) {
  std::vector<std::string> out;
  while (!text.empty() && out.size() < lines) {
    const size_t cut = text.find_last_of('\n');
    const bool first = cut == std::string_view::npos;
    std::string line =
        clean_line(first ? text : text.substr(cut + 1), max_bytes);
    if (!line.empty()) out.push_back(std::move(line));
    text = first ? "" : text.substr(0, cut);
  }
  return out;
}

std::vector<std::string> log_tail(const RankLogPaths& paths, size_t lines,
                                  size_t max_bytes) {
  const std::string log = tail_of(paths.log);
  const std::string printed = tail_of(paths.out);
  const bool last = printed_last(paths);
  std::vector<std::string> out =
      last_lines(last ? printed : log, lines, max_bytes);
  for (std::string& line :
       last_lines(last ? log : printed, lines - out.size(), max_bytes))
    out.push_back(std::move(line));
  std::reverse(out.begin(), out.end());
  return out;
}

}  // namespace remesh::agent
