// Files of lines: appended so that a killed writer loses nothing, and read
// while another process writes.
//
// LineFile appends lines with write(2): once append() has returned, the lines
// survive a kill -9 of the writer (they are in the page cache). A crash of the
// host may lose the tail; fdatasync of sync_fd() bounds how much. The next
// open() removes a torn line.
//
// LineTail follows a file that may not exist yet, or is replaced by a copy; it
// returns complete lines only.
//
// Ownership: both own their descriptor. Threads: one at a time, except that
// another thread may fdatasync sync_fd().
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

  // Opens or creates the file. Removes lines at its end that are incomplete or
  // not `valid` (cut_bytes() is the number of bytes). More than kMaxCutBytes is
  // not a torn tail but other damage, and is kept in PATH.damaged; without any
  // valid line before it: Corrupt.
  static Result<std::unique_ptr<LineFile>> open(const std::string& path,
                                                const Valid& valid);
  ~LineFile();
  LineFile(const LineFile&) = delete;
  LineFile& operator=(const LineFile&) = delete;

  // Appends `text` (lines, each with its '\n') completely or not at all: a
  // failed write truncates the file to its previous size. Cancelled if the file
  // does not end where this object left it.
  Status append(std::string_view text);
  // Cancelled if the file does not end where this object left it.
  Status check_end();
  // Writes the file again if it was removed, or replaced by another, which is
  // kept as PATH.replaced. Whether it was. sync_fd() then refers to the new
  // file.
  Result<bool> put_back();
  // The last line when the file was opened; "" if there was none.
  const std::string& last_line() const { return last_line_; }
  uint64_t cut_bytes() const { return cut_bytes_; }
  uint64_t size() const { return size_; }
  int sync_fd() const { return fd_; }

  static constexpr uint64_t kMaxCutBytes = 1 << 20;

 private:
  LineFile() = default;
  Status repair(const Valid& valid);
  size_t end_of_valid(const std::string& text, const Valid& valid);
  Status copy_to(int fd, const std::string& path) const;

  std::string path_;
  int fd_ = -1;
  uint64_t size_ = 0;
  bool torn_ = false;  // a part of a line may follow
  uint64_t cut_bytes_ = 0;
  std::string last_line_;
};

class LineTail {
 public:
  // from_end: only lines written from now on.
  LineTail(std::string path, bool from_end);
  ~LineTail();
  LineTail(const LineTail&) = delete;
  LineTail& operator=(const LineTail&) = delete;

  // New complete lines since the last call, without '\n'; none if the file does
  // not exist. Does not block.
  std::vector<std::string> poll();

 private:
  std::string path_;
  int fd_ = -1;
  uint64_t offset_ = 0;
  std::string partial_;
};

// All complete lines of a file; none if it does not exist.
std::vector<std::string> read_lines(const std::string& path);

}  // namespace remesh::rundir
