#include "coordinator/rundir/claim_folder.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <sstream>

#include "coordinator/rundir/run_dir.h"
#include "proto/base/file_system.h"
#include "proto/rundir/paths.h"
#include "proto/rundir/run_id.h"

namespace remesh::rundir {

Status claim_folder(const std::string& run, const std::string& folder,
                    uint64_t run_id) {
  if (is_inside(run, folder)) return ok_status();
  const auto fs = posix_file_system();
  RETURN_IF_ERROR(fs->create_dirs(folder));
  const std::string path = path_join(folder, ".run");
  const std::string own = fmt::format("{:016x} {}\n", run_id, run);
  // Whole, and only if there is none.
  const std::string fresh = fmt::format("{}.{:016x}", path, run_id);
  RETURN_IF_ERROR(write_file_atomically(*fs, fresh, own));
  const bool linked = ::link(fresh.c_str(), path.c_str()) == 0;
  // Some file systems have no hard links (exFAT, some CIFS and FUSE): there two
  // runs that start at the same moment may both claim the folder.
  if (!linked && errno != EEXIST && fs->look_up(path).code() == Code::kNotFound)
    return fs->rename(fresh, path);
  RETURN_IF_ERROR(fs->remove(fresh));
  if (linked) return ok_status();
  ASSIGN_OR_RETURN(const std::string found, read_file(*fs, path, 1 << 16));
  std::istringstream in(found);
  uint64_t id = 0;
  std::string other;
  in >> std::hex >> id;
  std::getline(in >> std::ws, other);
  if (id == run_id) return ok_status();
  ASSIGN_OR_RETURN(const auto names, fs->list(folder));
  const bool used = std::any_of(names.begin(), names.end(), [](const auto& n) {
    return n.starts_with("step-");
  });
  // A start that failed, whose run has another number now or none.
  const bool gone = other == run || (run_id_of(*fs, other) != id &&
                                     RunLock::holder(other) == 0);
  if (id == 0 || (!used && gone)) return write_file_atomically(*fs, path, own);
  return invalid_argument(fmt::format(
      "checkpoint.folder: {} has the checkpoints of another run, {}; give each "
      "run a folder of its own, for example with --set checkpoint.folder=...",
      folder, other));
}

}  // namespace remesh::rundir
