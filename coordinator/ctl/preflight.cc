#include "coordinator/ctl/preflight.h"

#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>

#include "coordinator/core/job_shape.h"
#include "coordinator/rundir/job_files.h"
#include "coordinator/rundir/local_core.h"
#include "coordinator/rundir/run_dir.h"
#include "parallel/jobfile/jobfile.h"
#include "parallel/planner/memory.h"
#include "parallel/planner/placement.h"
#include "proto/base/file_system.h"
#include "proto/base/machine.h"
#include "proto/base/text.h"
#include "proto/data/index.h"

namespace remesh::ctl {
namespace {

namespace fs = std::filesystem;

// Code, MPI, PMIx, oneDNN and thread stacks of a rank, which are not in
// predict_memory(); measured on ranks of 0.1 to 110 M parameters.
constexpr uint64_t kRankBaseBytes = uint64_t{110} << 20;
// Metrics, events and logs of a run of some days.
constexpr uint64_t kRunFilesBytes = uint64_t{8} << 20;
// Sockets, files and pipes of a coordinator and of a worker with one rank.
constexpr uint64_t kCoordinatorFiles = 40;
constexpr uint64_t kWorkerFiles = 56;
constexpr uint64_t kThreadsOfDaemon = 8;
// Address space that libraries reserve.
constexpr uint64_t kReservedBytes = uint64_t{2} << 30;

uint64_t limit_of(int resource, bool hard) {
  rlimit r{};
  getrlimit(static_cast<__rlimit_resource>(resource), &r);
  const rlim_t value = hard ? r.rlim_max : r.rlim_cur;
  return value == RLIM_INFINITY ? UINT64_MAX : value;
}

// Of a tmpfs without a limit; the bytes of states may be added.
constexpr uint64_t kNoLimit = UINT64_MAX / 2;

std::string room_text(uint64_t bytes) {
  return bytes >= kNoLimit ? "no limit" : format_bytes(bytes) + " free";
}

// Free bytes of the file system of the nearest folder that exists.
uint64_t room_at(fs::path path) {
  struct statvfs st {};
  while (statvfs(path.c_str(), &st) != 0) {
    if (!path.has_relative_path()) return 0;
    path = path.parent_path();
  }
  return st.f_blocks == 0 ? kNoLimit : st.f_bavail * st.f_frsize;
}

// From /proc/meminfo, limited by the cgroup.
uint64_t available_memory() {
  std::ifstream in("/proc/meminfo");
  uint64_t kib = 0;
  for (std::string key; in >> key;) {
    if (key == "MemAvailable:" && in >> kib) break;
    in.ignore(1 << 10, '\n');
  }
  const uint64_t usable = usable_memory();
  return kib == 0 ? usable : std::min(usable, kib << 10);
}

bool loopback_is_up() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return true;
  bool up = false;
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next)
    up |= (i->ifa_flags & IFF_LOOPBACK) != 0 && (i->ifa_flags & IFF_UP) != 0 &&
          i->ifa_addr != nullptr;
  freeifaddrs(all);
  return up;
}

// What the ranks on this host take, for the mesh that its slots get.
struct Ranks {
  std::string mesh;
  int count = 0;
  int threads = 0;
  uint64_t memory = 0;    // private
  uint64_t segments = 0;  // shared
  uint64_t most = 0;      // of one rank, both
  std::string problem;
};

Ranks ranks_of(const PreflightOptions& o) {
  Ranks out;
  planner::PlacementRequest request =
      core::placement_request(o.job, core::shape_of(o.job));
  std::optional<planner::JobShape>& shape = request.shape;
  if (shape) shape->bf16 = shape->bf16 && processor_has_bf16();
  // The coordinator reports one that is invalid, and does without.
  if (auto core = rundir::local_core(); core.ok()) request.core = *core;
  for (int i = 1; i <= o.workers; ++i)
    request.workers.push_back({.worker = fmt::format("local-{}", i),
                               .host = "here",
                               .slots = o.slots_per_worker,
                               .cores = usable_cores(),
                               .memory_bytes = usable_memory()});
  const auto placed = planner::place_mesh(request);
  if (!placed.ok()) {
    out.problem = placed.status().message();
    return out;
  }
  out.mesh = placed->layout.to_string();
  out.count = placed->layout.world();
  for (const pb::RankPlace& p : placed->ranks) {
    const auto threads = static_cast<int>(o.job.train().threads());
    out.threads += threads > 0 ? threads : p.threads();
    if (!shape) continue;
    const uint64_t all =
        planner::predict_memory(*shape, placed->layout, p.rank()).total() +
        planner::predict_save(*shape, placed->layout, p.rank()) +
        planner::predict_workspace(*shape, placed->layout,
                                   threads > 0 ? threads : p.threads());
    const uint64_t shared =
        o.job.elastic().keep_state()
            ? planner::predict_segments(*shape, placed->layout, p.rank())
            : 0;
    out.memory += all - std::min(all, shared) + kRankBaseBytes;
    out.segments += shared;
    out.most = std::max(out.most, all + kRankBaseBytes);
  }
  return out;
}

