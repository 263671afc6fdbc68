// The folder that `remesh data prepare` or mix writes. Not thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "proto/base/file_system.h"
#include "proto/base/status.h"
#include "proto/data/index.h"
#include "worker/data/split_writer.h"

namespace remesh::data {

// Created if missing, and locked.
class OutDir {
 public:
  static Result<std::unique_ptr<OutDir>> open(FileSystem& fs,
                                              const std::string& path);
  ~OutDir();
  OutDir(const OutDir&) = delete;
  OutDir& operator=(const OutDir&) = delete;

  const std::string& path() const { return path_; }
  FileSystem& fs() const { return fs_; }
  bool has_index() const;  // or that cannot be known now
  // The sorted names in the folder: those that prepare may have written (own),
  // and others (foreign).
  Status list(std::vector<std::string>& own,
              std::vector<std::string>& foreign) const;
  // Renames the finished files into place, the index last, and removes what an
  // earlier data set has left. If a rename fails, the folder has no data set.
  Status commit(const Index& index, const std::vector<SplitWriter*>& splits);

 private:
  OutDir(FileSystem& fs, std::string path, bool made)
      : fs_(fs), path_(std::move(path)), made_(made) {}

  FileSystem& fs_;
  std::string path_;
  bool made_;
  int fd_ = -1;
};

}  // namespace remesh::data
