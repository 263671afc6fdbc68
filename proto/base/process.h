// Facts about processes: this one, others of the host, and those that ended.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "proto/base/status.h"

namespace remesh {

// The name of this machine, as gethostname() reports it.
std::string host_name();

// A number of this machine, its boot, its network and its /dev/shm, which tells
// it from others of the same name, and containers on it from each other. Not 0.
uint64_t host_id();
// The name of this machine or, when that is one that many machines have, such
// as localhost, the name and host_id(): "localhost-1a2b3c4d".
std::string host_identity();
// The same of any host.
std::string host_identity(const std::string& name, uint64_t id);

// Raises the soft limit of open files to the hard one, but not above 65536, for
// this process and its children.
void raise_file_limit();

// First in main(), whatever started the program. Opens /dev/null as each of the
// descriptors 0 to 2 that is closed, as nohup and cron wrappers leave them, so
// that no file or socket has such a number. Undoes an inherited disposition to
// ignore SIGCHLD.
void begin_program();

// The exit code of a program that has printed its result: `code`, or
// kExitFailed, with a message, if that is kExitOk and the standard output
// cannot be written.
int check_output(const char* program, int code);

// Where this user's programs keep what outlives a run:
// $XDG_STATE_HOME/remesh, else ~/.local/state/remesh; "" if there is no home.
std::string user_state_folder();

// The path of the program `name` in the folder of the running program; NotFound
// when it cannot be executed.
Result<std::string> program_beside(const std::string& name);

struct ProcStat {
  char state = '?';         // letter of proc(5)
  uint64_t start_time = 0;  // clock ticks since boot
  uint64_t rss_bytes = 0;
};
// std::nullopt if there is no such process.
std::optional<ProcStat> read_proc_stat(pid_t pid);
// Parses the text of /proc/PID/stat.
std::optional<ProcStat> parse_proc_stat(const std::string& text);

// "exit code 3", or "signal 9 (SIGKILL)" when `signal` is not 0.
std::string exit_text(int signal, int exit_code);

}  // namespace remesh
