// Shelf: the state segments that lie in one folder of shared memory: names,
// room, what can be used again, and removal. A worker daemon keeps its own
// folder, below its /dev/shm/remesh-UID-HASH/ (worker/agent/shell/scratch.h).
//
// A segment's file is named state-JOB-NUMBER, JOB being 16 hexadecimal digits;
// state-JOB-NUMBER.new while it is made. Nothing here touches a file of another
// name, nor of another job.
//
// Stateless; any thread.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::memory {

// Number that tells jobs of one host apart, for instance of a run directory's
// absolute path.
uint64_t job_number(const std::string& text);

std::string segment_path(const std::string& folder, uint64_t job, int number);

// Of all files in `folder` that are named so; ascending.
std::vector<uint64_t> list_jobs(const std::string& folder);

struct SegmentFile {
  std::string path;
  int number = 0;
  uint64_t bytes = 0;
};
// The job's segments in `folder`, by number; none when there is no folder.
// Those that were not finished are left out.
std::vector<SegmentFile> list_segments(const std::string& folder, uint64_t job);
// The smallest number that no file of the job has, finished or not.
int free_number(const std::string& folder, uint64_t job);
// Removes the job's segments, finished or not; how many there were. Who has
// them mapped keeps the memory until it unmaps them.
int remove_segments(const std::string& folder, uint64_t job);
// Removes that segment unless somebody has it open to write.
bool remove_unused(const std::string& path);
// Only those which were not finished: REQUIRES: nobody is making one.
int remove_unfinished(const std::string& folder, uint64_t job);

// Sum of segment_bytes(): what a worker needs for the ranks and replicas that
// it holds at once. While a state moves to another mesh it holds the old ones
// as well, but for those taken over as they stand.
uint64_t needed_bytes(std::span<const int64_t> capacities);

// Index of the free segment whose capacity is the least that suffices for
// `elements`, or -1. One of more than twice the elements is no use: it would
// be kept for little.
int pick_segment(std::span<const int64_t> free_capacities, int64_t elements);

// Exhausted when the file system of `path` has not `bytes` left; the message
// says what is needed, what is there, and what to do.
Status check_room(const std::string& path, uint64_t bytes);
// That message.
Status short_of_room(const std::string& path, uint64_t bytes);

}  // namespace remesh::memory
