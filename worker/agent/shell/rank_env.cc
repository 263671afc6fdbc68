#include "worker/agent/shell/rank_env.h"

#include <fmt/format.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "checkpoint/memory/replica_placement.h"
#include "proto/base/socket_guard.h"

extern char** environ;

namespace remesh::agent {
namespace {

bool is_launcher_variable(std::string_view entry) {
  for (std::string_view prefix :
       {"SLURM_", "FLUX_", "JSM_", "PMI", "OMPI_", "PRTE_", "HYDRA_",
        kListenVariable, kPeersVariable})
    if (entry.substr(0, prefix.size()) == prefix) return true;
  return false;
}

std::string_view key_of(std::string_view entry) {
  return entry.substr(0, entry.find('='));
}

void put(std::vector<std::string>& env, const std::string& entry) {
  std::erase_if(
      env, [&](const std::string& e) { return key_of(e) == key_of(entry); });
  env.push_back(entry);
}

void put_network(const MpiSettings& settings, std::vector<std::string>& env) {
  if (!settings.tcp) return put(env, "OMPI_MCA_btl=self,vader");
  const MpiNetwork& net = *settings.tcp;
  put(env, "OMPI_MCA_btl=self,vader,tcp");
  put(env, "OMPI_MCA_btl_tcp_if_include=" + net.interfaces);
  if (net.unused_family != 0)
    put(env,
        fmt::format("OMPI_MCA_btl_tcp_disable_family={}", net.unused_family));
  if (!net.listen.empty())
    put(env, fmt::format("{}={}", kListenVariable, net.listen));
  if (!net.peers_within.empty())
    put(env, fmt::format("{}={}", kPeersVariable, net.peers_within));
  if (settings.ports.first == 0) return;
  const int count = settings.ports.last - settings.ports.first + 1;
  for (const char* family : {"v4", "v6"}) {
    put(env, fmt::format("OMPI_MCA_btl_tcp_port_min_{}={}", family,
                         settings.ports.first));
    put(env, fmt::format("OMPI_MCA_btl_tcp_port_range_{}={}", family, count));
  }
}

}  // namespace

Result<LocalPlacement> place(const pb::Assignment& assignment,
                             const std::string& worker) {
  const auto hosts = memory::hosts_by_worker(assignment);
  const std::string what =
      fmt::format("generation {}", assignment.generation());
  std::map<std::string, std::vector<int>> ranks;
  std::vector<bool> seen(static_cast<size_t>(assignment.ranks_size()), false);
  LocalPlacement out;
  std::string first_host;
  const auto own = hosts.find(worker);
  for (const pb::RankPlace& p : assignment.ranks()) {
    const auto host = hosts.find(p.worker());
    if (host == hosts.end())
      return invalid_argument(
          fmt::format("{}: rank {} is placed on unknown "
                      "worker '{}'",
                      what, p.rank(), p.worker()));
    if (p.rank() < 0 || p.rank() >= assignment.ranks_size() ||
        seen[static_cast<size_t>(p.rank())])
      return invalid_argument(fmt::format(
          "{}: rank {} is out of range or placed twice", what, p.rank()));
    seen[static_cast<size_t>(p.rank())] = true;
    ranks[p.worker()].push_back(p.rank());
    if (first_host.empty()) first_host = host->second;
    out.one_host &= host->second == first_host;
    if (own != hosts.end() && host->second == own->second)
      out.wanted_cores += std::max(1, p.threads());
    if (p.worker() == worker) out.local.push_back({p.rank(), p.threads()});
  }
  std::sort(out.local.begin(), out.local.end(),
            [](const auto& a, const auto& b) { return a.rank < b.rank; });
  for (const std::string& w : assignment.workers()) {
    auto node = ranks.extract(w);
    if (node.empty()) continue;
    std::sort(node.mapped().begin(), node.mapped().end());
    out.nodes.push_back({w, std::move(node.mapped())});
  }
  return out;
}

std::vector<std::string> rank_environment(const std::vector<std::string>& base,
                                          const std::vector<std::string>& pmix,
                                          const MpiSettings& settings) {
  std::vector<std::string> env;
  for (const std::string& e : base)
    if (!is_launcher_variable(e)) put(env, e);
  for (const std::string& e : pmix) put(env, e);
  for (const char* e :
       {"PMIX_MCA_gds=hash", "OMPI_MCA_schizo=ompi", "OMPI_MCA_ess=pmi",
        "OMPI_MCA_pmix=ext3x", "OMPI_MCA_orte_create_session_dirs=0",
        "OMPI_MCA_hwloc_base_binding_policy=none",
        "OMPI_MCA_orte_externally_bound=1", "OMPI_MCA_pml=ob1",
        // The other components create files of fixed names in /dev/shm, which
        // remain after a kill.
        "OMPI_MCA_shmem=mmap", "OMPI_MCA_mpi_yield_when_idle=1"})
    put(env, e);
  put(env, "OMPI_MCA_btl_vader_backing_directory=" + settings.shared_folder);
  if (!settings.cma) put(env, "OMPI_MCA_btl_vader_single_copy_mechanism=none");
  put_network(settings, env);
  // A spinning thread would take the core from a working one.
  if (settings.sleep_when_idle) put(env, "OMP_WAIT_POLICY=passive");
  if (settings.threads > 0)
    put(env, fmt::format("OMP_NUM_THREADS={}", settings.threads));
  return env;
}

std::vector<std::string> own_environment() {
  std::vector<std::string> out;
  for (char** e = environ; *e != nullptr; ++e) out.emplace_back(*e);
  return out;
}

bool cma_works() {
  char from = 1, to = 0;
  const iovec local{&to, 1}, remote{&from, 1};
  return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == 1;
}

}  // namespace remesh::agent
