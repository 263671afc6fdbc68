#include "tests/testing/process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <thread>

#include "proto/base/check.h"
#include "proto/base/child.h"
#include "proto/base/clock.h"
#include "tests/testing/files.h"

extern char** environ;

namespace remesh::testing {
namespace {

constexpr int64_t kSlower = 4;  // than an idle machine
constexpr int kPollMs = 5;
constexpr int kExecFailed = 127;

std::vector<std::string> environment_with(
    const std::vector<std::pair<std::string, std::string>>& more) {
  std::vector<std::string> out;
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string text = *e;
    const auto same = [&](const auto& m) {
      return text.starts_with(m.first + "=");
    };
    if (std::none_of(more.begin(), more.end(), same)) out.push_back(text);
  }
  for (const auto& [key, value] : more)
    out.push_back(fmt::format("{}={}", key, value));
  return out;
}

pid_t parent_of(pid_t pid) {
  const std::string stat = read_whole(fmt::format("/proc/{}/stat", pid));
  const size_t end = stat.rfind(')');  // a name may contain anything
  if (end == std::string::npos || end + 4 >= stat.size()) return 0;
  return static_cast<pid_t>(std::atoi(stat.c_str() + end + 4));
}

}  // namespace

Process::Process(ProcessOptions options) : options_(std::move(options)) {
  const std::string output =
      options_.output.empty() ? "/dev/null" : options_.output;
  const int out_fd =
      open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  CHECK(out_fd >= 0);
  const auto child = start_child({.argv = options_.argv,
                                  .env = environment_with(options_.env),
                                  .output_fd = out_fd,
                                  .oom_victim = false});
  close(out_fd);
  ended_ = !child.ok();
  if (ended_) {
    exit_.code = kExecFailed;
    return;
  }
  pid_ = child->pid;
  if (child->pidfd >= 0) close(child->pidfd);
}

Process::~Process() {
  if (!running()) return;
  ::kill(pid_, SIGCONT);
  ::kill(pid_, SIGKILL);
  wait_ms(10'000);
}

bool Process::running() {
  if (ended_) return false;
  int status = 0;
  const pid_t pid = waitpid(pid_, &status, WNOHANG);
  if (pid == 0) return true;
  ended_ = true;
  if (pid == pid_ && WIFSIGNALED(status)) exit_.signal = WTERMSIG(status);
  if (pid == pid_ && WIFEXITED(status)) exit_.code = WEXITSTATUS(status);
  return false;
}

void Process::kill(int signal) {
  if (!ended_) ::kill(pid_, signal);
}

bool Process::wait_ms(int64_t timeout_ms) {
  return wait_until([this] { return !running(); }, timeout_ms);
}

std::string Process::output() const { return read_whole(options_.output); }

Finished run_program(
    const std::vector<std::string>& argv, int64_t timeout_ms,
    const std::vector<std::pair<std::string, std::string>>& env) {
  const TempDir dir;
  Process p({.argv = argv, .output = dir.path() + "/out", .env = env});
  if (!p.wait_ms(timeout_ms)) {
    p.kill(SIGKILL);
    p.wait_ms(timeout_ms);
  }
  return {p.exit(), p.output()};
}

void sleep_ms(int64_t ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

int send_signal(pid_t pid, int signal) {
  CHECK(pid > 1);
  return ::kill(pid, signal);
}

bool wait_until(const std::function<bool()>& done, int64_t timeout_ms) {
  const int64_t end = monotonic_ms() + kSlower * timeout_ms;
  while (!done()) {
    if (monotonic_ms() >= end) return done();
    sleep_ms(kPollMs);
  }
  return true;
}

std::vector<Seen> processes_with(const std::string& text) {
  std::set<pid_t> own;
  for (pid_t p = getpid(); p > 0; p = parent_of(p)) own.insert(p);
  std::vector<Seen> out;
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename().string();
    pid_t pid = 0;
    const auto parsed =
        std::from_chars(name.data(), name.data() + name.size(), pid);
    if (parsed.ec != std::errc() || own.contains(pid)) continue;
    const std::string folder = entry.path().string();
    std::string command = read_whole(folder + "/cmdline");
    if (command.find(text) == std::string::npos &&
        read_whole(folder + "/environ").find(text) == std::string::npos)
      continue;
    if (process_state(pid) == "Z") continue;
    std::replace(command.begin(), command.end(), '\0', ' ');
    out.push_back({pid, parent_of(pid), command});
  }
  return out;
}

std::string process_state(pid_t pid) {
  const std::string stat = read_whole(fmt::format("/proc/{}/stat", pid));
  const size_t end = stat.rfind(')');
  if (end == std::string::npos || end + 2 >= stat.size()) return "";
  return stat.substr(end + 2, 1);
}

std::string own_address() {
  static int port = 20'000;
  // 127.1.0.0 and above: all of 127.0.0.0/8 is loopback.
  const auto pid = static_cast<uint32_t>(getpid());
  const uint32_t host = 0x7f010000 + (pid & 0x3fffff);
  while (true) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(host);
    at.sin_port = htons(static_cast<uint16_t>(++port));
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool is_free =
        bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0;
    close(fd);
    if (is_free)
      return fmt::format("tcp://127.{}.{}.{}:{}", host >> 16 & 0xff,
                         host >> 8 & 0xff, host & 0xff, port);
  }
}

}  // namespace remesh::testing
