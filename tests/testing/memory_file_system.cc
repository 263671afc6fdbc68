#include "tests/testing/memory_file_system.h"

#include <algorithm>
#include <cstring>

namespace remesh {

class MemoryFile final : public File {
 public:
  MemoryFile(MemoryFileSystem& fs, std::shared_ptr<MemoryFileSystem::Node> node,
             std::string path)
      : fs_(fs), node_(std::move(node)), path_(std::move(path)) {}

  Status write_at(uint64_t offset, std::span<const std::byte> bytes) override {
    size_t torn = 0;
    Status s = fs_.step(MemoryFileSystem::Kind::kGrow, "write " + path_,
                        bytes.size(), &torn);
    if (!s.ok()) bytes = bytes.first(torn);
    if (!bytes.empty()) {
      std::string& data = node_->data;
      data.resize(std::max<size_t>(data.size(), offset + bytes.size()));
      std::memcpy(data.data() + offset, bytes.data(), bytes.size());
    }
    return s;
  }
  Status read_at(uint64_t offset, std::span<std::byte> bytes) override {
    RETURN_IF_ERROR(fs_.step(MemoryFileSystem::Kind::kRead, "read " + path_));
    const std::string& data = node_->data;
    if (offset > data.size() || bytes.size() > data.size() - offset)
      return corrupt(path_ + ": ends before");
    if (!bytes.empty())
      std::memcpy(bytes.data(), data.data() + offset, bytes.size());
    return ok_status();
  }
  Result<uint64_t> size() override { return uint64_t{node_->data.size()}; }
  Status truncate(uint64_t size) override {
    RETURN_IF_ERROR(
        fs_.step(MemoryFileSystem::Kind::kGrow, "truncate " + path_));
    node_->data.resize(size);
    return ok_status();
  }
  Status sync() override {
    RETURN_IF_ERROR(fs_.step(MemoryFileSystem::Kind::kGrow, "sync " + path_));
    node_->synced_data = node_->data;
    return ok_status();
  }
  Status close() override {
    return fs_.step(MemoryFileSystem::Kind::kOther, "close " + path_);
  }

