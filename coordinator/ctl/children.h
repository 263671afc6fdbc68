// Child processes of `remesh run`, none of which outlives it.
//
// Each child is its own process group, so that Ctrl-C in the terminal reaches
// only `remesh`, and has SIGKILL as its parent-death signal, so that it dies
// even if `remesh` is killed with SIGKILL. Processes that the children leave
// behind (ranks of a killed worker) are re-parented to this process (child
// subreaper) and are killed and reaped too.
//
// Threads: the one that made the object, which must be the main thread: the
// parent-death signal watches the thread that forked.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "proto/base/process.h"
#include "proto/base/status.h"

namespace remesh::ctl {

struct Ended {
  int pid = 0;
  int child = -1;  // number given to start(); -1 for an adopted orphan
  int exit_code = 0;
  int signal = 0;  // 0: exited by itself

  std::string to_text() const { return exit_text(signal, exit_code); }
};

// What a process prints, in memory: it needs no folder, and no disk with room.
class Output {
 public:
  Output();
  ~Output();
  Output(Output&& other) noexcept;
  // For this process and those that it forks.
  const std::string& path() const { return path_; }
  int fd() const { return fd_; }
  std::vector<std::string> lines() const;
  void clear();

 private:
  int fd_ = -1;
  std::string path_;
};

// Opens, or creates, a file to which output is appended; not through a link,
// but for Output::path(). -1, and errno, if that fails.
int open_output(const std::string& path);

class Children {
 public:
  Children();
  ~Children();  // kill_all()
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  // Starts `argv` (argv[0]: path) and returns its pid. Its output is appended
  // to `log`, and its standard input is the file `input`. The error names the
  // program if it cannot be run.
  Result<int> start(int child, const std::vector<std::string>& argv,
                    const std::string& log,
                    const std::string& input = "/dev/null");
  // The children that ended since the last call.
  std::vector<Ended> reap();
  void signal(int child, int signal);
  // SIGKILL to all children and orphans; returns when all are reaped, or after
  // 5 s those that a dead mount or a driver keeps.
  std::vector<int> kill_all();

 private:
  std::map<int, int> children_;  // by pid
};

}  // namespace remesh::ctl
