#include "worker/train/watched_fs.h"

#include <string>
#include <utility>
#include <vector>

namespace remesh::train {
namespace {

using Moved = std::function<void()>;

// Shared by the file system and its files.
struct Watch {
  Moved moved;
  const std::atomic<bool>* give_up = nullptr;

  // Performs the call unless cancelled.
  template <typename F>
  auto operator()(F call) const -> decltype(call()) {
    if (give_up != nullptr && give_up->load())
      return cancelled("abandoned before it was done");
    auto result = call();
    moved();
    return result;
  }
};

class WatchedFile final : public File {
 public:
  WatchedFile(std::unique_ptr<File> inner, const Watch& watch)
      : inner_(std::move(inner)), watch_(watch) {}
  Status write_at(uint64_t offset, std::span<const std::byte> bytes) override {
    return watch_([&] { return inner_->write_at(offset, bytes); });
  }
  Status read_at(uint64_t offset, std::span<std::byte> bytes) override {
    return watch_([&] { return inner_->read_at(offset, bytes); });
  }
  Result<uint64_t> size() override { return inner_->size(); }
  Status truncate(uint64_t size) override {
    return watch_([&] { return inner_->truncate(size); });
  }
  Status sync() override {
    return watch_([&] { return inner_->sync(); });
  }
  Status close() override {
    return watch_([&] { return inner_->close(); });
  }

 private:
  std::unique_ptr<File> inner_;
  const Watch watch_;
};

class WatchedFileSystem final : public FileSystem {
 public:
  WatchedFileSystem(FileSystem& inner, Watch watch)
      : inner_(inner), watch_(std::move(watch)) {}

  Result<std::unique_ptr<File>> open(const std::string& path) override {
    return watched([&] { return inner_.open(path); });
  }
  Result<std::unique_ptr<File>> create(const std::string& path) override {
    return watched([&] { return inner_.create(path); });
  }
  Result<std::unique_ptr<File>> create_new(const std::string& path) override {
    return watched([&] { return inner_.create_new(path); });
  }
  Result<std::unique_ptr<File>> create_streamed(
      const std::string& path, const StreamOptions& options) override {
    StreamOptions watching = options;
    watching.give_up = watch_.give_up;
    watching.moved = watch_.moved;
    return watched([&] { return inner_.create_streamed(path, watching); });
  }
  Status create_dirs(const std::string& path) override {
    return watch_([&] { return inner_.create_dirs(path); });
  }
  Result<std::vector<std::string>> list(const std::string& path) override {
    return inner_.list(path);
  }
  Result<std::vector<std::string>> list_folder(
      const std::string& path) override {
    return inner_.list_folder(path);
  }
  Status look_up(const std::string& path) override {
    return inner_.look_up(path);
  }
  Result<uint64_t> size(const std::string& path) override {
    return inner_.size(path);
  }
  Status rename(const std::string& from, const std::string& to) override {
    return watch_([&] { return inner_.rename(from, to); });
  }
  Status remove(const std::string& path) override {
    return watch_([&] { return inner_.remove(path); });
  }
  Status remove_tree(const std::string& path) override {
    return watch_([&] { return inner_.remove_tree(path); });
  }
  Status sync_dir(const std::string& path) override {
    return watch_([&] { return inner_.sync_dir(path); });
  }

 private:
  template <typename F>
  Result<std::unique_ptr<File>> watched(F call) const {
    ASSIGN_OR_RETURN(auto file, watch_(call));
    return std::unique_ptr<File>(
        std::make_unique<WatchedFile>(std::move(file), watch_));
  }
  FileSystem& inner_;
  const Watch watch_;
};

}  // namespace

std::unique_ptr<FileSystem> watched_file_system(
    FileSystem& inner, Moved moved, const std::atomic<bool>* give_up) {
  return std::make_unique<WatchedFileSystem>(
      inner, Watch{.moved = std::move(moved), .give_up = give_up});
}

}  // namespace remesh::train
