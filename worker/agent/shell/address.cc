#include "worker/agent/shell/address.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "proto/base/json_reader.h"
#include "proto/rundir/events.h"
#include "proto/rundir/file_tail.h"
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

RunLookup look_up(const std::string& run_dir) {
  RunLookup out;
  const std::string file = rundir::endpoint_path(run_dir);
  std::ifstream endpoint(file);
  std::string line;
  if (std::getline(endpoint, line) && !line.empty())
    out.address = line;
  else
    out.address = not_found(file + ": no address; is a coordinator running?");
  const auto event = nlohmann::json::parse(
      rundir::read_last_line(rundir::events_path(run_dir)), nullptr,
      /*allow_exceptions=*/false);
  out.outcome = events::outcome_of(JsonReader(event, "").text("event", ""));
  return out;
}

}  // namespace remesh::agent
