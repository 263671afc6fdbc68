#include "worker/agent/shell/address.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>

#include "proto/rundir/paths.h"

namespace remesh::agent {
namespace fs = std::filesystem;

Result<CoordinatorAddress> CoordinatorAddress::parse(
    const std::string& connect) {
  CoordinatorAddress out;
  if (connect.rfind("tcp://", 0) == 0 || connect.rfind("ipc://", 0) == 0) {
    out.address_ = connect;
    return out;
  }
  // The coordinator may create the run directory later.
  const bool path = connect.find('/') != std::string::npos &&
                    connect.find("://") == std::string::npos;
  std::error_code error;
  if (!path && !fs::is_directory(connect, error))
    return invalid_argument("--connect '" + connect +
                            "': neither tcp://HOST:PORT nor a run directory; "
                            "for one that does not exist yet: ./" +
                            connect);
  // A link such as runs/latest may lead to another run later.
  const fs::path real = fs::canonical(connect, error);
  out.run_ = error ? connect : real.string();
  return out;
}

Result<std::string> CoordinatorAddress::read() const {
  return fixed() ? Result<std::string>(address_) : look_up(run_).address;
}

void CoordinatorAddress::set_run(const std::string& run_dir) {
  if (run_.empty()) run_ = run_dir;
}

RunLookup look_up(const std::string& run_dir) {
  constexpr int64_t kTailBytes = 1 << 16;
  RunLookup out;
  const std::string file = rundir::endpoint_path(run_dir);
  std::ifstream endpoint(file);
  std::string last;
  if (std::getline(endpoint, last) && !last.empty())
    out.address = last;
  else
    out.address = not_found(file + ": no address; is a coordinator running?");
  std::ifstream in(rundir::events_path(run_dir), std::ios::ate);
  const int64_t size = in.tellg();
  in.seekg(std::max<int64_t>(0, size - kTailBytes));
  for (std::string line; std::getline(in, line) && !in.eof();) last = line;
  for (const char* outcome : {"done", "failed", "stopped"})
    if (last.find(std::string("\"event\":\"job_") + outcome + "\"") !=
        std::string::npos)
      out.outcome = outcome;
  return out;
}

}  // namespace remesh::agent
