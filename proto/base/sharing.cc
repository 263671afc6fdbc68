#include "proto/base/sharing.h"

#include <fcntl.h>
#include <grp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "proto/base/file_system.h"

namespace remesh {
namespace {

// The mode of a folder whose new entries belong to its group. With S_ISVTX only
// their owners replace them.
constexpr mode_t kShared = 02770;

Result<gid_t> find_group(const std::string& name) {
  const struct group* const g = getgrnam(name.c_str());
  if (g == nullptr) return not_found("--group " + name + ": no such group");
  return g->gr_gid;
}

}  // namespace

Status share_new_files(const std::string& group) {
  if (!group.empty()) RETURN_IF_ERROR(find_group(group).status());
  umask(group.empty() ? 0077 : 0007);
  return ok_status();
}

Status give_to_group(const std::string& folder, const std::string& group) {
  if (group.empty()) return ok_status();
  ASSIGN_OR_RETURN(const gid_t gid, find_group(group));
  RETURN_IF_ERROR(posix_file_system()->create_dirs(folder));
  struct stat st {};
  if (stat(folder.c_str(), &st) != 0) return errno_error(folder, errno);
  if (st.st_gid == gid && (st.st_mode & kShared) == kShared) return ok_status();
  if (chown(folder.c_str(), static_cast<uid_t>(-1), gid) == 0 &&
      chmod(folder.c_str(), kShared | S_ISVTX) == 0)
    return ok_status();
  return errno_error("--group " + group + ": give " + folder +
                         " to the group (or do so yourself: chgrp " + group +
                         " " + folder + "; chmod 3770 " + folder + ")",
                     errno);
}

Status create_private_file(const std::string& path, std::string_view bytes) {
  const int fd = open(
      path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0 && errno == EEXIST) return already_exists(path + ": exists");
  if (fd < 0) return errno_error(path, errno);
  const ssize_t written = write(fd, bytes.data(), bytes.size());
  int error = 0;
  if (written < 0 || fsync(fd) != 0)
    error = errno;
  else if (written < static_cast<ssize_t>(bytes.size()))
    error = ENOSPC;
  if (close(fd) != 0 && error == 0) error = errno;
  if (error == 0) return ok_status();
  (void)unlink(path.c_str());
  return errno_error(path, error);
}

}  // namespace remesh
