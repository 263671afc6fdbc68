#include "coordinator/ctl/detach.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "proto/base/exit_code.h"

namespace remesh::ctl {
namespace {

// The child until it runs; 0 in that.
volatile sig_atomic_t starting_child = 0;

// The terminal tells only the parent.
void pass_on(int /*signal*/) {
  if (starting_child > 0) ::kill(starting_child, SIGTERM);
}

}  // namespace

Result<Detached> Detached::start() {
  const int in = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  int ends[2];
  if (in < 0 || ::pipe2(ends, O_CLOEXEC) != 0)
    return errno_error("cannot detach", errno);
  Output output;
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child < 0) return errno_error("cannot detach", errno);
  ::close(ends[child == 0 ? 0 : 1]);
  if (child > 0) {
    starting_child = child;
    for (const int s : {SIGINT, SIGTERM, SIGHUP})
      if (::signal(s, pass_on) == SIG_IGN) ::signal(s, SIG_IGN);
    return Detached(child, ends[0], std::move(output));
  }
  ::setsid();
  struct stat input {};  // a file has the job
  if (::fstat(STDIN_FILENO, &input) != 0 || !S_ISREG(input.st_mode))
    ::dup2(in, STDIN_FILENO);
  const int out = ::open(output.path().c_str(), O_WRONLY | O_APPEND);
  for (const int to : {STDOUT_FILENO, STDERR_FILENO}) ::dup2(out, to);
  return Detached(child, ends[1], std::move(output));
}

std::optional<int> Detached::exit_code_of_parent() {
  if (child_ == 0) return std::nullopt;
  char byte = 0;
  for (ssize_t n = 0; (n = ::read(pipe_, &byte, 1)) != 0;) {
    if (n > 0 && byte == '\n') {
      starting_child = 0;
      return kExitOk;
    }
    if (n > 0) output_path_ += byte;
    if (n < 0 && errno != EINTR) break;
  }
  int status = 0;
  pid_t ended = -1;
  do ended = ::waitpid(child_, &status, 0);
  while (ended < 0 && errno == EINTR);
  if (ended == child_ && WIFEXITED(status)) return WEXITSTATUS(status);
  const bool asked = WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM;
  return asked ? kExitInterrupted : kExitFailed;
}

void Detached::say_running(const std::string& file) {
  std::fflush(stdout);
  const int out = open_output(file);
  if (out >= 0) {
    std::string text;
    for (const std::string& line : output()) text += line + "\n";
    (void)!::write(out, text.data(), text.size());
    for (const int to : {STDOUT_FILENO, STDERR_FILENO}) ::dup2(out, to);
    ::close(out);
  }
  const std::string line = file + "\n";
  (void)!::write(pipe_, line.data(), line.size());
}

}  // namespace remesh::ctl
