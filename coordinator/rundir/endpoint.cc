// RUN/coordinator.addr: where the coordinator of the run listens.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <span>
#include <sstream>

#include "coordinator/rundir/run_dir.h"
#include "proto/base/file_system.h"
#include "proto/base/number.h"
#include "proto/base/process.h"

namespace remesh::rundir {
namespace {

// A sector, so that overwriting it replaces all of it.
constexpr size_t kFileBytes = 512;

}  // namespace

std::string endpoint_text(const Endpoint& e) {
  return fmt::format("{}\npid={}\nhost={}\nhost_id={:016x}\nbound={}\n{}",
                     e.address, e.pid, e.host, e.host_id, e.bound,
                     e.no_auth ? "auth=none\n" : "");
}

bool is_here(const Endpoint& e) {
  return e.host_id != 0 ? e.host_id == host_id() : e.host == host_identity();
}

bool is_of_process(const Endpoint& e, int pid) {
  return e.pid == pid && is_here(e);
}

bool lock_tells(const Endpoint& e) {
  for (const char* own :
       {"ipc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:"})
    if (e.address.starts_with(own)) return true;
  return is_here(e) || e.host == host_identity();
}

Result<Endpoint> parse_endpoint(const std::string& text) {
  std::istringstream in(text);
  Endpoint e;
  std::getline(in, e.address);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("pid="))
      e.pid = parse_number<int>(line.substr(4)).value_or(0);
    if (line.starts_with("host=")) e.host = line.substr(5);
    if (line.starts_with("host_id="))
      e.host_id = std::strtoull(line.c_str() + 8, nullptr, 16);
    if (line.starts_with("bound=")) e.bound = line.substr(6);
    if (line == "auth=none") e.no_auth = true;
  }
  if (!e.address.starts_with("tcp://") && !e.address.starts_with("ipc://")) {
    return corrupt("not an address: \"" + e.address.substr(0, 60) +
                   "\"; expected tcp://HOST:PORT or ipc:///PATH");
  }
  return e;
}

Status write_endpoint(FileSystem& fs, const std::string& run,
                      const Endpoint& endpoint) {
  const std::string path = endpoint_path(run);
  std::string text = endpoint_text(endpoint);
  text.resize(std::max(text.size(), kFileBytes), '\n');
  Status status = write_file_atomically(fs, path, text);
  const auto size = fs.size(path);
  if (status.code() != Code::kExhausted || !size.ok() || *size != text.size())
    return status;
  // A full disk has no room for another file.
  ASSIGN_OR_RETURN(const auto file, fs.open_to_write(path));
  RETURN_IF_ERROR(file->write_at(0, std::as_bytes(std::span(text))));
  RETURN_IF_ERROR(file->sync());
  return file->close();
}

Result<Endpoint> read_endpoint(const std::string& run) {
  ASSIGN_OR_RETURN(const std::string text, read_file(endpoint_path(run)));
  return parse_endpoint(text).with_context(endpoint_path(run));
}

void remove_endpoint(FileSystem& fs, const std::string& run) {
  if (fs.remove(endpoint_path(run)).ok()) (void)fs.sync_dir(run).ok();
}

}  // namespace remesh::rundir
