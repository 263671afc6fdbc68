#include "coordinator/ctl/detach.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "proto/base/exit_code.h"

namespace remesh::ctl {

Result<Detached> Detached::start(const std::string& output) {
  const int in = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  const int out =
      ::open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (out < 0) return errno_error(output, errno);
  int ends[2];
  if (in < 0 || ::pipe2(ends, O_CLOEXEC) != 0)
    return errno_error("cannot detach", errno);
  std::fflush(stdout);
  const pid_t child = ::fork();
  if (child < 0) return errno_error("cannot detach", errno);
  ::close(ends[child == 0 ? 0 : 1]);
  if (child > 0) return Detached(child, ends[0]);
  ::setsid();
  ::dup2(in, STDIN_FILENO);
  for (const int to : {STDOUT_FILENO, STDERR_FILENO}) ::dup2(out, to);
  return Detached(child, ends[1]);
}

std::optional<int> Detached::exit_code_of_parent() const {
  if (child_ == 0) return std::nullopt;
  char byte = 0;
  while (::read(pipe_, &byte, 1) < 0 && errno == EINTR) {
  }
  if (byte != 0) return kExitOk;
  int status = 0;
  while (::waitpid(child_, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : int{kExitFailed};
}

void Detached::say_running() const {
  const char byte = 1;
  (void)!::write(pipe_, &byte, 1);
}

}  // namespace remesh::ctl
