// The layout of a run directory: every path below RUN that more than one
// program uses.
//
//   RUN/job.toml           the job as resolved
//   RUN/metrics.jsonl      one line per finished step
//   RUN/events.jsonl       one line per event (events.h)
//   RUN/journal            the coordinator's durable state
//   RUN/coordinator.lock   flock'ed by the running coordinator: "PID HOST TIME"
//   RUN/coordinator.addr   where it listens: the address on the first line,
//                          then "pid=...", "host=...", "host_id=...",
//                          "bound=...", and "auth=none" without keys; removed
//                          when the job ends
//   RUN/coordinator.secret what the coordinators of the run prove their numbers
//                          with (Directive.proof)
//   RUN/keys/              who may talk to the coordinator: NAME.key (secret),
//                          coordinator.pub, allowed.toml
//   RUN/checkpoints/       one folder per step (see checkpoint.folder)
//   RUN/logs/              coordinator.log, worker-NAME.log, gen-7/ of ranks
//   RUN/traces/            gen-7-rank-3.json: traces, which gen-7.json merges;
//                          flight-g007-rank-3.json: flight records of dead
//                          ranks
//
// Pure. Parsers accept what the functions above them make, and nothing else.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace remesh::rundir {

inline std::string job_path(const std::string& run) {
  return run + "/job.toml";
}
inline std::string metrics_path(const std::string& run) {
  return run + "/metrics.jsonl";
}
inline std::string events_path(const std::string& run) {
  return run + "/events.jsonl";
}
inline std::string journal_path(const std::string& run) {
  return run + "/journal";
}
inline std::string lock_path(const std::string& run) {
  return run + "/coordinator.lock";
}
inline std::string endpoint_path(const std::string& run) {
  return run + "/coordinator.addr";
}
inline std::string secret_path(const std::string& run) {
  return run + "/coordinator.secret";
}
inline std::string keys_path(const std::string& run) { return run + "/keys"; }
// The secret key of a member, "coordinator" for the coordinator's.
inline std::string key_path(const std::string& run, const std::string& name) {
  return keys_path(run) + "/" + name + ".key";
}
// The key that the coordinator uses after its next start.
inline std::string next_key_path(const std::string& run) {
  return keys_path(run) + "/coordinator.next";
}
inline std::string server_key_path(const std::string& run) {
  return keys_path(run) + "/coordinator.pub";
}
inline std::string allowed_path(const std::string& run) {
  return keys_path(run) + "/allowed.toml";
}
inline std::string logs_path(const std::string& run) { return run + "/logs"; }
inline std::string coordinator_log_path(const std::string& run) {
  return logs_path(run) + "/coordinator.log";
}
inline std::string worker_log_path(const std::string& run,
                                   const std::string& worker) {
  return logs_path(run) + "/worker-" + worker + ".log";
}
// The logs of the ranks of a generation.
std::string rank_logs_path(const std::string& run, int64_t generation);
std::optional<int64_t> parse_rank_logs_name(const std::string& name);
inline std::string traces_path(const std::string& run) {
  return run + "/traces";
}
// The names of the files there.
struct RankFile {
  int64_t generation = 0;
  int rank = 0;
};
std::string trace_name(const RankFile& file);
std::optional<RankFile> parse_trace_name(const std::string& name);
std::string flight_name(const RankFile& file);
std::optional<RankFile> parse_flight_name(const std::string& name);
std::string merged_trace_name(int64_t generation);
// `folder` is the job's checkpoint.folder: absolute, or relative to the run.
inline std::string checkpoints_path(const std::string& run,
                                    const std::string& folder) {
  return folder.starts_with('/') ? folder : run + "/" + folder;
}
inline bool is_inside(const std::string& run, const std::string& path) {
  const auto normal = [](const std::string& p) {
    return std::filesystem::path(p).lexically_normal().string();
  };
  return normal(path).starts_with(normal(run + "/"));
}

}  // namespace remesh::rundir