Need data_need(const PreflightOptions& o) {
  const std::string& path = o.job.data().path();
  Need n{.what = "data", .needed = path, .fatal = o.workers > 0};
  const auto info = rundir::read_data_info(path);
  if (!info.ok()) {
    n.problem = info.status().message();
    return n;
  }
  n.here = short_number(static_cast<double>(info->train_tokens)) + " tokens";
  const auto index = data::read_index(path);
  if (!index.ok() || o.job.train().eval_sequences() == 0) return n;
  std::vector<std::string> unseen;
  for (const data::MemberEntry& m : index->members)
    if (m.val_tokens <= o.job.train().seq_len()) unseen.push_back(m.name);
  if (unseen.empty()) return n;
  n.fatal = false;
  n.problem = fmt::format(
      "the validation loss leaves out {}, whose held-out text is shorter than "
      "a sequence",
      join(unseen));
  return n;
}

// The model that adapters are added to. It is read at every start.
Need base_need(const pb::Job& job) {
  Need n{.what = "frozen model",
         .needed = jobfile::init_path(job.model()),
         .fatal = true};
  const Status found =
      rundir::base_fingerprint(*posix_file_system(), job).status();
  if (found.ok())
    n.here = "can be read";
  else
    n.problem = found.message();
  return n;
}

// Whether the tokens of the data set are those of the model whose training is
// continued, if its folder has a tokenizer. An id of the data set ends with the
// hash of the tokenizer's file. Another file may be of the same tokenizer, so
// this is only advice. (Ids that the model does not have are an error of the
// job.)
std::optional<Need> tokenizer_need(const pb::Job& job) {
  constexpr uint64_t kMostBytes = uint64_t{128} << 20;
  const std::string& folder = job.model().init_from();
  const auto index = data::read_index(job.data().path());
  if (folder.empty() || !index.ok()) return std::nullopt;
  Need n{.what = "tokenizer", .here = "that of the data"};
  bool same = false;
  for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
    const std::string path = path_join(folder, name);
    const auto file = read_file(*posix_file_system(), path, kMostBytes);
    if (!file.ok()) continue;
    if (n.needed.empty()) n.needed = path;
    same = same || index->tokenizer.ends_with(":" + xxh128_text(*file));
  }
  if (n.needed.empty()) return std::nullopt;
  if (!same) {
    n.here = index->tokenizer;
    n.problem = fmt::format(
        "the data set was prepared with a different tokenizer from the model's "
        "(a vocabulary of {}; the model has one of {}): if its tokens are not "
        "the same, prepare it again with --tokenizer {}",
        index->vocab_size, job.model().vocab_size(), n.needed);
  }
  return n;
}

// The newest keep_latest_k checkpoints and the one being written.
Need disk_need(const PreflightOptions& o) {
  const pb::Checkpoint& c = o.job.checkpoint();
  uint64_t each = 0;
  if (const auto shape = core::shape_of(o.job))
    each = 12 * static_cast<uint64_t>(
                    geometry::ParamTable::make(shape->model).num_elements());
  const auto kept = static_cast<uint64_t>(c.keep_latest_k()) + 1;
  const std::string folder = rundir::checkpoints_path(o.run_dir, c.folder());
  const uint64_t room = room_at(folder);
  Need n{.what = "disk",
         .needed = plural(static_cast<int64_t>(kept), "checkpoint") + " of " +
                   format_bytes(each),
         .here = room_text(room)};
  if (room < each + kRunFilesBytes) {
    n.problem = fmt::format(
        "{} has no room for a checkpoint; set "
        "checkpoint.folder to a larger disk",
        folder);
  } else if (room < kept * each + kRunFilesBytes) {
    n.problem =
        "later checkpoints may find no room: make some, or lower "
        "checkpoint.keep_latest_k";
  }
  return n;
}

