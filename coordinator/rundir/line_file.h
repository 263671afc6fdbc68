// Files of lines: appending so that a killed writer loses nothing, reading
// while another process writes.
//
// LineFile appends whole lines with write(2): once append() has returned, the
// lines survive a kill -9 of the writer (they are in the page cache). A crash
// of the host may lose the tail; sync() bounds how much. A line torn by either
// is cut off by the next open().
//
// LineTail follows a file that may not exist yet; it gives whole lines only.
//
// Ownership: both own their descriptor. Threads: one thread at a time, except
// sync_fd(), a descriptor to fdatasync from another thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"

namespace remesh::rundir {

class LineFile {
 public:
  using Valid = std::function<bool(std::string_view line)>;

  // Opens or makes the file. Lines at its end that are not whole or not
  // `valid` are cut off (cut_bytes() says how much), at most kMaxCutBytes of
  // them: more is not a torn tail but another kind of damage, hence Corrupt.
  static Result<std::unique_ptr<LineFile>> open(const std::string& path,
                                                const Valid& valid);
  ~LineFile();
  LineFile(const LineFile&) = delete;
  LineFile& operator=(const LineFile&) = delete;

  // Appends `text` (lines, each with its '\n'), all of it or nothing: after a
  // failed write the file is cut back to where it was.
  Status append(std::string_view text);
  // The last line when the file was opened, "" when there was none.
  const std::string& last_line() const { return last_line_; }
  uint64_t cut_bytes() const { return cut_bytes_; }
  int sync_fd() const { return fd_; }

  static constexpr uint64_t kMaxCutBytes = 1 << 20;

 private:
  LineFile() = default;
  Status repair(const Valid& valid);

  std::string path_;
  int fd_ = -1;
  uint64_t size_ = 0;
  uint64_t cut_bytes_ = 0;
  std::string last_line_;
};

class LineTail {
 public:
  // from_end: only lines that are written from now on.
  LineTail(std::string path, bool from_end);
  ~LineTail();
  LineTail(const LineTail&) = delete;
  LineTail& operator=(const LineTail&) = delete;

  // New whole lines since the last call, without '\n'; none when the file is
  // not there. Does not block.
  std::vector<std::string> poll();

 private:
  std::string path_;
  int fd_ = -1;
  uint64_t offset_ = 0;
  std::string partial_;
};

// All whole lines of a file; none when it is not there.
std::vector<std::string> read_lines(const std::string& path);

}  // namespace remesh::rundir
