// The state segments in one directory of shared memory: their names, free room,
// reuse and removal. A worker daemon has its own directory below
// /dev/shm/remesh-UID-HASH/ (worker/agent/shell/scratch.h).
//
// A segment's file is named state-JOB-NUMBER, JOB being 16 hexadecimal digits;
// state-JOB-NUMBER.new while it is being made. Nothing here touches a file of
// another name or of another job.
//
// Stateless; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::memory {

// Why segments may be missing, and what to do.
inline constexpr char kWhoRemoves[] =
    "somebody removed it; systemd-logind does so when a user logs out "
    "(RemoveIPC): loginctl enable-linger USER, or run as a system user";

inline constexpr char kSharedMemory[] = "/dev/shm";
// The start of the names of this user's folders in shared memory.
std::string shared_folder_prefix();
// Whether a path is a folder of this user that nobody else may write to, and no
// link: shared memory and /tmp are open to others, who can make any name there.
bool is_private_folder(const std::string& path);
// The folders of segments below `shared`, of all workers of this user, dead or
// alive.
std::vector<std::string> state_folders(
    const std::string& shared = kSharedMemory);

// The file that names the worker of a folder below `shared`, by its own folder.
std::string owner_file(const std::string& shared_root);
// The worker of that folder of segments; "" if the file is missing.
std::string owner_of(const std::string& state_folder);
// Whether the lock of that worker is held. An unknown one may live.
bool may_live(const std::string& owner);

std::string segment_path(const std::string& folder, uint64_t job, int number);

// The jobs that have segments in `folder`; ascending.
std::vector<uint64_t> list_jobs(const std::string& folder);

struct SegmentFile {
  std::string path;
  int number = 0;
  uint64_t bytes = 0;
};
// The job's complete segments in `folder`, by number; none if there is no such
// directory.
std::vector<SegmentFile> list_segments(const std::string& folder, uint64_t job);
// The smallest number that no file of the job has, complete or not.
int free_number(const std::string& folder, uint64_t job);
// Removes the job's segments, complete or not, and returns their number. A
// process that has one mapped keeps the memory until it unmaps it.
int remove_segments(const std::string& folder, uint64_t job);
// Removes that segment unless a process has it open for writing.
bool remove_unused(const std::string& path);
// Removes only incomplete ones. REQUIRES: no process is making one.
int remove_unfinished(const std::string& folder, uint64_t job);

// Exhausted if the file system of `path` has less than `bytes` left; the
// message says what is needed, what is available, and what to do.
Status check_room(const std::string& path, uint64_t bytes);
// The error that check_room() returns.
Status short_of_room(const std::string& path, uint64_t bytes);

}  // namespace remesh::memory
