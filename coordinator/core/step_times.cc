#include "coordinator/core/step_times.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "coordinator/core/durable.h"
#include "coordinator/core/job_shape.h"
#include "proto/base/median.h"

namespace remesh::core {
namespace {

constexpr size_t kKept = 15;  // values of which the median counts
constexpr size_t kEnoughSteps = 5;
constexpr int kFirstSteps = 2;  // are slower: memory is touched first
constexpr double kSmall = 0.1;  // difference, as a share
constexpr double kUsualPauseS = 5;
// What slowed a mesh down may be over after this time.
constexpr int64_t kKeptMs = 3600 * 1000;
constexpr double kDay = 24 * 3600;

bool are_among(const std::set<std::string>& all,
               const std::set<std::string>& some) {
  return std::ranges::includes(all, some);
}

}  // namespace

void StepTimes::keep(double seconds, std::deque<double>* in) {
  if (!(seconds > 0) || !std::isfinite(seconds)) return;
  in->push_back(seconds);
  if (in->size() > kKept) in->pop_front();
}

void StepTimes::begin(const geometry::Layout& layout,
                      std::set<std::string> hosts, int64_t lost_steps) {
  at_ = MeasuredMesh{{.layout = layout, .hosts = std::move(hosts)}};
  steps_.clear();
  skip_ = kFirstSteps;
  lost_steps_ = lost_steps;
}

void StepTimes::adopt(const pb::Durable& d,
                      const std::vector<pb::StepMetrics>& recent,
                      int64_t now_ms) {
  begin(layout_of(d.assignment().mesh()), hosts_with_ranks(d));
  for (const pb::StepMetrics& m : recent)
    if (m.generation() == d.generation()) add_step(m.step_s(), now_ms);
  if (d.phase() == pb::Durable::ABORTING) interrupt(now_ms);
}

void StepTimes::add_step(double seconds, int64_t now_ms) {
  if (!at_ || skip_-- > 0) return;
  skip_ = 0;
  keep(seconds, &steps_);
  if (steps_.size() < kEnoughSteps) return;
  const double now = median({steps_.begin(), steps_.end()});
  auto it = std::ranges::find_if(meshes_, [&](const MeasuredMesh& m) {
    return m.step.layout == at_->step.layout && m.step.hosts == at_->step.hosts;
  });
  if (it == meshes_.end()) {
    std::erase_if(meshes_, [&](const MeasuredMesh& m) {
      return now_ms - m.at_ms >= kKeptMs;
    });
    meshes_.push_back(*at_);
    meshes_.back().step.seconds = now;
    it = std::prev(meshes_.end());
  } else if (std::abs(now - it->step.seconds) > kSmall * it->step.seconds) {
    it->step.seconds = now;
  }
  it->at_ms = now_ms;
}

std::optional<StepTimes::Pause> StepTimes::resume(int64_t now_ms) {
  if (interrupted_ms_ < 0) return std::nullopt;
  const Pause pause = {interrupted_s(now_ms), std::exchange(lost_steps_, 0)};
  keep(pause.seconds, &pauses_);
  interrupted_ms_ = -1;
  return pause;
}

std::vector<planner::MeasuredStep> StepTimes::measured(
    const std::set<std::string>& hosts, int64_t now_ms) const {
  std::vector<planner::MeasuredStep> out;
  for (const MeasuredMesh& m : meshes_)
    if (now_ms - m.at_ms < kKeptMs && are_among(hosts, m.step.hosts))
      out.push_back(m.step);
  return out;
}

void StepTimes::set_link(double bytes_per_s, int64_t now_ms) {
  if (!at_ || !(bytes_per_s > 0)) return;
  links_[at_->step.hosts] = {bytes_per_s, now_ms};
  std::erase_if(links_, [&](const auto& link) {
    return now_ms - link.second.at_ms >= kKeptMs;
  });
}

double StepTimes::link_bytes_per_s(const std::set<std::string>& hosts) const {
  double least = 0;
  for (const auto& [between, link] : links_)
    if (are_among(hosts, between))
      least = least == 0 ? link.bytes_per_s : std::min(least, link.bytes_per_s);
  return least;
}

bool StepTimes::knows_link(const std::set<std::string>& hosts) const {
  return hosts.size() < 2 || std::ranges::any_of(links_, [&](const auto& link) {
           return are_among(link.first, hosts);
         });
}

double StepTimes::pause_s() const {
  return pauses_.empty() ? kUsualPauseS
                         : median({pauses_.begin(), pauses_.end()});
}

double StepTimes::until_failure_s(int64_t now_ms) const {
  const double seconds = static_cast<double>(now_ms - began_ms_) / 1000 + kDay;
  return seconds / static_cast<double>(failures_ + 1);
}

}  // namespace remesh::core
