// HostMemory: the peak memory of a cluster's ranks on this host, by a thread
// that reads it every two milliseconds.
//
// A host needs room for the private memory of every rank (resident pages
// without those of files and shared memory) and, once each, for the segments in
// shared memory, whichever ranks map them: a sum of VmHWM counts a segment for
// every rank that maps it, and none that no rank maps any more.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace remesh::bench {

struct HostPeak {
  uint64_t total = 0;
  uint64_t shared = 0;  // when the total was reached
};

class HostMemory {
 public:
  // `mark` is a text in the environment of all ranks; the folders have the
  // segments, and need not exist.
  HostMemory(std::string mark, std::vector<std::string> folders);
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // The peak since the last call. Reads the memory once more itself, so that a
  // phase in which the thread had no processor has a peak, too.
  HostPeak take();
  // Bytes of the segments now.
  uint64_t shared() const;

 private:
  void watch(const std::stop_token& stop);
  HostPeak look(const std::vector<pid_t>& ranks) const;

  const std::string mark_;
  const std::vector<std::string> folders_;
  std::mutex mutex_;
  HostPeak peak_;
  std::jthread thread_;  // last: uses the members above
};

}  // namespace remesh::bench
