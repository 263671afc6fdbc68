// Child processes of `remesh run`, of which none outlives it.
//
// Each child is a process group of its own, so that a Ctrl-C in the terminal
// reaches only `remesh`, and has SIGKILL as its parent-death signal, so that
// it dies also when `remesh` is killed by force. What the children leave behind
// (ranks of a worker that was killed) becomes ours (child subreaper) and is
// killed and reaped too.
//
// Threads: the one that made the object, which must be the main thread: the
// parent-death signal watches the thread that forked.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::ctl {

struct Ended {
  int pid = 0;
  std::string name;  // "" for an adopted orphan
  int exit_code = 0;
  int signal = 0;  // 0: exited by itself
};
// "exited with code 3", "was ended by signal 9 (Killed)".
std::string how_it_ended(const Ended& e);

class Children {
 public:
  Children();
  ~Children();  // kill_all()
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  // Starts `argv` (argv[0]: path). Its output is appended to `log`. Fails
  // naming the program when it cannot be run.
  Result<int> start(const std::string& name,
                    const std::vector<std::string>& argv,
                    const std::string& log);
  // Those that ended since the last call.
  std::vector<Ended> reap();
  bool running(const std::string& name) const;
  int count() const { return static_cast<int>(pids_.size()); }
  void signal(const std::string& name, int signal);
  // SIGKILL to all, and to their orphans, until nothing is left.
  void kill_all();

 private:
  std::map<int, std::string> pids_;
};

// A program that lies beside this one; NotFound names the path.
Result<std::string> program_beside(const std::string& name);

}  // namespace remesh::ctl
