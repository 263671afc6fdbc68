#include "coordinator/core/name_owners.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "proto/limits/plausible.h"

namespace remesh::core {
namespace {

constexpr int kMaxOwners = limits::kMaxWorkers;

using Owners = google::protobuf::RepeatedPtrField<pb::NameOwners::Owner>;

// The place of the name to forget if there are too many: of the key that has
// the most, so that nobody's names drive out those of others, the oldest one of
// a worker that is gone. Of keys with as many, the last one. -1: none is gone.
int to_forget(const Owners& owners, const Roster& roster) {
  struct Names {
    int all = 0, oldest_gone = -1;
  };
  std::map<std::string_view, Names> of_key;
  for (int i = owners.size() - 1; i >= 0; --i) {
    Names& n = of_key[owners.Get(i).key()];
    ++n.all;
    if (roster.find(owners.Get(i).worker()) == nullptr) n.oldest_gone = i;
  }
  std::pair most(0, -1);
  for (const auto& [key, n] : of_key)
    if (n.oldest_gone >= 0) most = std::max(most, {n.all, n.oldest_gone});
  return most.second;
}

}  // namespace

NameOwners::NameOwners(const pb::NameOwners& journaled) {
  for (const pb::NameOwners::Owner& o : journaled.owners())
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
                     const Roster& roster, pb::NameOwners* journaled) {
  std::string& owner = keys_[worker];
  if (owner == key) return false;
  owner = key;
  Owners& owners = *journaled->mutable_owners();
  owners.erase(
      std::remove_if(owners.begin(), owners.end(),
                     [&](const auto& o) { return o.worker() == worker; }),
      owners.end());
  const int oldest =
      owners.size() < kMaxOwners ? -1 : to_forget(owners, roster);
  if (oldest >= 0) {
    keys_.erase(owners.Get(oldest).worker());
    owners.DeleteSubrange(oldest, 1);
  }
  pb::NameOwners::Owner* entry = owners.Add();
  entry->set_worker(worker);
  entry->set_key(key);
  return true;
}

}  // namespace remesh::core
