#include "proto/base/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>

#include "proto/base/descriptor.h"
#include "proto/base/direct_file.h"
#include "proto/base/posix_file.h"
#include "proto/base/xxh3.h"

namespace remesh {
namespace {

// Nothing is written through a link that somebody else may have left there.
Result<int> open_fd(const std::string& path, int flags) {
  int fd = -1;
  if ((flags & O_ACCMODE) != O_RDONLY) flags |= O_NOFOLLOW;
  do fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  while (fd < 0 && errno == EINTR);
  if (fd < 0) return os_error("open " + path, errno);
  return fd;
}

Result<std::unique_ptr<File>> open_file(const std::string& path, int flags) {
  ASSIGN_OR_RETURN(const int fd, open_fd(path, flags));
  return std::unique_ptr<File>(std::make_unique<PosixFile>(fd, path));
}

class PosixFileSystem final : public FileSystem {
 public:
  Result<std::unique_ptr<File>> open(const std::string& path) override {
    // A pipe would block until it is written to.
    ASSIGN_OR_RETURN(auto file, open_file(path, O_RDONLY | O_NONBLOCK));
    // A directory opens for reading too, and fails only later, obscurely.
    struct stat st = {};
    if (::stat(path.c_str(), &st) == 0 && !S_ISREG(st.st_mode))
      return io_error("open " + path + ": not a regular file");
    return file;
  }

  Result<std::unique_ptr<File>> open_to_write(
      const std::string& path) override {
    return open_file(path, O_RDWR);
  }

  Result<std::unique_ptr<File>> create(const std::string& path) override {
    return open_file(path, O_RDWR | O_CREAT | O_TRUNC);
  }

  Result<std::unique_ptr<File>> create_new(const std::string& path) override {
    if (::unlink(path.c_str()) != 0 && errno != ENOENT)
      return os_error("remove " + path, errno);
    return open_file(path, O_RDWR | O_CREAT | O_EXCL);
  }

  Result<std::unique_ptr<File>> create_streamed(
      const std::string& path, const StreamOptions& options) override {
    ASSIGN_OR_RETURN(const int fd, open_fd(path, O_RDWR | O_CREAT | O_TRUNC));
    return make_direct_file(fd, path, options, buffers_);
  }

  Status create_dirs(const std::string& path) override {
    for (size_t i = 1; i <= path.size(); ++i) {
      if (i != path.size() && path[i] != '/') continue;
      const std::string part = path.substr(0, i);
      if (::mkdir(part.c_str(), 0777) == 0 || errno == EEXIST) continue;
      const int err = errno;
      if (!is_folder(part)) return os_error("create directory " + part, err);
    }
    if (!is_folder(path))
      return already_exists("create directory " + path +
                            ": the name is taken by a file");
    return ok_status();
  }

  Result<std::vector<std::string>> list(const std::string& path) override {
    ASSIGN_OR_RETURN(const Folder folder, open_folder(AT_FDCWD, path, path));
    return names_in(folder, path);
  }

  Result<std::vector<std::string>> list_folder(
      const std::string& path) override {
    ASSIGN_OR_RETURN(const Folder folder,
                     open_folder(AT_FDCWD, path, path, O_NOFOLLOW));
    return names_in(folder, path);
  }

  Status look_up(const std::string& path) override {
    struct stat st = {};
    if (::lstat(path.c_str(), &st) != 0) return os_error("stat " + path, errno);
    return ok_status();
  }

  Result<uint64_t> size(const std::string& path) override {
    struct stat st = {};
    if (::stat(path.c_str(), &st) != 0) return os_error("stat " + path, errno);
    if (!S_ISREG(st.st_mode)) return io_error(path + ": not a regular file");
    return static_cast<uint64_t>(st.st_size);
  }

  Status rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0)
      return os_error("rename " + from + " to " + to, errno);
    return ok_status();
  }

  Status remove(const std::string& path) override {
    if (::remove(path.c_str()) != 0) return os_error("remove " + path, errno);
    return ok_status();
  }

  Status remove_tree(const std::string& path) override {
    return remove_at(AT_FDCWD, path, path);
  }

  Status sync_dir(const std::string& path) override {
    const Descriptor fd(
        ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (fd.get() < 0) return os_error("open directory " + path, errno);
    // Some network file systems cannot sync a directory, and need not.
    if (::fsync(fd.get()) != 0 && errno != EINVAL)
      return os_error("fsync directory " + path, errno);
    return ok_status();
  }

 private:
  struct Close {
    void operator()(DIR* folder) const { ::closedir(folder); }
  };
  using Folder = std::unique_ptr<DIR, Close>;

  // The directory `name` in the open one, to which `path` leads.
  static Result<Folder> open_folder(int in, const std::string& name,
                                    const std::string& path, int flags = 0) {
    const int fd =
        ::openat(in, name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | flags);
    Folder folder(fd < 0 ? nullptr : ::fdopendir(fd));
    if (folder) return folder;
    const int err = errno;
    if (fd >= 0) ::close(fd);
    return os_error("list " + path, err);
  }

  static Result<std::vector<std::string>> names_in(const Folder& folder,
                                                   const std::string& path) {
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* e = ::readdir(folder.get())) {
      const std::string name = e->d_name;
      if (name != "." && name != "..") names.push_back(name);
      errno = 0;
    }
    if (errno != 0) return os_error("list " + path, errno);
    std::sort(names.begin(), names.end());
    return names;
  }

