#include "coordinator/rundir/known_runs.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "coordinator/rundir/line_file.h"
#include "coordinator/rundir/run_dir.h"
#include "proto/base/entries.h"
#include "proto/base/file_system.h"
#include "proto/base/process.h"

namespace remesh::rundir {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostRuns = 1000;

std::string list_path() {
  const std::string folder = user_state_folder();
  return folder.empty() ? "" : folder + "/runs";
}

}  // namespace

void note_run(const std::string& run) {
  const std::string path = list_path();
  if (path.empty() || run.find('\n') != std::string::npos) return;
  std::error_code ignored;
  fs::create_directories(fs::path(path).parent_path(), ignored);
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;
  // Nobody waits for a home directory that does not answer.
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
    std::vector<std::string> lines = read_lines(path);
    std::erase(lines, real_path(run));
    lines.push_back(real_path(run));
    if (lines.size() > kMostRuns)
      lines.erase(lines.begin(), lines.end() - kMostRuns);
    std::string text;
    for (const std::string& line : lines) text += line + "\n";
    if (pwrite(fd, text.data(), text.size(), 0) ==
        static_cast<ssize_t>(text.size()))
      (void)!ftruncate(fd, static_cast<off_t>(text.size()));
  }
  close(fd);
}

std::vector<std::string> known_runs() {
  std::vector<std::string> out;
  if (const std::string path = list_path(); !path.empty())
    for (const std::string& run : read_lines(path))
      if (is_run(run)) out.push_back(run);
  std::vector<std::string> here;
  for (const fs::path& path : entries_of("runs"))
    if (is_run(path.string())) here.push_back(real_path(path.string()));
  std::sort(here.begin(), here.end());
  for (std::string& run : here)
    if (std::ranges::count(out, run) == 0) out.push_back(std::move(run));
  return out;
}

std::vector<std::string> live_runs() {
  std::vector<std::string> out = known_runs();
  std::erase_if(
      out, [](const std::string& run) { return RunLock::holder(run) == 0; });
  return out;
}

}  // namespace remesh::rundir
