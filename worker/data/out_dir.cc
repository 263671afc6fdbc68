#include "worker/data/out_dir.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace remesh::data {
namespace {

bool is_own(std::string_view name) {
  if (name.ends_with(kPartial)) name.remove_suffix(sizeof(kPartial) - 1);
  if (name == kIndexName) return true;
  return name.ends_with(".tok") &&
         (name.starts_with("train-") || name.starts_with("val-"));
}

}  // namespace

Result<std::unique_ptr<OutDir>> OutDir::open(FileSystem& fs,
                                             const std::string& path) {
  const bool existed = fs.exists(path);
  if (!existed) RETURN_IF_ERROR(fs.create_dirs(path));
  auto dir = std::unique_ptr<OutDir>(new OutDir(fs, path, !existed));
  dir->fd_ = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir->fd_ < 0) return errno_error("open folder " + path, errno);
  if (::flock(dir->fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return errno_error("lock " + path, errno);
    dir->made_ = false;  // the other process uses it
    return unavailable(path + ": another prepare is writing to this folder");
  }
  return dir;
}

OutDir::~OutDir() {
  if (made_) ::rmdir(path_.c_str());  // only succeeds while empty
  if (fd_ >= 0) ::close(fd_);
}

bool OutDir::has_index() const {
  return fs_.look_up(path_ + "/" + kIndexName).code() != Code::kNotFound;
}

Status OutDir::list(std::vector<std::string>& own,
                    std::vector<std::string>& foreign) const {
  ASSIGN_OR_RETURN(std::vector<std::string> names, fs_.list(path_));
  for (std::string& name : names)
    (is_own(name) ? own : foreign).push_back(std::move(name));
  return ok_status();
}

Status OutDir::commit(const Index& index,
                      const std::vector<SplitWriter*>& splits) {
  const std::string path = path_ + "/" + kIndexName;
  const std::string text = index_to_json(index);
  if (text.size() > kMaxIndexBytes)
    return invalid_argument(fmt::format(
        "{}: would have {} bytes, of at most {}: it lists {} shards; give "
        "larger --shard-tokens",
        path, text.size(), kMaxIndexBytes,
        index.train.size() + index.val.size()));
  Status wrote = write_file(fs_, path + kPartial, text);
  if (!wrote.ok()) {
    (void)fs_.remove(path + kPartial).ok();
    return wrote;
  }
  std::vector<std::string> before;
  std::vector<std::string> foreign;
  RETURN_IF_ERROR(list(before, foreign));
  if (has_index()) {
    // From here until the last rename the folder has no data set.
    RETURN_IF_ERROR(fs_.remove(path));
    RETURN_IF_ERROR(fs_.sync_dir(path_));
  }
  for (SplitWriter* split : splits) RETURN_IF_ERROR(split->rename());
  RETURN_IF_ERROR(fs_.sync_dir(path_));
  RETURN_IF_ERROR(fs_.rename(path + kPartial, path));
  RETURN_IF_ERROR(fs_.sync_dir(path_));
  for (const std::string& name : before) {
    const auto is_name = [&](const ShardEntry& e) { return e.file == name; };
    if (name != kIndexName &&
        std::none_of(index.train.begin(), index.train.end(), is_name) &&
        std::none_of(index.val.begin(), index.val.end(), is_name))
      (void)fs_.remove(path_ + "/" + name).ok();
  }
  return ok_status();
}

}  // namespace remesh::data
