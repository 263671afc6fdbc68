// Which key may use which worker name: the first one that registered it.
#include "coordinator/core/coordinator.h"

namespace remesh::core {
namespace {

constexpr int kMaxOwners = 1 << 16;

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

// REQUIRES: may_use_name(), which the shell has asked.
void Coordinator::register_name(const std::string& worker,
                                const std::string& key) {
  std::string& owner = owners_[worker];
  if (owner == key) return;
  owner = key;
  auto* owners = durable_.mutable_owners();
  for (int i = owners->size() - 1; i >= 0; --i)
    if (owners->Get(i).worker() == worker) owners->DeleteSubrange(i, 1);
  if (owners->size() >= kMaxOwners) {
    owners_.erase(owners->Get(0).worker());
    owners->DeleteSubrange(0, 1);
  }
  pb::Durable::NameOwner* entry = owners->Add();
  entry->set_worker(worker);
  entry->set_key(key);
  persist();
}

}  // namespace remesh::core
