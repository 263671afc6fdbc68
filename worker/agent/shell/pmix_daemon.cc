#include "worker/agent/shell/pmix_daemon.h"

#include <pmix.h>
#include <pmix_server.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>

#include "proto/base/check.h"
#include "proto/base/socket_guard.h"
#include "proto/base/text.h"
#include "worker/agent/shell/pmix_call.h"

namespace remesh::agent {
namespace {

// The server of this process, while it lives. PMIx's upcalls carry no user
// pointer, and PMIx allows one server per process.
std::atomic<PmixServer*> g_server{nullptr};

// ------------------------------------------------ upcalls, on the PMIx thread

pmix_status_t fence_upcall(const pmix_proc_t procs[], size_t nprocs,
                           const pmix_info_t*, size_t, char* data, size_t ndata,
                           pmix_modex_cbfunc_t callback, void* argument) {
  std::string blob(data == nullptr ? "" : data, data == nullptr ? 0 : ndata);
  std::free(data);
  PmixServer* server = g_server.load();
  if (server == nullptr || nprocs == 0) return PMIX_ERR_NOT_AVAILABLE;
  const auto end = [callback, argument](const std::string* all) {
    if (all == nullptr)
      return callback(PMIX_ERR_TIMEOUT, nullptr, 0, argument, nullptr, nullptr);
    // PMIx frees the copy with std::free.
    char* copy = static_cast<char*>(std::malloc(all->size() + 1));
    CHECK(copy != nullptr);
    std::copy(all->begin(), all->end(), copy);
    callback(PMIX_SUCCESS, copy, all->size(), argument, std::free, copy);
  };
  return server->on_fence(procs[0].nspace, std::move(blob), end)
             ? PMIX_SUCCESS
             : PMIX_ERR_NOT_FOUND;
}

pmix_status_t connected_upcall(const pmix_proc_t*, void*, pmix_info_t*, size_t,
                               pmix_op_cbfunc_t, void*) {
  return PMIX_OPERATION_SUCCEEDED;
}

pmix_status_t finalized_upcall(const pmix_proc_t*, void*, pmix_op_cbfunc_t,
                               void*) {
  return PMIX_OPERATION_SUCCEEDED;
}

pmix_status_t abort_upcall(const pmix_proc_t* proc, void*, int status,
                           const char* message, pmix_proc_t*, size_t,
                           pmix_op_cbfunc_t callback, void* argument) {
  if (PmixServer* server = g_server.load(); server != nullptr)
    server->on_abort({.kind = PmixUpcall::kAbort,
                      .space = proc->nspace,
                      .blob = message == nullptr ? "" : message,
                      .rank = static_cast<int>(proc->rank),
                      .status = status});
  if (callback != nullptr) callback(PMIX_SUCCESS, argument);
  return PMIX_SUCCESS;
}

pmix_status_t modex_upcall(const pmix_proc_t*, const pmix_info_t*, size_t,
                           pmix_modex_cbfunc_t, void*) {
  return PMIX_ERR_NOT_SUPPORTED;
}

// Called with PMIX_ERR_LOST_CONNECTION when a rank has died. The daemon handles
// the exit of the process instead; the handler only replaces PMIx's default.
void event_upcall(size_t, pmix_status_t, const pmix_proc_t*, pmix_info_t*,
                  size_t, pmix_info_t*, size_t,
                  pmix_event_notification_cbfunc_fn_t callback,
                  void* argument) {
  if (callback != nullptr)
    callback(PMIX_EVENT_ACTION_COMPLETE, nullptr, 0, nullptr, nullptr,
             argument);
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::vector<std::string> words;
  for (int r : ranks) words.push_back(std::to_string(r));
  return join(words, ",");
}

// The location of rank `rank`, for PMIX_PROC_INFO_ARRAY.
pmix_data_array_t* proc_info(int rank, uint16_t local_rank, uint32_t node_id,
                             const std::string& node) {
  pmix_data_array_t* array = nullptr;
  PMIX_DATA_ARRAY_CREATE(array, 8, PMIX_INFO);
  auto* a = static_cast<pmix_info_t*>(array->array);
  const pmix_rank_t r = static_cast<pmix_rank_t>(rank);
  const uint32_t app = 0;
  PMIX_INFO_LOAD(&a[0], PMIX_RANK, &r, PMIX_PROC_RANK);
  PMIX_INFO_LOAD(&a[1], PMIX_GLOBAL_RANK, &r, PMIX_PROC_RANK);
  PMIX_INFO_LOAD(&a[2], PMIX_APP_RANK, &r, PMIX_PROC_RANK);
  PMIX_INFO_LOAD(&a[3], PMIX_LOCAL_RANK, &local_rank, PMIX_UINT16);
  PMIX_INFO_LOAD(&a[4], PMIX_NODE_RANK, &local_rank, PMIX_UINT16);
  PMIX_INFO_LOAD(&a[5], PMIX_NODEID, &node_id, PMIX_UINT32);
  PMIX_INFO_LOAD(&a[6], PMIX_APPNUM, &app, PMIX_UINT32);
  PMIX_INFO_LOAD(&a[7], PMIX_HOSTNAME, node.c_str(), PMIX_STRING);
  return array;
}

// The maps of nodes and ranks, and the information on each rank.
Status add_map(const PmixNamespace& space, Infos& infos) {
  std::vector<std::string> nodes, ranks;
  for (const auto& n : space.nodes) {
    nodes.push_back(n.name);
    ranks.push_back(ranks_text(n.ranks));
  }
  char* node_map = nullptr;
  char* proc_map = nullptr;
  pmix_status_t rc = PMIx_generate_regex(join(nodes, ",").c_str(), &node_map);
  if (rc != PMIX_SUCCESS) return pmix_error("map of nodes", rc);
  infos.add_regex(PMIX_NODE_MAP, node_map);
  rc = PMIx_generate_ppn(join(ranks, ";").c_str(), &proc_map);
  if (rc != PMIX_SUCCESS) return pmix_error("map of ranks", rc);
  infos.add_regex(PMIX_PROC_MAP, proc_map);
  for (size_t n = 0; n < space.nodes.size(); ++n) {
    const auto& node = space.nodes[n];
    for (size_t i = 0; i < node.ranks.size(); ++i)
      infos.add_array(PMIX_PROC_INFO_ARRAY,
                      proc_info(node.ranks[i], static_cast<uint16_t>(i),
                                static_cast<uint32_t>(n), node.name));
  }
  return ok_status();
}

}  // namespace

bool PmixServer::on_fence(const std::string& name, std::string blob,
                          EndFence end) {
  {
    const std::lock_guard lock(mutex_);
    auto it = spaces_.find(name);
    if (it == spaces_.end()) return false;
    const int64_t index = it->second.num_fences++;
    it->second.open[index] = std::move(end);
    upcalls_.push_back(
        {.space = name, .index = index, .blob = std::move(blob)});
  }
  wake();
  return true;
}

void PmixServer::on_abort(PmixUpcall upcall) {
  {
    const std::lock_guard lock(mutex_);
    upcalls_.push_back(std::move(upcall));
  }
  wake();
}

void PmixServer::wake() {
  const uint64_t one = 1;
  (void)!write(event_fd_, &one, sizeof(one));
}

// ----------------------------------------------- calls, on the owner's thread

Result<std::unique_ptr<PmixServer>> PmixServer::start(
    const PmixOptions& options) {
  std::unique_ptr<PmixServer> server(new PmixServer);
  RETURN_IF_ERROR(server->init(options));
  return server;
}

PmixServer::~PmixServer() {
  // PMIx_server_finalize would hang if PMIx is stuck.
  if (running_ && !stuck()) {
    for (const auto& [name, space] : spaces_) fail_fences(name);
    PMIx_server_finalize();
  }
  g_server.store(nullptr);
  if (event_fd_ >= 0) close(event_fd_);
}

Status PmixServer::init(const PmixOptions& options) {
  PmixServer* none = nullptr;
  CHECK_MSG(g_server.compare_exchange_strong(none, this),
            "two PMIx servers in one process");
  node_ = options.node;
  event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event_fd_ < 0) return errno_error("PMIx: eventfd", errno);
  // PMIx listens on a port of loopback, for all users of this host.
  guard_sockets();
  // PMIx writes to sockets of ranks that may just have died.
  std::signal(SIGPIPE, SIG_IGN);
  // The default data store leaks 40 kB per namespace.
  setenv("PMIX_MCA_gds", "hash", 1);
  // Static: PMIx keeps pointers into it.
  static pmix_server_module_t module = [] {
    pmix_server_module_t m{};
    m.client_connected2 = connected_upcall;
    m.client_finalized = finalized_upcall;
    m.abort = abort_upcall;
    m.fence_nb = fence_upcall;
    m.direct_modex = modex_upcall;
    return m;
  }();
  Infos infos;
  const pmix_rank_t rank = 0;
  infos.add(PMIX_SERVER_TMPDIR, options.scratch);
  infos.add(PMIX_SERVER_NSPACE, "remesh-worker-" + options.node);
  infos.add(PMIX_SERVER_RANK, rank, PMIX_PROC_RANK);
  infos.add(PMIX_HOSTNAME, options.node);
  // When PMIx 4.2 deregisters a rank whose exit it has not noticed yet, it
  // closes the socket without informing libevent. With epoll, a later rank that
  // gets the same descriptor number receives no events and hangs in PMIx_Init.
  // With poll, libevent notices the closed socket and drops the stale event.
  setenv("EVENT_NOEPOLL", "1", 1);
  pmix_status_t rc = PMIx_server_init(&module, infos.data(), infos.size());
  unsetenv("EVENT_NOEPOLL");
  if (rc != PMIX_SUCCESS) return pmix_error("starting the server", rc);
  running_ = true;
  const auto answer = Answer::make();
  void* shared = answer->share();
  rc = PMIx_Register_event_handler(
      nullptr, 0, nullptr, 0, event_upcall,
      [](pmix_status_t status, size_t, void* p) { Answer::set(status, p); },
      shared);
  // Returns the id of the handler, 0 or more, if there will be no callback.
  rc = answer->wait(rc > 0 ? PMIX_OPERATION_SUCCEEDED : rc, shared);
  if (rc != PMIX_SUCCESS) return pmix_error("registering for events", rc);
  return ok_status();
}

