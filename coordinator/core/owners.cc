// Which key may use which worker name: the first one that registered it.
#include "coordinator/core/coordinator.h"
#include "proto/limits/plausible.h"

namespace remesh::core {
namespace {

constexpr int kMaxOwners = 1 << 16;
constexpr int kMaxNamesOfKey = limits::kMaxWorkers;

}  // namespace

std::string Coordinator::owner_of(const std::string& worker) const {
  const auto it = owners_.find(worker);
  return it == owners_.end() ? "" : it->second;
}

std::vector<std::string> Coordinator::workers_of(const std::string& key) const {
  std::vector<std::string> out;
  for (const auto& [worker, owner] : owners_)
    if (owner == key) out.push_back(worker);
  return out;
}

bool Coordinator::may_use_name(const std::string& worker,
                               const std::string& key, Claim claim) const {
  const std::string owner = owner_of(worker);
  return owner.empty() || owner == key || claim == Claim::kNow ||
         (claim == Claim::kWhenDead && roster_.find_alive(worker) == nullptr);
}

// Each life of a worker makes events, and each name a write of the journal. One
// that comes too early is taken later: its worker repeats what it says.
bool Coordinator::too_many_lives(const pb::Report& r, const std::string& key) {
  const Roster::Member* m = roster_.find(r.worker());
  if (key.empty() ||
      (m != nullptr && m->report.incarnation() == r.incarnation()) ||
      roster_.judge(r, now_ms_) != Roster::Verdict::kTaken ||
      lives_.admits(key, now_ms_))
    return false;
  ++dropped_;
  tell_refused(r.worker(), "too many new workers of one key at once");
  return true;
}

// REQUIRES: may_use_name(), which the shell has asked.
void Coordinator::register_name(const std::string& worker,
                                const std::string& key) {
  std::string& owner = owners_[worker];
  if (owner == key) return;
  owner = key;
  auto* owners = durable_.mutable_owners();
  // A key that has too many loses its oldest one, of a worker that is gone.
  int oldest = -1;
  int of_key = 0;
  for (int i = owners->size() - 1; i >= 0; --i) {
    const pb::Durable::NameOwner& o = owners->Get(i);
    if (o.worker() == worker) {
      owners->DeleteSubrange(i, 1);
      if (oldest > i) --oldest;
    } else if (o.key() == key && ++of_key > 0 && !is_member(o.worker())) {
      oldest = i;
    }
  }
  if (of_key < kMaxNamesOfKey) oldest = owners->size() < kMaxOwners ? -1 : 0;
  if (oldest >= 0) {
    owners_.erase(owners->Get(oldest).worker());
    owners->DeleteSubrange(oldest, 1);
  }
  pb::Durable::NameOwner* entry = owners->Add();
  entry->set_worker(worker);
  entry->set_key(key);
  persist();
}

}  // namespace remesh::core
