// A file system in memory that tracks what is durable, fails at a chosen call,
// and can crash.
//
// As strict as POSIX allows: after a power failure a file has the contents of
// its last sync, and a directory the entries of its last sync_dir (the same
// idea as LevelDB's fault_injection_test).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "proto/base/file_system.h"

namespace remesh {

class MemoryFileSystem final : public FileSystem {
 public:
  enum class Fault {
    kNone,
    kCrash,   // the machine stops at this call: every later one fails
    kIoOnce,  // this call fails, once
    kFull,    // from this call on the disk is full
  };
  // How much a failing write writes.
  enum class Torn { kNothing, kHalf, kAllButOneByte };
  // What survives a crash.
  enum class Survives { kAll, kSyncedOnly, kSome };

  MemoryFileSystem();

  // A deep copy, including the durable state, without a fault.
  std::unique_ptr<MemoryFileSystem> clone() const;

  // Restarts the count of calls at 0. It counts the calls that change something
  // for kCrash, those that need space for kFull, otherwise all.
  void fail_at(int64_t call, Fault fault, Torn torn = Torn::kHalf);
  int64_t calls() const { return calls_; }
  // Whether a write failed, so that `torn` mattered.
  bool failed_a_write() const { return failed_a_write_; }
  // The machine restarts.
  void recover(Survives survives, std::mt19937_64& rng);

  Result<std::unique_ptr<File>> open(const std::string& path) override;
  Result<std::unique_ptr<File>> create(const std::string& path) override;
  Status create_dirs(const std::string& path) override;
  Result<std::vector<std::string>> list(const std::string& path) override;
  Status look_up(const std::string& path) override;
  Result<uint64_t> size(const std::string& path) override;
  Status rename(const std::string& from, const std::string& to) override;
  Status remove(const std::string& path) override;
  Status sync_dir(const std::string& path) override;

 private:
  friend class MemoryFile;
  struct Node {
    bool is_dir = false;
    std::string data, synced_data;
    std::map<std::string, std::shared_ptr<Node>> names, synced_names;
  };
  enum class Kind { kRead, kGrow, kOther };
  static std::shared_ptr<Node> copy(const Node& node);
  // Counts the call. If it has to fail, *torn is how many of its `bytes` are
  // written.
  Status step(Kind kind, const std::string& what, size_t bytes = 0,
              size_t* torn = nullptr);
  std::shared_ptr<Node> find(const std::string& path) const;
  // The directory that holds the path, and the last name.
  std::shared_ptr<Node> parent(const std::string& path,
                               std::string& name) const;

  std::shared_ptr<Node> root_;
  int64_t calls_ = 0;
  int64_t fail_call_ = -1;
  Fault fault_ = Fault::kNone;
  Torn torn_ = Torn::kHalf;
  bool failed_a_write_ = false;
};

}  // namespace remesh
