#include "worker/trace/tracer.h"

#include <fmt/format.h>

#include <algorithm>

#include "proto/rundir/paths.h"
#include "worker/trace/trace_file.h"

namespace remesh::trace {

Tracer::Tracer(TracerOptions options) : options_(std::move(options)) {
  const int64_t before = monotonic_ns();
  const double unix_s = unix_seconds();
  unix_minus_monotonic_ns_ = static_cast<int64_t>(unix_s * 1e6) * 1000 - before;
}

void Tracer::add(Lane lane, Category category, const char* name,
                 int64_t begin_ns, int64_t end_ns,
                 std::initializer_list<Arg> args, const char* group) {
  if (!on_ || begin_ns == 0) return;
  Record r{.name = name,
           .group = group,
           .begin_ns = begin_ns,
           .end_ns = std::max(begin_ns, end_ns),
           .args = {},
           .category = category,
           .lane = lane};
  size_t i = 0;
  for (const Arg& a : args)
    if (i < kMaxArgs) r.args[i++] = a;
  const std::lock_guard lock(mutex_);
  if (records_.size() >= options_.max_spans) {
    ++dropped_;
    return;
  }
  records_.push_back(r);
}

std::string Tracer::to_json() const {
  const std::lock_guard lock(mutex_);
  std::vector<FileSpan> spans;
  for (const Record& r : records_) {
    FileSpan s{.lane = r.lane,
               .name = r.name,
               .category = board::op_kind_name(r.category),
               .begin_us = (r.begin_ns + unix_minus_monotonic_ns_) / 1000,
               .end_us = (r.end_ns + unix_minus_monotonic_ns_) / 1000};
    if (r.group != nullptr) s.group = r.group;
    for (const Arg& a : r.args)
      if (a.key != nullptr) s.args.emplace_back(a.key, a.value);
    spans.push_back(std::move(s));
  }
  return trace_json(
      options_.rank, std::move(spans),
      fmt::format(R"("generation":{},"rank":{},"mesh":{},"schedule":{},)"
                  R"("chunks":{},"microbatches":{},"dropped":{})",
                  options_.generation, options_.rank, json_text(options_.mesh),
                  json_text(options_.schedule), options_.chunks,
                  options_.microbatches, dropped_));
}

Status Tracer::write(const std::string& folder) const {
  return write_atomically(
      folder, rundir::trace_name({options_.generation, options_.rank}),
      to_json());
}

}  // namespace remesh::trace