  // By open directories, since a path may lead elsewhere by now.
  static Status remove_at(int in, const std::string& name,
                          const std::string& path) {
    if (::unlinkat(in, name.c_str(), 0) == 0 || errno == ENOENT)
      return ok_status();
    if (errno != EISDIR) return os_error("remove " + path, errno);
    if (path.size() >= PATH_MAX)
      return os_error("remove " + path, ENAMETOOLONG);
    ASSIGN_OR_RETURN(const Folder folder,
                     open_folder(in, name, path, O_NOFOLLOW));
    ASSIGN_OR_RETURN(const auto names, names_in(folder, path));
    for (auto n = names.rbegin(); n != names.rend(); ++n)
      RETURN_IF_ERROR(
          remove_at(::dirfd(folder.get()), *n, path_join(path, *n)));
    if (::unlinkat(in, name.c_str(), AT_REMOVEDIR) != 0)
      return os_error("remove " + path, errno);
    return ok_status();
  }

  const std::shared_ptr<BufferPool> buffers_ = make_buffer_pool();
};

}  // namespace

std::unique_ptr<FileSystem> posix_file_system() {
  return std::make_unique<PosixFileSystem>();
}

std::string path_join(std::string_view dir, std::string_view name) {
  std::string path(dir);
  if (!path.empty() && path.back() != '/') path += '/';
  return path.append(name);
}

std::string absolute_path(const std::string& path) {
  std::error_code error;
  auto full = std::filesystem::absolute(path, error).lexically_normal();
  if (error) return path;
  if (full.has_relative_path() && full.filename().empty())
    full = full.parent_path();  // "runs/a/" is runs/a
  return full.string();
}

std::string real_path(const std::string& path) {
  std::error_code error;
  const auto real = std::filesystem::canonical(path, error);
  return error ? absolute_path(path) : real.string();
}

bool path_exists(const std::string& path) {
  std::error_code unknown;
  return std::filesystem::exists(path, unknown);
}

bool is_folder(const std::string& path) {
  std::error_code unknown;
  return std::filesystem::is_directory(path, unknown);
}

bool is_at(int fd, const std::string& path) {
  struct stat open {
  }, there{};
  return fstat(fd, &open) == 0 && lstat(path.c_str(), &there) == 0 &&
         open.st_ino == there.st_ino && open.st_dev == there.st_dev;
}

Status write_file(FileSystem& fs, const std::string& path,
                  std::string_view bytes) {
  ASSIGN_OR_RETURN(const auto file, fs.create_new(path));
  RETURN_IF_ERROR(
      file->write_at(0, std::as_bytes(std::span(bytes.data(), bytes.size()))));
  RETURN_IF_ERROR(file->sync());
  return file->close();
}

std::string parent_path(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

void remove_temporaries(FileSystem& fs, const std::string& path) {
  constexpr size_t kEnd = std::string_view(".0123456789abcdef.tmp").size();
  const std::string folder = parent_path(path);
  const std::string base = path.substr(path.rfind('/') + 1);  // npos + 1 is 0
  const auto names = fs.list(folder);
  for (const std::string& name :
       names.ok() ? *names : std::vector<std::string>())
    if (name.size() == base.size() + kEnd && name.starts_with(base + ".") &&
        name.ends_with(".tmp"))
      (void)remove_all(fs, path_join(folder, name));
}

std::string temporary_path(FileSystem& fs, const std::string& path) {
  remove_temporaries(fs, path);
  std::random_device random;
  return fmt::format("{}.{:08x}{:08x}.tmp", path, random(), random());
}

Status write_file_atomically(FileSystem& fs, const std::string& path,
                             std::string_view bytes) {
  const std::string temporary = temporary_path(fs, path);
  Status status = write_file(fs, temporary, bytes);
  if (status.ok()) status = fs.rename(temporary, path);
  if (status.ok()) return fs.sync_dir(parent_path(path));
  // The first failure is the one to report.
  (void)fs.remove(temporary).ok();
  return status;
}

Status write_output(const std::string& path, std::string_view bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes << std::flush;
  return file ? ok_status() : os_error("write " + path, errno);
}

Result<std::string> read_file(FileSystem& fs, const std::string& path,
                              uint64_t max_bytes) {
  ASSIGN_OR_RETURN(const auto file, fs.open(path));
  ASSIGN_OR_RETURN(const uint64_t size, file->size());
  if (size > max_bytes)
    return corrupt(path + ": " + std::to_string(size) + " bytes, at most " +
                   std::to_string(max_bytes) + " expected");
  std::string text(size, '\0');
  RETURN_IF_ERROR(file->read_at(
      0, std::as_writable_bytes(std::span(text.data(), text.size()))));
  return text;
}

Status remove_all(FileSystem& fs, const std::string& path) {
  const Status there = fs.look_up(path);
  if (there.code() == Code::kNotFound) return ok_status();
  RETURN_IF_ERROR(there);
  return fs.remove_tree(path);
}

Status FileSystem::remove_tree(const std::string& path) {
  // This also removes a link, whatever it leads to, which is somebody else's.
  Status removed = remove(path);
  if (removed.ok()) return removed;
  const auto names = list_folder(path);
  if (!names.ok()) return removed;  // not a directory
  for (auto name = names->rbegin(); name != names->rend(); ++name)
    RETURN_IF_ERROR(remove_all(*this, path_join(path, *name)));
  return remove(path);
}

std::string xxh128_text(std::string_view bytes) {
  return hex(xxh3_128(std::as_bytes(std::span(bytes))));
}

}  // namespace remesh