Need files_need(const PreflightOptions& o) {
  const uint64_t needed = std::max(
      kCoordinatorFiles + 4 * static_cast<uint64_t>(o.workers),
      o.workers == 0
          ? 0
          : kWorkerFiles + 8 * static_cast<uint64_t>(o.slots_per_worker));
  const uint64_t hard = limit_of(RLIMIT_NOFILE, /*hard=*/true);
  Need n{.what = "open files",
         .needed = fmt::format("{}", needed),
         .here = hard == UINT64_MAX ? "no limit" : fmt::format("{}", hard),
         .fatal = true};
  if (hard < needed)
    n.problem =
        fmt::format("a process may open {} files: ulimit -n {}", hard, needed);
  return n;
}

Need processes_need(const PreflightOptions& o, const Ranks& r) {
  const uint64_t needed =
      kThreadsOfDaemon * (1 + static_cast<uint64_t>(o.workers)) +
      static_cast<uint64_t>(r.threads + 4 * r.count);
  const uint64_t limit = limit_of(RLIMIT_NPROC, /*hard=*/false);
  const bool bound = geteuid() != 0 && limit != UINT64_MAX;
  Need n{.what = "threads",
         .needed = fmt::format("{}", needed),
         .here = bound ? fmt::format("{} for this user", limit) : "no limit",
         .fatal = true};
  if (bound && limit < needed)
    n.problem =
        fmt::format("too few processes are allowed: ulimit -u {}", needed);
  return n;
}

// Limits that end a process with a signal, and no message.
std::vector<Need> size_needs(const Ranks& r) {
  std::vector<Need> out;
  const auto add = [&](const char* what, int resource, uint64_t needed,
                       const char* problem) {
    const uint64_t limit = limit_of(resource, /*hard=*/false);
    if (limit != UINT64_MAX)
      out.push_back({.what = what,
                     .needed = format_bytes(needed),
                     .here = format_bytes(limit),
                     .problem = limit < needed ? problem : "",
                     .fatal = true});
  };
  add("address space", RLIMIT_AS, r.most + kReservedBytes,
      "ranks would end with signal 11: ulimit -v unlimited");
  add("file size", RLIMIT_FSIZE,
      std::max({r.most, kRunFilesBytes, r.segments / std::max(1, r.count)}),
      "processes would end with signal 25: ulimit -f unlimited");
  return out;
}

Need scratch_need() {
  const std::string path = scratch_root();
  Need n{.what = "scratch", .needed = path, .fatal = true};
  struct stat st {};
  if (lstat(path.c_str(), &st) != 0) {
    const std::string above = fs::path(path).parent_path();
    const bool may = access(above.c_str(), W_OK) == 0;
    n.here = may ? "can be made" : "";
    if (!may) n.problem = above + ": cannot be written; set REMESH_SCRATCH";
  } else if (!S_ISDIR(st.st_mode)) {
    n.problem = path + ": not a folder; set REMESH_SCRATCH to another one";
  } else if (st.st_uid != geteuid()) {
    n.problem = fmt::format(
        "{}: belongs to user {}, not to {}; set REMESH_SCRATCH to a folder of "
        "yours, such as $XDG_RUNTIME_DIR/remesh",
        path, st.st_uid, geteuid());
  } else {
    n.here = "yours";
  }
  return n;
}

Need shm_need(const PreflightOptions& o, const Ranks& r) {
  Need n{.what = "shared memory",
         .needed = fmt::format("{} for states", format_bytes(r.segments)),
         .fatal = true};
  if (!is_folder(o.shared)) {
    n.problem = fmt::format(
        "{0} is missing: mount a tmpfs there (mount -t tmpfs tmpfs {0}), or "
        "set elastic.keep_state = false",
        o.shared);
    return n;
  }
  if (access(o.shared.c_str(), W_OK) != 0) {
    n.problem = o.shared +
                " cannot be written: mount it for writing, or set "
                "elastic.keep_state = false";
    return n;
  }
  uint64_t room = room_at(o.shared);
  for (const std::string& folder : memory::state_folders(o.shared))
    for (const auto& f : memory::list_segments(folder, o.state_job))
      room += f.bytes;
  n.here = fmt::format("{} in {}", room_text(room), o.shared);
  if (room < r.segments)
    n.problem =
        "make /dev/shm larger (mount -o remount,size=..., docker run "
        "--shm-size), use fewer ranks, or set elastic.keep_state = false";
  return n;
}

}  // namespace

