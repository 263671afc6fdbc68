#include "worker/train/segments.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/memory/segment_directory.h"
#include "proto/base/file_system.h"

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

namespace {

bool is_short(const Result<SegmentPtr>& made) {
  return made.status().code() == Code::kExhausted;
}

Status with_remedy(const Status& s) {
  return exhausted(s.message() +
                   ", or train with elastic.keep_state = false, which keeps "
                   "no state in shared memory");
}

}  // namespace

Result<SegmentPtr> Segments::take(int64_t elements,
                                  const std::set<std::string>& avoid,
                                  const std::set<std::string>& keep) const {
  if (SegmentPtr old = reuse(elements, avoid)) return old;
  constexpr auto kWhole = StateSegment::Extent::kWhole;
  auto made = create(elements, kWhole);
  std::set<std::string> both = avoid;
  both.insert(keep.begin(), keep.end());
  if (is_short(made) && sweep(both) > 0) made = create(elements, kWhole);
  return is_short(made) ? with_remedy(made.status()) : std::move(made);
}

Result<SegmentPtr> Segments::take_beside(int64_t elements,
                                         const SourceStates& source) const {
  constexpr auto kHalf = StateSegment::Extent::kHalf;
  auto made = create(elements, kHalf);
  if (is_short(made) && sweep(source.paths, &source) > 0)
    made = create(elements, kHalf);
  if (is_short(made)) {
    free_other_buffers(source);
    made = create(elements, kHalf);
  }
  return is_short(made) ? with_remedy(made.status()) : std::move(made);
}

std::set<std::string> Segments::SourceStates::folders(
    const std::string& own) const {
  std::set<std::string> out = {own};
  for (const std::string& path : paths) out.insert(parent_path(path));
  return out;
}

Status Segments::check_room(uint64_t bytes) const {
  return memory::check_room(memory::segment_path(folder_, job_, 0), bytes);
}

// A segment may still be locked by a rank that has just died, or by another
// rank that does the same.
void Segments::free_other_buffers(const SourceStates& source) const {
  constexpr int kTries = 100;
  for (const std::string& path : source.paths) {
    if (source.reused.contains(path)) continue;
    auto segment = open(path, StateSegment::Mode::kRead);
    if (!segment.ok()) continue;  // of another host
    std::set<int> needed;
    for (const auto& c : (*segment)->contents().states)
      if (c.info.step == source.step && c.info.generation == source.generation)
        needed.insert(c.buffer);
    for (const int buffer : {0, 1})
      for (int i = 0;
           needed.size() == 1 && !needed.contains(buffer) && i < kTries &&
           StateSegment::free_buffer(path, job_, buffer).code() ==
               Code::kUnavailable;
           ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

int Segments::sweep(const std::set<std::string>& keep,
                    const SourceStates* beside) const {
  int removed = 0;
  for (const std::string& folder : beside != nullptr
                                       ? beside->folders(folder_)
                                       : std::set<std::string>{folder_})
    for (const memory::SegmentFile& f : memory::list_segments(folder, job_))
      if (!keep.contains(f.path) && memory::remove_unused(f.path)) ++removed;
  return removed;
}

void Segments::remove_unfinished() const {
  (void)memory::remove_unfinished(folder_, job_);
}

}  // namespace remesh::train
