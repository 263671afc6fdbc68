#include "worker/agent/shell/address.h"

#include <algorithm>
#include <cctype>
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
  std::error_code error;
  if (!fs::is_directory(connect, error))
    return invalid_argument("--connect '" + connect +
                            "': neither tcp://HOST:PORT nor a run directory");
  out.file_ = rundir::endpoint_path(connect);
  out.run_ = connect;
  return out;
}

Result<std::string> CoordinatorAddress::read() const {
  if (file_.empty()) return address_;
  std::ifstream in(file_);
  std::string line;
  if (!std::getline(in, line) || line.empty())
    return not_found(file_ + ": no address; is a coordinator running?");
  return line;
}

std::string CoordinatorAddress::outcome() const {
  constexpr int64_t kTailBytes = 1 << 16;
  if (run_.empty()) return "";
  std::ifstream in(rundir::events_path(run_), std::ios::ate);
  const int64_t size = in.tellg();
  in.seekg(std::max<int64_t>(0, size - kTailBytes));
  std::string last;
  for (std::string line; std::getline(in, line) && !in.eof();) last = line;
  for (std::string outcome : {"done", "failed", "stopped"})
    if (last.find("\"event\":\"job_" + outcome + "\"") != std::string::npos)
      return outcome;
  return "";
}

bool valid_name(const std::string& name) {
  if (name.empty() || name.size() > 64) return false;
  if (std::isalnum(static_cast<unsigned char>(name[0])) == 0) return false;
  for (char c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '-' &&
        c != '_' && c != '.')
      return false;
  return true;
}

}  // namespace remesh::agent
