#include "worker/train/segments.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/memory/segment_directory.h"

namespace remesh::train {

using memory::StateSegment;
using SegmentPtr = std::unique_ptr<StateSegment>;

Result<SegmentPtr> Segments::open(const std::string& path,
                                  StateSegment::Mode mode) const {
  return StateSegment::open(path, job_, mode, tick_);
}

// Takes the smallest suitable segment. The coordinator, which sees whether a
// host has room, counts what is needed: a larger one would take that of others.
SegmentPtr Segments::reuse(int64_t elements,
                           const std::set<std::string>& avoid) const {
  const uint64_t bytes = memory::segment_bytes(elements);
  std::vector<memory::SegmentFile> files = memory::list_segments(folder_, job_);
  std::stable_sort(
      files.begin(), files.end(),
      [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
  for (const memory::SegmentFile& f : files) {
    if (f.bytes < bytes || f.bytes > bytes + bytes / 8 ||
        avoid.contains(f.path))
      continue;
    auto s = open(f.path, StateSegment::Mode::kWrite);
    if (s.ok() && (*s)->capacity() >= elements) return std::move(s).value();
  }
  return nullptr;
}

Result<SegmentPtr> Segments::create(int64_t elements,
                                    StateSegment::Extent extent) const {
  // Another rank may take the same free number first.
  for (int number = memory::free_number(folder_, job_);; ++number) {
    auto made =
        StateSegment::create(memory::segment_path(folder_, job_, number), job_,
                             elements, extent, tick_);
    if (made.ok() || made.status().code() != Code::kAlreadyExists) return made;
  }
}

Result<SegmentPtr> Segments::take(int64_t elements,
                                  const std::set<std::string>& avoid,
                                  const std::set<std::string>& keep) const {
  if (SegmentPtr old = reuse(elements, avoid)) return old;
  constexpr auto kWhole = StateSegment::Extent::kWhole;
  auto made = create(elements, kWhole);
  if (made.ok() || made.status().code() != Code::kExhausted) return made;
  std::set<std::string> both = avoid;
  both.insert(keep.begin(), keep.end());
  if (sweep(both) > 0) made = create(elements, kWhole);
  if (made.ok() || made.status().code() != Code::kExhausted) return made;
  return exhausted(made.status().message() +
                   ", or train with elastic.keep_state = false, which keeps "
                   "no state in shared memory");
}

Result<SegmentPtr> Segments::take_beside(int64_t elements,
                                         const SourceStates& source,
                                         bool* whole) const {
  *whole = true;
  auto made = take(elements, source.paths, source.paths);
  if (made.ok() || made.status().code() != Code::kExhausted) return made;
  free_other_buffers(source);
  auto again = create(elements, StateSegment::Extent::kWhole);
  if (!again.ok() && again.status().code() == Code::kExhausted) {
    *whole = false;
    again = create(elements, StateSegment::Extent::kHalf);
  }
  return again.ok() ? std::move(again) : std::move(made);
}

// A segment may still be locked by a rank that has just died, or by another
// rank that does the same.
void Segments::free_other_buffers(const SourceStates& source) const {
  constexpr int kTries = 100;
  for (const memory::SegmentFile& f : memory::list_segments(folder_, job_)) {
    if (!source.paths.contains(f.path) || source.reused.contains(f.path))
      continue;
    auto segment = open(f.path, StateSegment::Mode::kRead);
    if (!segment.ok()) continue;
    std::set<int> needed;
    for (const auto& c : (*segment)->contents().states)
      if (c.info.step == source.step && c.info.generation == source.generation)
        needed.insert(c.buffer);
    for (const int buffer : {0, 1})
      for (int i = 0;
           needed.size() == 1 && !needed.contains(buffer) && i < kTries &&
           StateSegment::free_buffer(f.path, job_, buffer).code() ==
               Code::kUnavailable;
           ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
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
