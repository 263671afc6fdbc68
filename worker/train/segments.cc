#include "worker/train/segments.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "checkpoint/memory/segment_directory.h"

namespace remesh::train {

using memory::StateSegment;
using SegmentPtr = std::unique_ptr<StateSegment>;

Result<SegmentPtr> Segments::open(const std::string& path,
                                  StateSegment::Mode mode) const {
  return StateSegment::open(path, job_, mode);
}

// Takes the smallest suitable segment. One of more than twice the size would
// waste memory.
SegmentPtr Segments::reuse(int64_t elements,
                           const std::set<std::string>& avoid) const {
  const uint64_t bytes = memory::segment_bytes(elements);
  std::vector<memory::SegmentFile> files = memory::list_segments(folder_, job_);
  std::stable_sort(
      files.begin(), files.end(),
      [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
  for (const memory::SegmentFile& f : files) {
    if (f.bytes < bytes || f.bytes > 2 * bytes || avoid.contains(f.path))
      continue;
    auto s = open(f.path, StateSegment::Mode::kWrite);
    if (s.ok() && (*s)->capacity() >= elements) return std::move(s).value();
  }
  return nullptr;
}

Result<SegmentPtr> Segments::create(int64_t elements) const {
  // Another rank may take the same free number first.
  for (int number = memory::free_number(folder_, job_);; ++number) {
    auto made = StateSegment::create(
        memory::segment_path(folder_, job_, number), job_, elements);
    if (made.ok() || made.status().code() != Code::kAlreadyExists) return made;
  }
}

Result<SegmentPtr> Segments::take(int64_t elements,
                                  const std::set<std::string>& avoid,
                                  const std::set<std::string>& keep) const {
  if (SegmentPtr old = reuse(elements, avoid)) return old;
  auto made = create(elements);
  if (made.ok() || made.status().code() != Code::kExhausted) return made;
  std::set<std::string> both = avoid;
  both.insert(keep.begin(), keep.end());
  if (sweep(both) > 0) made = create(elements);
  if (made.ok() || made.status().code() != Code::kExhausted) return made;
  return exhausted(made.status().message() +
                   ", or train with elastic.keep_state = false, which keeps "
                   "no state in shared memory");
}

int Segments::sweep(const std::set<std::string>& keep) const {
  int removed = 0;
  for (const memory::SegmentFile& f : memory::list_segments(folder_, job_)) {
    if (!keep.contains(f.path) && memory::remove_unused(f.path)) ++removed;
  }
  return removed;
}

void Segments::remove_unfinished() const {
  (void)memory::remove_unfinished(folder_, job_);
}

}  // namespace remesh::train
