// FileSystem: the operating system's files behind a seam that a test can make
// fail, fill up or crash at any call. Everything that must survive a crash goes
// through it: checkpoints (the bytes of HDF5 files included), the run
// directory, the journal's creation and data sets.
//
// Durability is explicit, as POSIX has it: bytes of a file are safe after
// File::sync, and the entries of a directory (created, renamed or removed
// names) after FileSystem::sync_dir of that directory (Pillai et al., OSDI'14).
//
// Threads: a FileSystem may be used by several threads at once; a File by one
// at a time. Errors: every failure is a Status that names the path; disk full
// is Code::kExhausted, a missing file Code::kNotFound, else Code::kIo.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace remesh {

// An open file. The destructor closes it too, but a writer calls close() to
// learn of late errors.
class File {
 public:
  virtual ~File() = default;
  // Writes all bytes at `offset`, or fails.
  virtual Status write_at(uint64_t offset,
                          std::span<const std::byte> bytes) = 0;
  // Fills `bytes` from `offset`; Corrupt if the file is too short.
  virtual Status read_at(uint64_t offset, std::span<std::byte> bytes) = 0;
  virtual Result<uint64_t> size() = 0;
  virtual Status truncate(uint64_t size) = 0;
  virtual Status sync() = 0;
  virtual Status close() = 0;
};

// How a streamed file is written. A FileSystem may ignore all of it.
struct StreamOptions {
  // Bytes that may be buffered before write_at() blocks; at least a few buffers
  // are allowed. With the size of the file, write_at() never blocks, and the
  // caller's buffer is free as soon as it has been copied.
  uint64_t room = 0;
  // Once true, buffered bytes are dropped and every call soon fails. May be
  // null.
  const std::atomic<bool>* give_up = nullptr;
  // Called after each write to the disk, from any thread.
  std::function<void()> moved;
  // Called first in the thread that writes to the disk, if there is one.
  std::function<void()> in_thread;
  // After each buffer the thread sleeps this many times as long as the write
  // took, until *hurry is true (null: never), so that background writes leave
  // processor, memory and disk to other work.
  double idle = 0;
  const std::atomic<bool>* hurry = nullptr;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;

  // Only to be read.
  virtual Result<std::unique_ptr<File>> open(const std::string& path) = 0;
  // An existing file, no link, to be read and overwritten in place.
  virtual Result<std::unique_ptr<File>> open_to_write(const std::string& path) {
    return open(path);
  }
  // Creates or truncates a file, readable and writable.
  virtual Result<std::unique_ptr<File>> create(const std::string& path) = 0;
  // Like create(), but what was at `path` is removed first, and nothing that
  // somebody else puts there, a link included, is written to.
  virtual Result<std::unique_ptr<File>> create_new(const std::string& path) {
    return create(path);
  }
  // Like create(), for a large file that is written once, from front to back,
  // and not read soon: bytes may still be buffered when write_at() returns, and
  // a failure may show in a later call, at the latest in sync().
  virtual Result<std::unique_ptr<File>> create_streamed(
      const std::string& path, const StreamOptions& /*options*/ = {}) {
    return create(path);
  }
  // Creates the directory and its parents; ok if it exists. Does not sync.
  virtual Status create_dirs(const std::string& path) = 0;
  // Names in a directory, sorted, without "." and "..".
  virtual Result<std::vector<std::string>> list(const std::string& path) = 0;
  // The same, but not of a link that leads to a directory.
  virtual Result<std::vector<std::string>> list_folder(
      const std::string& path) {
    return list(path);
  }
  // Ok if there is something at the path, be it a link that leads nowhere;
  // NotFound if there is nothing. Any other failure leaves that open.
  virtual Status look_up(const std::string& path) = 0;
  // Also false if the path cannot be examined.
  bool exists(const std::string& path) { return look_up(path).ok(); }
  // Size of a regular file.
  virtual Result<uint64_t> size(const std::string& path) = 0;
  // Atomic; replaces a file, or an empty directory.
  virtual Status rename(const std::string& from, const std::string& to) = 0;
  // A file or an empty directory.
  virtual Status remove(const std::string& path) = 0;
  // What is at `path`; see remove_all().
  virtual Status remove_tree(const std::string& path);
  virtual Status sync_dir(const std::string& path) = 0;
};

// The operating system's. Reuses the buffers of streamed files.
std::unique_ptr<FileSystem> posix_file_system();

// "dir/name".
std::string path_join(std::string_view dir, std::string_view name);
// The directory that holds `path`; "." for a plain name.
std::string parent_path(std::string path);
// Absolute, without "." and "..", and without '/' at its end; does not resolve
// links. Without a working directory: `path`.
std::string absolute_path(const std::string& path);
// What links lead to resolved, or, where that is not possible, as
// absolute_path().
std::string real_path(const std::string& path);
// Whether something, or a folder, is there, at the end of links; false if that
// cannot be found out.
bool path_exists(const std::string& path);
bool is_folder(const std::string& path);
// Whether the open file is what is at `path`, and not one that was removed or
// replaced there.
bool is_at(int fd, const std::string& path);
// Removes what is there, and creates, writes, syncs and closes the file. Not
// atomic.
Status write_file(FileSystem& fs, const std::string& path,
                  std::string_view bytes);
// A path beside `path` for what is to be renamed to it, which nobody can know
// beforehand and occupy. remove_temporaries() first.
std::string temporary_path(FileSystem& fs, const std::string& path);
// Removes what a writer that failed or was killed has left at temporary paths.
// One writer of a path at a time.
void remove_temporaries(FileSystem& fs, const std::string& path);
// Replaces `path` durably: writes a temporary file, syncs it, renames it and
// syncs the directory. Whatever fails and wherever the machine stops, `path`
// has all of the old bytes or all of the new ones. One writer of a path at a
// time.
Status write_file_atomically(FileSystem& fs, const std::string& path,
                             std::string_view bytes);
// What a user wants to have at `path`: a file, also at the end of a link, or a
// device such as /dev/stdout. Neither atomic nor durable.
Status write_output(const std::string& path, std::string_view bytes);
// The whole file; Corrupt when it is longer than max_bytes.
Result<std::string> read_file(FileSystem& fs, const std::string& path,
                              uint64_t max_bytes);
// A file, a link (not what it leads to), or a directory and everything below
// it, the last name first, even if somebody else replaces a directory by a link
// meanwhile. Ok if there is nothing.
Status remove_all(FileSystem& fs, const std::string& path);
// 32 hex digits, as `xxhsum -H2` prints them.
std::string xxh128_text(std::string_view bytes);

}  // namespace remesh
