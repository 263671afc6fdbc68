#include "coordinator/core/awaited.h"

#include <algorithm>

#include "coordinator/core/durable.h"

namespace remesh::core {
namespace {

bool holds_source(const pb::Durable& durable, const std::string& worker) {
  const auto& states = durable.assignment().source().states();
  return std::any_of(states.begin(), states.end(),
                     [&](const auto& h) { return h.worker() == worker; });
}

bool all_exited(const pb::Report& r) {
  return std::all_of(r.ranks().begin(), r.ranks().end(),
                     [](const auto& s) { return s.exited(); });
}

}  // namespace

bool offers_nothing(const pb::Report& r) { return r.slots() < 1 && !r.busy(); }

bool is_free(const pb::Report& r, const pb::Durable& d) {
  return r.generation() == d.generation() && !r.busy() &&
         (d.state_job() == 0 || r.has_inventory());
}

std::string awaited(const pb::Durable& d, const std::string& name,
                    const Roster::Member& m) {
  const pb::Report& r = m.report;
  const bool fenced = r.generation() == d.generation();
  if (!m.reported || offers_nothing(r)) return "";
  const auto part = [&] { return participates(d, name, r.incarnation()); };
  switch (d.phase()) {
    case pb::Durable::WAITING:
      if (d.state_job() == 0 || m.sent_away ||
          m.inventory_known(d.generation()))
        return "";
      return r.busy() ? "end its ranks" : "list its states";
    case pb::Durable::PREPARING: {
      // A worker that returns from silence may still have ranks of an older
      // generation, or start them on a directive in flight, until it is fenced.
      const bool quiet = part() ? fenced && r.state() == pb::Report::PREPARED
                                : fenced && !r.busy();
      if (!quiet) return r.busy() ? "end its older ranks" : "prepare";
      const bool unlisted = !r.has_inventory() && holds_source(d, name);
      return unlisted ? "list its states" : "";
    }
    case pb::Durable::RUNNING:
      if ((!fenced || r.state() == pb::Report::PREPARED) && part())
        return "start";
      [[fallthrough]];
    case pb::Durable::FINISHING:
      if (fenced && r.ranks_size() > 0 && all_exited(r) &&
          !m.quiesced(d.generation()) && part())
        return "clean up after its ranks";
      return "";
    case pb::Durable::ABORTING:
      if (m.quiesced(d.generation()) || !part() || !has_ranks(d, name))
        return "";
      return "end its ranks";
    default:
      return "";
  }
}

}  // namespace remesh::core
