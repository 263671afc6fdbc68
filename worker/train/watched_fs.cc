#include "worker/train/watched_fs.h"

#include <string>
#include <utility>
#include <vector>

namespace remesh::train {
namespace {

using manifest::File;
using manifest::FileSystem;
using Moved = std::function<void()>;

class WatchedFile final : public File {
 public:
  WatchedFile(std::unique_ptr<File> inner, const Moved& moved)
      : inner_(std::move(inner)), moved_(moved) {}
  Status write_at(uint64_t offset, std::span<const std::byte> bytes) override {
    return told(inner_->write_at(offset, bytes));
  }
  Status read_at(uint64_t offset, std::span<std::byte> bytes) override {
    return told(inner_->read_at(offset, bytes));
  }
  Result<uint64_t> size() override { return inner_->size(); }
  Status truncate(uint64_t size) override {
    return told(inner_->truncate(size));
  }
  Status sync() override { return told(inner_->sync()); }
  Status close() override { return told(inner_->close()); }

 private:
  Status told(Status status) {
    moved_();
    return status;
  }
  std::unique_ptr<File> inner_;
  Moved moved_;
};

class WatchedFileSystem final : public FileSystem {
 public:
  WatchedFileSystem(FileSystem& inner, Moved moved)
      : inner_(inner), moved_(std::move(moved)) {}

  Result<std::unique_ptr<File>> open(const std::string& path) override {
    return watched(inner_.open(path));
  }
  Result<std::unique_ptr<File>> create(const std::string& path) override {
    return watched(inner_.create(path));
  }
  Result<std::unique_ptr<File>> create_streamed(
      const std::string& path) override {
    return watched(inner_.create_streamed(path));
  }
  Status create_dirs(const std::string& path) override {
    return told(inner_.create_dirs(path));
  }
  Result<std::vector<std::string>> list(const std::string& path) override {
    return inner_.list(path);
  }
  bool exists(const std::string& path) override { return inner_.exists(path); }
  Result<uint64_t> size(const std::string& path) override {
    return inner_.size(path);
  }
  Status rename(const std::string& from, const std::string& to) override {
    return told(inner_.rename(from, to));
  }
  Status remove(const std::string& path) override {
    return told(inner_.remove(path));
  }
  Status sync_dir(const std::string& path) override {
    return told(inner_.sync_dir(path));
  }

 private:
  Result<std::unique_ptr<File>> watched(Result<std::unique_ptr<File>> file) {
    moved_();
    if (!file.ok()) return file;
    return std::unique_ptr<File>(
        std::make_unique<WatchedFile>(std::move(file).value(), moved_));
  }
  Status told(Status status) {
    moved_();
    return status;
  }
  FileSystem& inner_;
  Moved moved_;
};

}  // namespace

std::unique_ptr<FileSystem> watched_file_system(FileSystem& inner,
                                                Moved moved) {
  return std::make_unique<WatchedFileSystem>(inner, std::move(moved));
}

}  // namespace remesh::train
