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
namespace {

struct Owner {
  uint64_t run_id = 0;  // 0: none that can be read
  std::string run;
};

Result<Owner> read_owner(FileSystem& fs, const std::string& path) {
  ASSIGN_OR_RETURN(const std::string found, read_file(fs, path, 1 << 16));
  std::istringstream in(found);
  Owner owner;
  in >> std::hex >> owner.run_id;
  std::getline(in >> std::ws, owner.run);
  return owner;
}

}  // namespace

Status claim_folder(const std::string& run, const std::string& folder,
                    uint64_t run_id) {
  if (is_inside(run, folder)) return ok_status();
  const auto fs = posix_file_system();
  RETURN_IF_ERROR(fs->create_dirs(folder));
  const std::string path = path_join(folder, ".run");
  // A coordinator that is restarted needs no room there.
  if (const auto owner = read_owner(*fs, path);
      owner.ok() && owner->run_id == run_id)
    return ok_status();
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
  ASSIGN_OR_RETURN(const Owner owner, read_owner(*fs, path));
  const auto& [id, other] = owner;
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