Status PmixServer::register_namespace(const PmixNamespace& space) {
  const PmixNamespace::Node* mine = nullptr;
  uint32_t total = 0;
  for (const auto& n : space.nodes) {
    total += static_cast<uint32_t>(n.ranks.size());
    if (n.name == node_) mine = &n;
  }
  CHECK_MSG(mine != nullptr && !mine->ranks.empty(), "no rank on this node");
  const uint32_t local = static_cast<uint32_t>(mine->ranks.size());
  const uint32_t num_nodes = static_cast<uint32_t>(space.nodes.size());
  const uint32_t one = 1, app = 0;
  const pmix_rank_t leader = static_cast<pmix_rank_t>(mine->ranks[0]);
  Infos infos;
  infos.add(PMIX_JOB_SIZE, total, PMIX_UINT32);
  infos.add(PMIX_UNIV_SIZE, total, PMIX_UINT32);
  infos.add(PMIX_MAX_PROCS, total, PMIX_UINT32);
  infos.add(PMIX_LOCAL_SIZE, local, PMIX_UINT32);
  infos.add(PMIX_NUM_NODES, num_nodes, PMIX_UINT32);
  infos.add(PMIX_JOB_NUM_APPS, one, PMIX_UINT32);
  infos.add(PMIX_APPNUM, app, PMIX_UINT32);
  infos.add(PMIX_JOBID, space.name);
  infos.add(PMIX_LOCAL_PEERS, ranks_text(mine->ranks));
  infos.add(PMIX_LOCALLDR, leader, PMIX_PROC_RANK);
  infos.add(PMIX_TMPDIR, space.scratch);
  RETURN_IF_ERROR(add_map(space, infos));
  {
    const std::lock_guard lock(mutex_);
    spaces_[space.name] = Space{};
  }
  const pmix_status_t rc = call_and_wait([&](auto callback, void* arg) {
    return PMIx_server_register_nspace(space.name.c_str(),
                                       static_cast<int>(local), infos.data(),
                                       infos.size(), callback, arg);
  });
  if (rc != PMIX_SUCCESS) {
    const std::lock_guard lock(mutex_);
    spaces_.erase(space.name);
    return pmix_error("registering " + space.name, rc);
  }
  return ok_status();
}

