// A file system that calls a function before each call that names a path, so
// that a test can let something happen between two of them.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "proto/base/file_system.h"

namespace remesh {

class HookedFileSystem final : public FileSystem {
 public:
  // call: "rename", "list", ...; path: of a rename the first one.
  using Hook =
      std::function<Status(const std::string& call, const std::string& path)>;

  // hidden: names that listings lack, as if they came from a cache.
  explicit HookedFileSystem(Hook hook, std::set<std::string> hidden = {})
      : hook_(std::move(hook)), hidden_(std::move(hidden)) {}

  Result<std::unique_ptr<File>> open(const std::string& path) override {
    RETURN_IF_ERROR(hook_("open", path));
    return fs_->open(path);
  }
  Result<std::unique_ptr<File>> open_to_write(
      const std::string& path) override {
    RETURN_IF_ERROR(hook_("open_to_write", path));
    return fs_->open_to_write(path);
  }
  Result<std::unique_ptr<File>> create(const std::string& path) override {
    RETURN_IF_ERROR(hook_("create", path));
    return fs_->create(path);
  }
  Status create_dirs(const std::string& path) override {
    RETURN_IF_ERROR(hook_("create_dirs", path));
    return fs_->create_dirs(path);
  }
  Result<std::vector<std::string>> list(const std::string& path) override {
    RETURN_IF_ERROR(hook_("list", path));
    ASSIGN_OR_RETURN(auto names, fs_->list(path));
    std::erase_if(names, [&](const auto& n) { return hidden_.contains(n); });
    return names;
  }
  Result<std::vector<std::string>> list_folder(
      const std::string& path) override {
    RETURN_IF_ERROR(hook_("list", path));
    return fs_->list_folder(path);
  }
  Status look_up(const std::string& path) override {
    RETURN_IF_ERROR(hook_("look_up", path));
    return fs_->look_up(path);
  }
  Result<uint64_t> size(const std::string& path) override {
    RETURN_IF_ERROR(hook_("size", path));
    return fs_->size(path);
  }
  Status rename(const std::string& from, const std::string& to) override {
    RETURN_IF_ERROR(hook_("rename", from));
    return fs_->rename(from, to);
  }
  Status remove(const std::string& path) override {
    RETURN_IF_ERROR(hook_("remove", path));
    return fs_->remove(path);
  }
  Status sync_dir(const std::string& path) override {
    RETURN_IF_ERROR(hook_("sync_dir", path));
    return fs_->sync_dir(path);
  }

 private:
  Hook hook_;
  std::set<std::string> hidden_;
  std::unique_ptr<FileSystem> fs_ = posix_file_system();
};

}  // namespace remesh