std::string scratch_root() {
  const char* given = std::getenv("REMESH_SCRATCH");
  return given != nullptr && *given != '\0'
             ? given
             : fmt::format("/tmp/remesh-{}", geteuid());
}

std::vector<Need> look_ahead(const PreflightOptions& o) {
  std::vector<Need> out = {data_need(o), disk_need(o), files_need(o)};
  Ranks r;
  if (o.workers > 0) r = ranks_of(o);
  if (o.workers > 0 && o.job.lora().rank() > 0) out.push_back(base_need(o.job));
  if (auto n = tokenizer_need(o.job)) out.push_back(std::move(*n));
  out.push_back(processes_need(o, r));
  for (Need& n : size_needs(r)) out.push_back(std::move(n));
  if (o.workers == 0) return out;
  if (!r.problem.empty()) {
    out.push_back(
        {.what = "mesh",
         .needed =
             plural(int64_t{o.workers} * o.slots_per_worker, "slot") + " here",
         .problem = r.problem});
  } else {
    out.push_back({.what = "mesh", .needed = r.mesh});
    const uint64_t available = available_memory();
    out.push_back(
        {.what = "memory",
         .needed = fmt::format("{} for {}", format_bytes(r.memory),
                               plural(r.count, "rank")),
         .here = format_bytes(available) + " available",
         .problem = r.memory + r.segments > available
                        ? "ranks may be ended for lack of memory: use fewer, "
                          "or see `remesh plan` for what a rank needs"
                        : ""});
    if (o.job.elastic().keep_state()) out.push_back(shm_need(o, r));
    out.push_back({.what = "cores",
                   .needed = plural(r.threads, "thread"),
                   .here = fmt::format("{}", usable_cores()),
                   .problem = r.threads > usable_cores()
                                  ? "threads share cores, which slows every "
                                    "step: use fewer slots or set train.threads"
                                  : ""});
  }
  out.push_back(scratch_need());
  if (!loopback_is_up())
    out.push_back({.what = "loopback",
                   .needed = "up",
                   .problem = "the network interface lo is down: ip link set "
                              "lo up",
                   .fatal = true});
  const pb::Schedule& s = o.job.schedule();
  if (s.warmup_steps() >= o.job.train().steps() && o.job.train().steps() > 0)
    out.push_back({.what = "schedule",
                   .needed = fmt::format("{} steps", o.job.train().steps()),
                   .here = fmt::format("{} of warm-up", s.warmup_steps()),
                   .problem = "all of the run is warm-up, and ends at the "
                              "highest learning rate: set "
                              "schedule.warmup_steps"});
  return out;
}

std::string needs_text(const std::vector<Need>& needs, const Style& style) {
  size_t width = 0;
  for (const Need& n : needs) width = std::max(width, display_width(n.needed));
  width = std::min<size_t>(width, 36);
  std::string out;
  for (const Need& n : needs) {
    std::string line =
        fmt::format("  {:<14}{:<{}}  {}", n.what, n.needed, width, n.here);
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
    if (!n.problem.empty())
      out += toned(fmt::format("  {:<14}{}",
                               n.fatal ? "  needed:" : "  note:", n.problem),
                   n.fatal ? Tone::kBad : Tone::kNotice, style) +
             "\n";
  }
  return fold(out, style.width);
}

nlohmann::ordered_json needs_json(const std::vector<Need>& needs) {
  auto array = nlohmann::ordered_json::array();
  for (const Need& n : needs)
    array.push_back({{"what", n.what},
                     {"needed", n.needed},
                     {"here", n.here},
                     {"problem", n.problem},
                     {"fatal", n.fatal && !n.problem.empty()}});
  return array;
}

std::string fatal_text(const std::vector<Need>& needs) {
  std::vector<std::string> out;
  for (const Need& n : needs)
    if (n.fatal && !n.problem.empty()) out.push_back(n.what + ": " + n.problem);
  return join(out, "\n  ");
}

}  // namespace remesh::ctl