Result<std::vector<std::string>> PmixServer::register_rank(
    const std::string& space, int rank) {
  pmix_proc_t proc;
  PMIX_LOAD_PROCID(&proc, space.c_str(), static_cast<pmix_rank_t>(rank));
  pmix_status_t rc = call_and_wait([&](auto callback, void* arg) {
    return PMIx_server_register_client(&proc, geteuid(), getegid(), nullptr,
                                       callback, arg);
  });
  const std::string what = space + " rank " + std::to_string(rank);
  if (rc != PMIX_SUCCESS) return pmix_error("registering " + what, rc);
  {
    const std::lock_guard lock(mutex_);
    spaces_.at(space).registered.push_back(rank);
  }
  char** env = nullptr;
  rc = PMIx_server_setup_fork(&proc, &env);
  if (rc != PMIX_SUCCESS) return pmix_error("environment of " + what, rc);
  std::vector<std::string> out;
  for (char** e = env; e != nullptr && *e != nullptr; ++e) {
    out.emplace_back(*e);
    std::free(*e);
  }
  std::free(env);
  return out;
}

bool PmixServer::stuck() const { return g_stuck.load(); }

std::vector<PmixUpcall> PmixServer::take_upcalls() {
  uint64_t n = 0;
  (void)!read(event_fd_, &n, sizeof(n));
  const std::lock_guard lock(mutex_);
  return std::exchange(upcalls_, {});
}

