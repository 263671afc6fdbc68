#include "worker/agent/shell/launcher.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <span>
#include <thread>
#include <utility>

#include "checkpoint/memory/replica_placement.h"
#include "proto/base/check.h"
#include "proto/base/child.h"
#include "proto/base/clock.h"
#include "proto/base/file_system.h"
#include "proto/base/machine.h"
#include "proto/base/process.h"
#include "proto/rundir/events.h"
#include "proto/rundir/paths.h"
#include "worker/agent/shell/process_control.h"
#include "worker/agent/shell/rank_env.h"

namespace remesh::agent {
namespace {

constexpr size_t kMaxLineBytes = 500;
constexpr size_t kTailLines = 6;
// What Open MPI's shared-memory transport may take for each rank.
constexpr uint64_t kSharedBytesPerRank = 32 << 20;
constexpr int kReapTimeoutMs = 5000;
constexpr int64_t kMaxStoragePatienceMs = 1000;

// Kills the rank and its child processes.
void kill_group(pid_t pid) {
  ::kill(-pid, SIGKILL);
  ::kill(pid, SIGKILL);
}

Status write_spec(const std::string& path, const pb::RankSpec& spec) {
  const std::string text = spec.SerializeAsString();
  ASSIGN_OR_RETURN(const auto file, posix_file_system()->create(path));
  RETURN_IF_ERROR(file->write_at(0, std::as_bytes(std::span(text))));
  return file->close();
}

// PMIx allows at most 255 bytes, without '@', ':' and '/'.
std::string namespace_of(const std::string& job, int64_t generation) {
  return fmt::format("{}.g{}", job.substr(0, 200), generation);
}

}  // namespace

Launcher::Launcher(LauncherOptions options, Scratch* scratch, wire::Loop* loop,
                   Sink sink)
    : options_(std::move(options)),
      scratch_(scratch),
      loop_(loop),
      sink_(std::move(sink)),
      log_(Logger::null()),
      cma_(cma_works()) {}

Result<std::unique_ptr<Launcher>> Launcher::make(LauncherOptions options,
                                                 Scratch* scratch,
                                                 wire::Loop* loop, Sink sink) {
  std::unique_ptr<Launcher> out(
      new Launcher(std::move(options), scratch, loop, std::move(sink)));
  out->base_env_ = own_environment();
  ASSIGN_OR_RETURN(out->pmix_, PmixServer::start({out->options_.worker,
                                                  scratch->pmix_folder()}));
  Launcher* self = out.get();
  loop->watch(self->pmix_->event_fd(), [self] { self->on_pmix(); });
  return out;
}

Launcher::~Launcher() {
  shut_down();
  if (pmix_) loop_->unwatch(pmix_->event_fd());
}

// ------------------------------------------------------------------ starting

void Launcher::spawn(const pb::Assignment& assignment, uint64_t state_job) {
  CHECK(generation_ == 0 && ranks_.empty());
  CHECK(assignment.generation() > 0);
  generation_ = assignment.generation();
  mesh_ = assignment.mesh();
  run_dir_ = assignment.run_dir();
  host_ = memory::hosts_by_worker(assignment)[options_.worker];
  killed_ = false;
  storage_patience_ms_ = std::min(
      kMaxStoragePatienceMs, assignment.job().elastic().dead_after_ms() / 4);
  state_job_ = assignment.job().elastic().keep_state() ? state_job : 0;
  oom_kills_ = oom_kills();
  const int64_t start = monotonic_ms();
  int failed = -1;
  const Status status = start_generation(assignment, &failed);
  for (const auto& [rank, r] : ranks_)
    sink_(RankStarted{generation_, rank, r.pid});
  if (!status.ok()) {
    log_->error("spawn_failed", {{"generation", generation_},
                                 {"rank", failed},
                                 {"error", status.message()}});
    restart_if_stuck();
    sink_(SpawnFailed{.generation = generation_,
                      .rank = failed,
                      .error = status.message(),
                      .permanent = status.code() == Code::kDenied});
    return;
  }
  log_->info("ranks_started", {{"generation", generation_},
                               {"ranks", ranks_.size()},
                               {"ms", monotonic_ms() - start}});
}

Status Launcher::start_generation(const pb::Assignment& assignment,
                                  int* failed) {
  ASSIGN_OR_RETURN(const LocalPlacement placement,
                   place(assignment, options_.worker));
  if (placement.local.empty())
    return invalid_argument(fmt::format("generation {} has no rank for '{}'",
                                        generation_, options_.worker));
  ASSIGN_OR_RETURN(
      const Scratch::Generation folders,
      scratch_->make_generation(generation_,
                                kSharedBytesPerRank * placement.local.size()));
  if (folders.shared.starts_with(folders.folder))
    log_->warn("mpi_memory_on_disk",
               {{"generation", generation_}, {"folder", folders.shared}});
  if (state_job_ != 0) RETURN_IF_ERROR(scratch_->make_state_folder());
  network_.reset();
  apart_.clear();
  if (placement.nodes.size() > 1) {
    const std::string interfaces =
        placement.one_host ? "lo" : options_.tcp_interfaces;
    network_ = mpi_network(interfaces);
    RETURN_IF_ERROR(check_listens(*network_, interfaces));
  }
  if (options_.wireguard != nullptr && network_ && !placement.one_host) {
    RETURN_IF_ERROR(options_.wireguard->restore());
    network_ = options_.wireguard->network(*network_);
    if (network_->tunnel.empty())
      return invalid_argument(
          "WireGuard has no address to tell the other hosts; give --interface "
          "of a network that leads there");
  }
  if (network_)
    RETURN_IF_ERROR(
        check_ports(*network_, options_.ports, placement.local.size()));
  std::string logs = rundir::rank_logs_path(assignment.run_dir(), generation_);
  const auto outputs = open_outputs(placement, folders.folder, &logs);
  storage_.start([run = assignment.run_dir(), g = generation_,
                  keep = options_.keep_generations] {
    remove_old_logs(run, g, keep);
    remove_old_traces(rundir::traces_path(run), keep);
  });
  // The name must be the same on every worker, so it is derived from the
  // assignment.
  const PmixNamespace space{
      .name = namespace_of(assignment.job().job().name(), generation_),
      .nodes = placement.nodes,
      .scratch = folders.folder};
  RETURN_IF_ERROR(pmix_->register_namespace(space));
  space_ = space.name;
  // Register all ranks before the first one runs: none may reach a fence before
  // PMIx knows the others.
  std::map<int, std::vector<std::string>> env;
  for (const auto& l : placement.local) {
    *failed = l.rank;
    ASSIGN_OR_RETURN(env[l.rank], pmix_->register_rank(space_, l.rank));
  }
  exec_until_ms_ = monotonic_ms() + ChildOptions().patience_ms;
  for (const auto& l : placement.local) {
    *failed = l.rank;
    RETURN_IF_ERROR(start_rank(assignment, l, placement, folders, logs,
                               *outputs, env[l.rank]));
  }
  return ok_status();
}

// Without files if they do not open in time, or cannot be opened; in the second
// case *logs becomes `local`.
std::shared_ptr<RankOutputs> Launcher::open_outputs(
    const LocalPlacement& placement, const std::string& local,
    std::string* logs) {
  std::vector<int> ranks;
  for (const auto& l : placement.local) ranks.push_back(l.rank);
  auto outputs = std::make_shared<RankOutputs>();
  const auto result = std::make_shared<Status>();
  const bool ended = storage_.within(storage_patience_ms_,
                                     [folder = *logs, ranks, outputs, result] {
                                       *result = outputs->open(folder, ranks);
                                     });
  if (ended && result->ok()) return outputs;
  log_->warn(ended ? "rank_logs_not_opened" : "storage_hangs",
             {{"path", *logs},
              {"generation", generation_},
              {"error", ended ? result->message() : ""},
              {"next", "the ranks print to local files"}});
  if (ended) *logs = local;
  return std::make_shared<RankOutputs>();
}

Status Launcher::start_rank(const pb::Assignment& assignment,
                            const LocalPlacement::Local& local,
                            const LocalPlacement& placement,
                            const Scratch::Generation& folders,
                            const std::string& log_folder,
                            const RankOutputs& outputs,
                            const std::vector<std::string>& pmix_env) {
  const int rank = local.rank;
  const int threads = local.threads;
  Rank r;
  r.rank = rank;
  r.logs = rank_log_paths(log_folder, rank);
  ASSIGN_OR_RETURN(r.board, board::Board::create(generation_, rank));
  r.board->beat(monotonic_ms());
  pb::RankSpec spec;
  *spec.mutable_assignment() = assignment;
  spec.set_rank(rank);
  if (threads > 0) spec.set_threads(threads);
  spec.set_log_path(r.logs.log);
  if (state_job_ != 0) {
    spec.set_state_folder(scratch_->state_folder());
    spec.set_state_job(state_job_);
  }
  const std::string spec_path =
      fmt::format("{}/rank-{}.spec", folders.folder, rank);
  RETURN_IF_ERROR(write_spec(spec_path, spec));
  const MpiSettings settings{
      .shared_folder = folders.shared,
      .tcp = network_,
      .ports = options_.ports,
      .sleep_when_idle = placement.wanted_cores > options_.cores,
      .cma = cma_,
      .threads = threads};
  ChildOptions child;
  child.argv = {path_of_program(options_.trainer, trainer_fd_), "--spec",
                spec_path, "--board-fd", std::to_string(kChildFd)};
  child.env = rank_environment(base_env_, pmix_env, settings);
  child.output_fd = outputs.fd(rank);
  if (child.output_fd < 0)
    child.output = r.logs.out =
        fmt::format("{}/rank-{}.out", folders.folder, rank);
  child.pass_fd = r.board->fd();
  child.patience_ms =
      static_cast<int>(std::max<int64_t>(0, exec_until_ms_ - monotonic_ms()));
  ASSIGN_OR_RETURN(const Child started, start_child(child));
  r.pid = started.pid;
  r.pidfd = started.pidfd;
  scratch_->note_rank(r.pid);
  if (r.pidfd >= 0) loop_->watch(r.pidfd, [this] { reap(); });
  ranks_.emplace(rank, std::move(r));
  return ok_status();
}

// -------------------------------------------------------------- while it runs

void Launcher::on_pmix() {
  for (PmixUpcall& u : pmix_->take_upcalls()) {
    if (u.space != space_) continue;
    if (u.kind == PmixUpcall::kAbort) {
      // Only logged: the rank will exit, and its exit is handled.
      log_->warn("mpi_abort", {{"generation", generation_},
                               {"rank", u.rank},
                               {"status", u.status},
                               {"message", u.blob}});
      continue;
    }
    if (u.index == 0 && network_)
      u.blob = with_network(u.blob, options_.worker, *network_);
    sink_(LocalFence{generation_, u.index, std::move(u.blob)});
  }
}

std::string Launcher::connect_networks(const FenceNetworks& fence) {
  if (!network_) return "";
  FenceNetworks others = fence;
  others.tunnels.erase(options_.worker);
  std::vector<std::string> tunnels;
  for (const auto& [worker, tunnel] : others.tunnels) {
    if (tunnel.empty() != network_->tunnel.empty())
      return fmt::format(
          "worker {} runs {} --wireguard, this one {}: give it to all workers "
          "of the job, or to none",
          worker, tunnel.empty() ? "without" : "with",
          tunnel.empty() ? "with it" : "without");
    if (tunnel.empty()) continue;
    const auto end = parse_tunnel(tunnel);
    if (!end.ok()) return "worker " + worker + ": " + end.status().message();
    tunnels.push_back(tunnel);
    // What its key stands for, whatever it says.
    others.addresses[worker] = {tunnel_address(end->key) + "/128"};
  }
  if (!tunnels.empty())
    if (const Status s = options_.wireguard->set_peers(tunnels); !s.ok())
      return s.message();
  return why_apart(network_->addresses, others.addresses);
}

void Launcher::complete_fence(int64_t generation, int64_t index,
                              const std::string& blob) {
  if (generation != generation_ || space_.empty()) return;
  const FenceNetworks fence = split_networks(blob);
  if (const std::string why = connect_networks(fence); !why.empty()) {
    log_->error("networks_apart",
                {{"generation", generation}, {"reason", why}});
    apart_ = why;
    return pmix_->fail_fences(space_);  // MPI_Init returns an error
  }
  if (!pmix_->complete_fence(space_, index, fence.blob))
    log_->warn("fence_unknown", {{"generation", generation}, {"index", index}});
}

void Launcher::set_request(uint32_t bits, int64_t checkpoint_request) {
  for (auto& [rank, r] : ranks_) {
    r.board->set_checkpoint_request(checkpoint_request);
    r.board->set_request(bits);
  }
}

bool Launcher::beat(int64_t now_ms) {
  if (options_.wireguard != nullptr) options_.wireguard->call_again(now_ms);
  bool moved = false;
  for (auto& [rank, r] : ranks_) {
    r.board->beat(now_ms);
    moved |= r.board->committed_step() != r.seen_committed;
  }
  return moved;
}

// -------------------------------------------------------------------- ending

void Launcher::reap() {
  std::vector<std::pair<Rank, int>> ended;
  for (auto it = ranks_.begin(); it != ranks_.end();) {
    siginfo_t info{};
    const bool dead = waitid(P_PID, static_cast<id_t>(it->second.pid), &info,
                             WEXITED | WNOHANG | WNOWAIT) == 0 &&
                      info.si_pid == it->second.pid;
    if (!dead) {
      ++it;
      continue;
    }
    // Kill its child processes before the pid can be reused.
    ::kill(-it->second.pid, SIGKILL);
    int status = 0;
    waitpid(it->second.pid, &status, 0);
    if (it->second.pidfd >= 0) {
      loop_->unwatch(it->second.pidfd);
      close(it->second.pidfd);
    }
    ended.emplace_back(std::move(it->second), status);
    it = ranks_.erase(it);
  }
  // Report crashes before the exits that they may have caused.
  std::stable_sort(ended.begin(), ended.end(), [](auto& a, auto& b) {
    return WIFSIGNALED(a.second) > WIFSIGNALED(b.second);
  });
  const int64_t died_ns = monotonic_ns();
  const std::string folder = rundir::traces_path(run_dir_);
  std::vector<FlightAbout> records;
  for (auto& [rank, status] : ended) records.push_back(on_exit(rank, status));
  // Write files only after all exits were reported.
  for (size_t i = 0; i < records.size(); ++i)
    if (!records[i].ended.empty())
      keep_flight(folder, records[i], *ended[i].first.board, died_ns);
}

void Launcher::keep_flight(const std::string& folder, const FlightAbout& about,
                           const board::Board& board, int64_t died_ns) {
  const int64_t offset =
      static_cast<int64_t>(unix_seconds() * 1e6) * 1000 - monotonic_ns();
  storage_.start(
      [folder, about, log = log_, keep = options_.keep_generations,
       text = flight_json(about, board.flight().read(), died_ns, offset)] {
        const Status s = write_flight(folder, about, text, keep);
        if (!s.ok())
          log->warn("flight_record_lost", {{"generation", about.generation},
                                           {"rank", about.rank},
                                           {"error", s.message()}});
      });
}

std::vector<std::string> Launcher::tail_of(const RankLogPaths& logs) {
  const auto lines = std::make_shared<std::vector<std::string>>();
  if (!storage_.within(storage_patience_ms_, [lines, logs] {
        *lines = log_tail(logs, kTailLines, kMaxLineBytes);
      }))
    return {};
  return *lines;
}

FlightAbout Launcher::on_exit(Rank& r, int wait_status) {
  RankExited e;
  e.generation = generation_;
  e.rank = r.rank;
  if (WIFSIGNALED(wait_status))
    e.signal = WTERMSIG(wait_status);
  else
    e.exit_code = WEXITSTATUS(wait_status);
  e.exit_time = unix_seconds();
  std::vector<std::string> tail = tail_of(r.logs);
  if (!tail.empty()) e.last_log = tail.back();
  e.sample = sample(r, /*alive=*/false);
  pb::RankStatus& status = e.sample.status;
  explain_end(&e);
  FlightAbout about{.generation = generation_,
                    .rank = r.rank,
                    .pid = r.pid,
                    .worker = options_.worker,
                    .host = host_,
                    .doing = events::doing_text(status),
                    .error = status.error()};
  if (e.signal != 0 || e.exit_code != 0) {
    about.ended = exit_text(e.signal, e.exit_code);
    if (killed_ && e.signal == SIGKILL) about.ended += " by its worker";
    about.log_tail = std::move(tail);
    for (const std::string& line : about.log_tail) status.add_log_tail(line);
    status.set_flight_record(rundir::flight_name({generation_, r.rank}));
  }
  log_->info("rank_exited", {{"generation", generation_},
                             {"rank", r.rank},
                             {"pid", r.pid},
                             {"exit_code", e.exit_code},
                             {"signal", e.signal},
                             {"step", e.sample.status.committed_step()},
                             {"doing", about.doing},
                             {"error", e.sample.status.error()},
                             {"last_log", e.last_log}});
  sink_(std::move(e));
  return about;
}

void Launcher::kill_all() {
  killed_ = true;
  for (const auto& [rank, r] : ranks_) kill_group(r.pid);
}

void Launcher::kill(int64_t generation) {
  if (generation != generation_) return;
  log_->info("kill_ranks",
             {{"generation", generation}, {"ranks", ranks_.size()}});
  kill_all();
}

void Launcher::forget_generation() {
  if (!space_.empty()) {
    if (const Status s = pmix_->deregister(space_); !s.ok())
      log_->error("deregister_failed",
                  {{"generation", generation_}, {"error", s.message()}});
  }
  space_.clear();
  scratch_->remove_generation(generation_);
  generation_ = 0;
}

void Launcher::restart_if_stuck() {
  if (pmix_->stuck() && ranks_.empty() && options_.restart) options_.restart();
}

void Launcher::tear_down(int64_t generation) {
  if (generation != generation_) return;
  CHECK_MSG(ranks_.empty(), "tear_down() while ranks are alive");
  forget_generation();
  // Before the coordinator assigns ranks that could not be started.
  restart_if_stuck();
  log_->info("torn_down", {{"generation", generation}});
  sink_(TornDown{generation});
}

void Launcher::shut_down() {
  if (generation_ == 0) return;
  kill_all();
  const int64_t end = monotonic_ms() + kReapTimeoutMs;
  const Sink sink = std::exchange(sink_, [](const Event&) {});
  while (!ranks_.empty() && monotonic_ms() < end) {
    reap();
    if (!ranks_.empty())
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  for (auto& [rank, r] : ranks_) {  // uninterruptible (state D)
    log_->error("rank_unkillable", {{"rank", rank}, {"pid", r.pid}});
    if (r.pidfd < 0) continue;
    loop_->unwatch(r.pidfd);
    close(r.pidfd);
  }
  ranks_.clear();
  forget_generation();
  sink_ = sink;
}

}  // namespace remesh::agent
