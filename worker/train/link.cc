#include "worker/train/link.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <span>

#include "proto/base/clock.h"

namespace remesh::train {
namespace {

constexpr size_t kMessage = size_t{1} << 20;
constexpr double kEnoughS = 0.2;
constexpr int kMostMessages = 1024;

}  // namespace

double measure_link(comm::Comm& world, const std::vector<std::string>& hosts) {
  const auto rank = static_cast<size_t>(world.rank());
  const size_t n = std::set<std::string>(hosts.begin(), hosts.end()).size();
  if (n < 2) return 0;
  const bool first = std::find(hosts.begin(), hosts.end(), hosts[rank]) ==
                     hosts.begin() + static_cast<long>(rank);
  const auto leaders = world.split(first ? 0 : -1, world.rank());
  std::vector<std::byte> mine(first ? kMessage : 0), all(mine.size() * n);
  // The first round opens connections; then twice as many messages each, until
  // the slowest took long enough. All ranks follow the same time.
  for (int messages = 1;; messages *= 2) {
    const int64_t began_ns = monotonic_ns();
    if (first)
      for (int i = 0; i < messages; ++i) leaders->all_gather(mine, all);
    double seconds = seconds_since(began_ns);
    world.all_reduce(std::span<double>(&seconds, 1), comm::Op::kMax);
    if (messages > 1 && (seconds >= kEnoughS || messages >= kMostMessages))
      return static_cast<double>(messages) * static_cast<double>(kMessage) *
             static_cast<double>(n - 1) / seconds;
  }
}

}  // namespace remesh::train
