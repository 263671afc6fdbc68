// Child processes of tests and benchmarks, and observation of any process.
//
// A child leads its own process group, so that a signal sent to it reaches no
// other process, and dies with the test (parent-death signal), so that an
// aborted test leaves nothing running.
//
// Threads: children must be started by a thread that outlives them, in practice
// the main thread.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace remesh::testing {

struct Exit {
  int code = -1;   // if it exited by itself
  int signal = 0;  // else the signal that killed it
};

struct ProcessOptions {
  std::vector<std::string> argv;  // argv[0] without '/': searched in PATH
  std::string output;             // file, appended to; "": /dev/null
  // Added to the environment of this process.
  std::vector<std::pair<std::string, std::string>> env;
};

class Process {
 public:
  // One that cannot be executed has exit code 127.
  explicit Process(ProcessOptions options);
  ~Process();  // SIGKILL, and reaps
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  bool running();
  void kill(int signal);
  // False if it is still running after that time.
  bool wait_ms(int64_t timeout_ms);
  // REQUIRES: it has ended.
  const Exit& exit() const { return exit_; }
  const std::string& output_path() const { return options_.output; }
  std::string output() const;

 private:
  ProcessOptions options_;
  pid_t pid_ = -1;
  bool ended_ = false;
  Exit exit_;
};

struct Finished {
  Exit exit;
  std::string output;  // stdout and stderr
};
// Runs a program until it exits; SIGKILL on timeout.
Finished run_program(
    const std::vector<std::string>& argv, int64_t timeout_ms = 60'000,
    const std::vector<std::pair<std::string, std::string>>& env = {});

// kill(2) of one process. Aborts the test program unless pid > 1: a pid that is
// unknown would end the test's whole process group, or every process.
int send_signal(pid_t pid, int signal);

// Polls every few milliseconds; false after four times `timeout_ms`, which is a
// generous time on an idle machine: others use this one too.
bool wait_until(const std::function<bool()>& done, int64_t timeout_ms);

// An address to listen on again later, another one each time. Nobody takes it
// meanwhile: its IP address is of this process alone, and ports that the kernel
// hands out are larger.
std::string own_address();
void sleep_ms(int64_t ms);

// All processes whose command line or environment contains the text, except
// this one and its ancestors.
struct Seen {
  pid_t pid = 0;
  pid_t parent = 0;
  std::string command;  // as in /proc/PID/cmdline, with blanks
};
std::vector<Seen> processes_with(const std::string& text);
// The kernel's letter: "R", "S", "T" (stopped), "Z"; "" if there is no process.
std::string process_state(pid_t pid);

}  // namespace remesh::testing
