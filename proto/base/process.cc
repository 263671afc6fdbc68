#include "proto/base/process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <pwd.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

#include "proto/base/exit_code.h"
#include "proto/base/rng.h"

namespace remesh {

void begin_program() {
  // If it is ignored, the kernel reaps children, and nobody can wait for them.
  signal(SIGCHLD, SIG_DFL);
  int fd = 0;
  while (fd >= 0 && fd <= STDERR_FILENO) fd = open("/dev/null", O_RDWR);
  if (fd > STDERR_FILENO) close(fd);
}

int check_output(const char* program, int code) {
  const bool lost = std::fflush(stdout) != 0 || std::ferror(stdout) != 0;
  if (!lost || code != kExitOk) return code;
  std::fprintf(stderr, "%s: the standard output cannot be written\n", program);
  return kExitFailed;
}

std::string host_name() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0')
    return "localhost";
  return name;
}

std::string host_identity(const std::string& name, uint64_t id) {
  for (const std::string_view common :
       {"localhost", "localhost.localdomain", "localhost4", "localhost6",
        "(none)", "debian", "ubuntu", "linux", "raspberrypi"})
    if (name == common)
      return fmt::format("{}-{:08x}", name == "(none)" ? "localhost" : name,
                         id & 0xffffffff);
  return name;
}

uint64_t host_id() {
  std::string facts;
  for (const char* path :
       {"/etc/machine-id", "/proc/sys/kernel/random/boot_id"}) {
    std::ifstream in(path);
    std::string line;
    std::getline(in, line);
    facts += line + "\n";
  }
  std::error_code ignored;
  facts += std::filesystem::read_symlink("/proc/self/ns/net", ignored).string();
  struct stat shm {};
  if (stat("/dev/shm", &shm) == 0) facts += fmt::format("\n{}", shm.st_dev);
  return std::max<uint64_t>(1, hash64(facts));
}

std::string host_identity() { return host_identity(host_name(), host_id()); }

void raise_file_limit() {
  constexpr rlim_t kEnough = 65536;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = std::min(limit.rlim_max, kEnough);
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = wanted;
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

std::string user_state_folder() {
  const char* state = std::getenv("XDG_STATE_HOME");
  if (state != nullptr && *state == '/') return std::string(state) + "/remesh";
  const char* home = std::getenv("HOME");
  const passwd* user = home == nullptr ? getpwuid(geteuid()) : nullptr;
  if (user != nullptr) home = user->pw_dir;
  if (home == nullptr || *home != '/') return "";
  return std::string(home) + "/.local/state/remesh";
}

Result<std::string> program_beside(const std::string& name) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::string path = (self.parent_path() / name).string();
  if (error || access(path.c_str(), X_OK) != 0)
    return not_found(path + ": no such program; it belongs in the folder of " +
                     self.filename().string());
  return path;
}

std::optional<ProcStat> parse_proc_stat(const std::string& text) {
  // The name, in parentheses, may itself contain spaces and parentheses.
  const size_t end = text.rfind(')');
  if (end == std::string::npos) return std::nullopt;
  std::istringstream in(text.substr(end + 1));
  ProcStat out;
  std::string skip;
  if (!(in >> out.state)) return std::nullopt;
  for (int field = 4; field <= 21; ++field)
    if (!(in >> skip)) return std::nullopt;
  uint64_t pages = 0;
  if (!(in >> out.start_time >> skip >> pages)) return std::nullopt;
  out.rss_bytes = pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return out;
}

std::optional<ProcStat> read_proc_stat(pid_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  char text[1024];
  const ssize_t n = read(fd, text, sizeof(text));
  close(fd);
  if (n <= 0) return std::nullopt;
  return parse_proc_stat(std::string(text, static_cast<size_t>(n)));
}

std::string exit_text(int signal, int exit_code) {
  if (signal == 0) return fmt::format("exit code {}", exit_code);
  const char* const name = sigabbrev_np(signal);
  return name == nullptr ? fmt::format("signal {}", signal)
                         : fmt::format("signal {} (SIG{})", signal, name);
}

}  // namespace remesh
