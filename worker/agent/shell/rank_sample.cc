// What a worker sees of its ranks: their boards, and /proc.
#include <csignal>
#include <optional>

#include "proto/base/clock.h"
#include "proto/base/exit_code.h"
#include "proto/base/machine.h"
#include "proto/base/process.h"
#include "worker/agent/shell/launcher.h"

namespace remesh::agent {

RankSample Launcher::sample(Rank& r, bool alive) {
  RankSample out;
  // Before its board: what a stopped rank was doing does not change any more.
  const auto stat = alive ? read_proc_stat(r.pid) : std::nullopt;
  // Take the snapshot before the steps. A rank pushes the metrics of a step
  // before it commits the step, so they are present for every step committed
  // here, unless the ring was full: then they follow, and the coordinator
  // waits.
  out.status = r.board->snapshot();
  for (const board::StepRecord& s : r.board->pop_steps())
    out.steps.push_back(board::to_metrics(s, generation_, mesh_));
  pb::RankStatus& s = out.status;
  s.set_rank(r.rank);
  s.set_pid(r.pid);
  if (s.error().empty() && !apart_.empty()) s.set_error(apart_);
  fill_doing(*r.board, monotonic_ns(), &s);
  if (stat) {
    s.set_os_state(std::string(1, stat->state));
    s.set_rss_bytes(stat->rss_bytes);
  }
  r.seen_committed = s.committed_step();
  return out;
}

void Launcher::explain_end(RankExited* e) const {
  pb::RankStatus& s = e->sample.status;
  if (e->signal == SIGKILL && !killed_ && oom_kills() > oom_kills_)
    s.set_error("the kernel ended it, because memory ran out");
  if (e->signal != 0 || e->exit_code != 0 ||
      s.phase() >= pb::RankStatus::STOPPING)
    return;
  e->exit_code = kExitInternal;
  if (s.error().empty())
    s.set_error("it ended with exit code 0 in the middle of its work");
}

std::vector<RankSample> Launcher::samples() {
  std::vector<RankSample> out;
  for (auto& [rank, r] : ranks_) out.push_back(sample(r, /*alive=*/true));
  return out;
}

}  // namespace remesh::agent
