#include "coordinator/core/drains.h"

#include <algorithm>

namespace remesh::core {

void begin_drain(const std::string& worker, uint64_t incarnation,
                 const Roster& roster, pb::Drains* drains) {
  auto* all = drains->mutable_workers();
  all->erase(std::remove_if(all->begin(), all->end(),
                            [&](const pb::Drains::Worker& d) {
                              return !d.unfinished() &&
                                     !roster.considers_live(d.name(),
                                                            d.incarnation());
                            }),
             all->end());
  pb::Drains::Worker* d = all->Add();
  d->set_name(worker);
  d->set_incarnation(incarnation);
  d->set_unfinished(true);
}

bool drains(const pb::Drains& drains, const std::string& worker,
            uint64_t incarnation) {
  return std::ranges::any_of(drains.workers(), [&](const auto& d) {
    return d.name() == worker &&
           (d.unfinished() || d.incarnation() == incarnation);
  });
}

bool finish_drain(const std::string& worker, uint64_t incarnation,
                  pb::Drains* drains) {
  bool finished = false;
  for (pb::Drains::Worker& d : *drains->mutable_workers()) {
    if (d.name() != worker || !d.unfinished()) continue;
    d.set_incarnation(incarnation);
    d.clear_unfinished();
    finished = true;
  }
  return finished;
}

}  // namespace remesh::core
