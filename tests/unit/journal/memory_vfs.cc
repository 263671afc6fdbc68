#include "tests/unit/journal/memory_vfs.h"

#include <cstring>
#include <memory>
#include <string>
#include <utility>

namespace remesh::server {
namespace {

struct OpenFile {
  sqlite3_file base;  // first: SQLite casts
  FileSystem* fs;
  File* file;
  std::string* path;
  bool sync_dir;  // with the next sync
};

OpenFile* of(sqlite3_file* f) { return reinterpret_cast<OpenFile*>(f); }

int code_of(const Status& status, int otherwise) {
  if (status.ok()) return SQLITE_OK;
  return status.code() == Code::kExhausted ? SQLITE_FULL : otherwise;
}

int close_file(sqlite3_file* f) {
  const std::unique_ptr<File> file(std::exchange(of(f)->file, nullptr));
  const std::unique_ptr<std::string> path(of(f)->path);
  return code_of(file->close(), SQLITE_IOERR_CLOSE);
}

int read_file(sqlite3_file* f, void* out, int bytes, sqlite3_int64 at) {
  const auto size = of(f)->file->size();
  if (!size.ok()) return SQLITE_IOERR_READ;
  const auto begin = static_cast<uint64_t>(at);
  const uint64_t there = *size > begin ? *size - begin : 0;
  const auto n = std::min<uint64_t>(static_cast<uint64_t>(bytes), there);
  auto* const to = static_cast<std::byte*>(out);
  if (n > 0 && !of(f)->file->read_at(begin, {to, n}).ok())
    return SQLITE_IOERR_READ;
  std::memset(to + n, 0, static_cast<size_t>(bytes) - n);
  return n == static_cast<uint64_t>(bytes) ? SQLITE_OK
                                           : SQLITE_IOERR_SHORT_READ;
}

int write_file(sqlite3_file* f, const void* from, int bytes, sqlite3_int64 at) {
  return code_of(of(f)->file->write_at(static_cast<uint64_t>(at),
                                       {static_cast<const std::byte*>(from),
                                        static_cast<size_t>(bytes)}),
                 SQLITE_IOERR_WRITE);
}

int truncate_file(sqlite3_file* f, sqlite3_int64 size) {
  return code_of(of(f)->file->truncate(static_cast<uint64_t>(size)),
                 SQLITE_IOERR_TRUNCATE);
}

int sync_file(sqlite3_file* f, int /*flags*/) {
  Status status = of(f)->file->sync();
  if (status.ok() && std::exchange(of(f)->sync_dir, false))
    status = of(f)->fs->sync_dir(parent_path(*of(f)->path));
  return code_of(status, SQLITE_IOERR_FSYNC);
}

int file_size(sqlite3_file* f, sqlite3_int64* size) {
  const auto result = of(f)->file->size();
  if (!result.ok()) return SQLITE_IOERR_FSTAT;
  *size = static_cast<sqlite3_int64>(*result);
  return SQLITE_OK;
}

int lock_file(sqlite3_file*, int) { return SQLITE_OK; }
int no_reserved_lock(sqlite3_file*, int* held) {
  *held = 0;
  return SQLITE_OK;
}
int no_control(sqlite3_file*, int, void*) { return SQLITE_NOTFOUND; }
int sector_size(sqlite3_file*) { return 512; }
int no_characteristics(sqlite3_file*) { return 0; }

constexpr sqlite3_io_methods kMethods = {
    1,          close_file,  read_file,         write_file, truncate_file,
    sync_file,  file_size,   lock_file,         lock_file,  no_reserved_lock,
    no_control, sector_size, no_characteristics};

FileSystem& fs_of(sqlite3_vfs* vfs) {
  return static_cast<MemoryVfs*>(vfs->pAppData)->fs();
}

int open_file(sqlite3_vfs* vfs, const char* name, sqlite3_file* f, int flags,
              int* out_flags) {
  f->pMethods = nullptr;
  FileSystem& fs = fs_of(vfs);
  const std::string path = name != nullptr ? name : "sqlite-temporary";
  const bool create = (flags & SQLITE_OPEN_CREATE) != 0 && !fs.exists(path);
  auto file = create ? fs.create(path) : fs.open(path);
  if (!file.ok()) return code_of(file.status(), SQLITE_CANTOPEN);
  *of(f) = {.base = {&kMethods},
            .fs = &fs,
            .file = std::move(file).value().release(),
            .path = new std::string(path),
            .sync_dir = create && (flags & SQLITE_OPEN_MAIN_JOURNAL) != 0};
  if (out_flags != nullptr) *out_flags = flags;
  return SQLITE_OK;
}

int delete_file(sqlite3_vfs* vfs, const char* name, int sync_dir) {
  FileSystem& fs = fs_of(vfs);
  if (!fs.exists(name)) return SQLITE_IOERR_DELETE_NOENT;
  Status status = fs.remove(name);
  if (status.ok() && sync_dir != 0) status = fs.sync_dir(parent_path(name));
  return code_of(status, SQLITE_IOERR_DELETE);
}

int access_file(sqlite3_vfs* vfs, const char* name, int /*flags*/, int* yes) {
  const auto size = fs_of(vfs).size(name);
  // As in the Unix VFS: an empty file does not exist for this question.
  *yes = size.ok() && *size > 0 ? 1 : 0;
  return SQLITE_OK;
}

int full_path(sqlite3_vfs*, const char* name, int room, char* out) {
  sqlite3_snprintf(room, out, "%s", name);
  return SQLITE_OK;
}

}  // namespace

MemoryVfs::MemoryVfs() {
  const sqlite3_vfs* const unix_vfs = sqlite3_vfs_find(nullptr);
  vfs_ = *unix_vfs;
  vfs_.iVersion = 2;
  vfs_.szOsFile = sizeof(OpenFile);
  vfs_.mxPathname = 512;
  vfs_.pNext = nullptr;
  vfs_.zName = "remesh-memory";
  vfs_.pAppData = this;
  vfs_.xOpen = open_file;
  vfs_.xDelete = delete_file;
  vfs_.xAccess = access_file;
  vfs_.xFullPathname = full_path;
  sqlite3_vfs_register(&vfs_, /*makeDflt=*/1);
}

MemoryVfs::~MemoryVfs() { sqlite3_vfs_unregister(&vfs_); }

}  // namespace remesh::server