 private:
  MemoryFileSystem& fs_;
  std::shared_ptr<MemoryFileSystem::Node> node_;
  std::string path_;
};

MemoryFileSystem::MemoryFileSystem() : root_(std::make_shared<Node>()) {
  root_->is_dir = true;
}

std::shared_ptr<MemoryFileSystem::Node> MemoryFileSystem::copy(
    const Node& node) {
  auto twin = std::make_shared<Node>(node);
  // A synced name that still exists is one node, not two.
  for (auto& [name, child] : twin->names) child = copy(*child);
  for (auto& [name, child] : twin->synced_names) {
    const auto it = node.names.find(name);
    child = it != node.names.end() && it->second == child ? twin->names[name]
                                                          : copy(*child);
  }
  return twin;
}

std::unique_ptr<MemoryFileSystem> MemoryFileSystem::clone() const {
  auto fs = std::make_unique<MemoryFileSystem>();
  fs->root_ = copy(*root_);
  return fs;
}

void MemoryFileSystem::fail_at(int64_t call, Fault fault, Torn torn) {
  calls_ = 0;
  fail_call_ = call;
  fault_ = fault;
  torn_ = torn;
  failed_a_write_ = false;
}

Status MemoryFileSystem::step(Kind kind, const std::string& what, size_t bytes,
                              size_t* torn) {
  // Crashing before a read or before the next change is the same.
  if (fault_ == Fault::kCrash && kind == Kind::kRead && calls_ <= fail_call_)
    return ok_status();
  if (fault_ == Fault::kFull && kind != Kind::kGrow) return ok_status();
  const int64_t call = calls_++;
  if (fault_ == Fault::kNone || call < fail_call_) return ok_status();
  if (call == fail_call_ && torn != nullptr && bytes > 0) {
    failed_a_write_ = true;
    *torn = torn_ == Torn::kNothing ? 0
            : torn_ == Torn::kHalf  ? bytes / 2
                                    : bytes - 1;
  }
  switch (fault_) {
    case Fault::kCrash:
      return io_error(what + ": crashed");
    case Fault::kIoOnce:
      if (call == fail_call_) return io_error(what + ": Input/output error");
      break;
    case Fault::kFull:
      return exhausted(what + ": No space left on device");
    case Fault::kNone:
      break;
  }
  return ok_status();
}

void MemoryFileSystem::recover(Survives survives, std::mt19937_64& rng) {
  fault_ = Fault::kNone;
  const auto keeps = [&] {
    return survives == Survives::kAll ||
           (survives == Survives::kSome && rng() % 2 == 0);
  };
  std::vector<std::shared_ptr<Node>> todo = {root_};
  while (!todo.empty()) {
    const std::shared_ptr<Node> node = todo.back();
    todo.pop_back();
    if (!keeps()) {
      node->data = node->synced_data;
      node->names = node->synced_names;
    }
    node->synced_data = node->data;
    node->synced_names = node->names;
    for (const auto& [name, child] : node->names) todo.push_back(child);
  }
}

std::shared_ptr<MemoryFileSystem::Node> MemoryFileSystem::find(
    const std::string& path) const {
  std::shared_ptr<Node> node = root_;
  for (size_t at = 0; at < path.size() && node;) {
    const size_t end = std::min(path.find('/', at), path.size());
    if (end > at && path.substr(at, end - at) != ".") {
      const auto it = node->names.find(path.substr(at, end - at));
      node = it == node->names.end() ? nullptr : it->second;
    }
    at = end + 1;
  }
  return node;
}

std::shared_ptr<MemoryFileSystem::Node> MemoryFileSystem::parent(
    const std::string& path, std::string& name) const {
  const size_t slash = path.find_last_of('/');
  name = path.substr(slash == std::string::npos ? 0 : slash + 1);
  const auto node =
      slash == std::string::npos ? root_ : find(path.substr(0, slash));
  return node && node->is_dir ? node : nullptr;
}

Result<std::unique_ptr<File>> MemoryFileSystem::open(const std::string& path) {
  RETURN_IF_ERROR(step(Kind::kRead, "open " + path));
  const auto node = find(path);
  if (!node || node->is_dir) return not_found("open " + path);
  return std::unique_ptr<File>(std::make_unique<MemoryFile>(*this, node, path));
}

Result<std::unique_ptr<File>> MemoryFileSystem::create(
    const std::string& path) {
  RETURN_IF_ERROR(step(Kind::kGrow, "create " + path));
  std::string name;
  const auto dir = parent(path, name);
  if (!dir) return not_found("create " + path);
  auto& node = dir->names[name];
  if (!node) node = std::make_shared<Node>();
  if (node->is_dir) return io_error("create " + path + ": a directory");
  node->data.clear();
  return std::unique_ptr<File>(std::make_unique<MemoryFile>(*this, node, path));
}

Status MemoryFileSystem::create_dirs(const std::string& path) {
  RETURN_IF_ERROR(step(Kind::kGrow, "create directory " + path));
  std::shared_ptr<Node> node = root_;
  for (size_t at = 0; at < path.size();) {
    const size_t end = std::min(path.find('/', at), path.size());
    if (end > at) {
      auto& child = node->names[path.substr(at, end - at)];
      if (!child) {
        child = std::make_shared<Node>();
        child->is_dir = true;
      }
      node = child;
    }
    at = end + 1;
  }
  return ok_status();
}

Result<std::vector<std::string>> MemoryFileSystem::list(
    const std::string& path) {
  RETURN_IF_ERROR(step(Kind::kRead, "list " + path));
  const auto node = find(path);
  if (!node || !node->is_dir) return not_found("list " + path);
  std::vector<std::string> names;
  for (const auto& [name, child] : node->names) names.push_back(name);
  return names;
}

Status MemoryFileSystem::look_up(const std::string& path) {
  return find(path) ? ok_status() : not_found("stat " + path);
}

Result<uint64_t> MemoryFileSystem::size(const std::string& path) {
  RETURN_IF_ERROR(step(Kind::kRead, "stat " + path));
  const auto node = find(path);
  if (!node) return not_found("stat " + path);
  if (node->is_dir) return io_error(path + ": not a regular file");
  return uint64_t{node->data.size()};
}

Status MemoryFileSystem::rename(const std::string& from,
                                const std::string& to) {
  RETURN_IF_ERROR(step(Kind::kOther, "rename " + from));
  std::string a, b;
  const auto source = parent(from, a), target = parent(to, b);
  if (!source || !target || source->names.count(a) == 0)
    return not_found("rename " + from);
  const auto there = target->names.find(b);
  if (there != target->names.end() && there->second->is_dir &&
      !there->second->names.empty())
    return io_error("rename " + from + " to " + to + ": not empty");
  target->names[b] = source->names[a];
  source->names.erase(a);
  return ok_status();
}

Status MemoryFileSystem::remove(const std::string& path) {
  RETURN_IF_ERROR(step(Kind::kOther, "remove " + path));
  std::string name;
  const auto dir = parent(path, name);
  if (!dir || dir->names.count(name) == 0) return not_found("remove " + path);
  if (!dir->names[name]->names.empty())
    return io_error("remove " + path + ": not empty");
  dir->names.erase(name);
  return ok_status();
}

Status MemoryFileSystem::sync_dir(const std::string& path) {
  RETURN_IF_ERROR(step(Kind::kOther, "sync directory " + path));
  const auto node = find(path);
  if (!node || !node->is_dir) return not_found("sync directory " + path);
  node->synced_names = node->names;
  return ok_status();
}

}  // namespace remesh
