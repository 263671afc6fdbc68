#include "proto/base/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "proto/base/descriptor.h"

namespace remesh {

Result<MappedFile> MappedFile::open(const std::string& path) {
  struct stat st;
  // A pipe has no end, and opening one may block.
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0)
    return errno == ENOENT ? not_found(path + ": no such file")
                           : errno_error("open " + path, errno);
  MappedFile file(path);
  if (::fstat(fd.get(), &st) != 0) return errno_error("stat " + path, errno);
  if (!S_ISREG(st.st_mode))
    return invalid_argument(path + ": must be a regular file");
  if (const auto size = static_cast<size_t>(st.st_size); size > 0) {
    void* const map = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (map == MAP_FAILED) return errno_error("map " + path, errno);
    file.bytes_ = {static_cast<const std::byte*>(map), size};
  }
  return file;
}

Status MappedFile::load(std::span<const std::byte> bytes) const {
#ifdef MADV_POPULATE_READ
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(bytes.data());
  const uintptr_t first = begin / page * page;
  // Other errors, as of old kernels and without memory, say nothing of the
  // file.
  if (bytes.empty() ||
      ::madvise(reinterpret_cast<void*>(first), begin + bytes.size() - first,
                MADV_POPULATE_READ) == 0 ||
      (errno != EFAULT && errno != EHWPOISON))
    return ok_status();
  return io_error(path_ +
                  ": cannot be read: the storage returned an error, or the "
                  "file has become shorter");
#else
  (void)bytes;
  return ok_status();
#endif
}

void MappedFile::release_pages() const {
  if (!bytes_.empty())
    (void)::madvise(const_cast<std::byte*>(bytes_.data()), bytes_.size(),
                    MADV_DONTNEED);
}

MappedFile::~MappedFile() {
  if (!bytes_.empty())
    ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace remesh
