#include "coordinator/core/name_owners.h"

#include "proto/limits/plausible.h"

namespace remesh::core {
namespace {

constexpr int kMaxOwners = limits::kMaxWorkers;
constexpr int kMaxNamesOfKey = limits::kMaxWorkers;

}  // namespace

NameOwners::NameOwners(const pb::Durable& durable) {
  for (const pb::Durable::NameOwner& o : durable.owners())
    keys_[o.worker()] = o.key();
}

std::string NameOwners::owner_of(const std::string& worker) const {
  const auto it = keys_.find(worker);
  return it == keys_.end() ? "" : it->second;
}

std::vector<std::string> NameOwners::workers_of(const std::string& key) const {
  std::vector<std::string> out;
  for (const auto& [worker, owner] : keys_)
    if (owner == key) out.push_back(worker);
  return out;
}

bool NameOwners::may_use(const std::string& worker, const std::string& key,
                         Claim claim, const Roster& roster) const {
  const std::string owner = owner_of(worker);
  return owner.empty() || owner == key || claim == Claim::kNow ||
         (claim == Claim::kWhenDead && roster.find_alive(worker) == nullptr);
}

bool NameOwners::add(const std::string& worker, const std::string& key,
                     const Roster& roster, pb::Durable* durable) {
  std::string& owner = keys_[worker];
  if (owner == key) return false;
  owner = key;
  auto* owners = durable->mutable_owners();
  // A key that has too many loses its oldest one, of a worker that is gone; if
  // there are too many in all, the oldest of those goes.
  int oldest = -1, oldest_gone = -1;
  int of_key = 0;
  for (int i = owners->size() - 1; i >= 0; --i) {
    const pb::Durable::NameOwner& o = owners->Get(i);
    if (o.worker() == worker) {
      owners->DeleteSubrange(i, 1);
      if (oldest > i) --oldest;
      if (oldest_gone > i) --oldest_gone;
      continue;
    }
    const bool gone = roster.find(o.worker()) == nullptr;
    if (gone) oldest_gone = i;
    if (o.key() == key && ++of_key > 0 && gone) oldest = i;
  }
  if (of_key < kMaxNamesOfKey)
    oldest = owners->size() < kMaxOwners ? -1 : oldest_gone;
  if (oldest >= 0) {
    keys_.erase(owners->Get(oldest).worker());
    owners->DeleteSubrange(oldest, 1);
  }
  pb::Durable::NameOwner* entry = owners->Add();
  entry->set_worker(worker);
  entry->set_key(key);
  return true;
}

}  // namespace remesh::core