bool PmixServer::complete_fence(const std::string& space, int64_t index,
                                const std::string& blob) {
  EndFence end;
  {
    const std::lock_guard lock(mutex_);
    auto it = spaces_.find(space);
    if (it == spaces_.end()) return false;
    auto node = it->second.open.extract(index);
    if (node.empty()) return false;
    end = std::move(node.mapped());
  }
  end(&blob);
  return true;
}

void PmixServer::fail_fences(const std::string& space) {
  std::map<int64_t, EndFence> open;
  {
    const std::lock_guard lock(mutex_);
    auto it = spaces_.find(space);
    if (it == spaces_.end()) return;
    open = std::exchange(it->second.open, {});
  }
  for (const auto& [index, end] : open) end(nullptr);
}

Status PmixServer::deregister(const std::string& space) {
  fail_fences(space);
  std::vector<int> registered;
  {
    const std::lock_guard lock(mutex_);
    auto node = spaces_.extract(space);
    if (node.empty()) return not_found("PMIx: no namespace " + space);
    registered = node.mapped().registered;
    std::erase_if(upcalls_,
                  [&](const PmixUpcall& u) { return u.space == space; });
  }
  for (int rank : registered) {
    pmix_proc_t proc;
    PMIX_LOAD_PROCID(&proc, space.c_str(), static_cast<pmix_rank_t>(rank));
    const pmix_status_t rc = call_and_wait([&](auto callback, void* arg) {
      PMIx_server_deregister_client(&proc, callback, arg);
      return PMIX_SUCCESS;
    });
    if (rc != PMIX_SUCCESS)
      return pmix_error("deregistering a rank of " + space, rc);
  }
  const pmix_status_t rc = call_and_wait([&](auto callback, void* arg) {
    PMIx_server_deregister_nspace(space.c_str(), callback, arg);
    return PMIX_SUCCESS;
  });
  if (rc != PMIX_SUCCESS) return pmix_error("deregistering " + space, rc);
  return ok_status();
}

}  // namespace remesh::agent
