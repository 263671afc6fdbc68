// A file system in memory that knows what is durable, fails at a chosen call,
// and can crash: the twin that shows whether saving survives anything.
//
// Strict as POSIX allows: after a power cut a file holds what its last sync
// saw, and a directory names what its last sync_dir saw (LevelDB's
// fault_injection_test has the same idea).
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
    kCrash,   // the machine stops at this call: every later one is refused
    kIoOnce,  // this call fails, once
    kFull,    // from this call on nothing grows
  };
  // What a write that fails has written all the same.
  enum class Torn { kNothing, kHalf, kAllButOneByte };
  // What is left after a crash.
  enum class Survives { kAll, kSyncedOnly, kSome };

  MemoryFileSystem();

  // A deep copy, durable state and all; no fault set.
  std::unique_ptr<MemoryFileSystem> clone() const;

  // Calls are counted from 0, anew from here: those that change something for
  // a crash, those that need room for a full disk, else all.
  void fail_at(int64_t call, Fault fault, Torn torn = Torn::kHalf);
  int64_t calls() const { return calls_; }
  // Whether what failed was a write, so that `torn` made a difference.
  bool failed_a_write() const { return failed_a_write_; }
  // The machine is up again.
  void recover(Survives survives, std::mt19937_64& rng);

  Result<std::unique_ptr<File>> open(const std::string& path) override;
  Result<std::unique_ptr<File>> create(const std::string& path) override;
  Status create_dirs(const std::string& path) override;
  Result<std::vector<std::string>> list(const std::string& path) override;
  bool exists(const std::string& path) override;
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
  // Counts the call. Not ok: it fails; then *torn is how many of its `bytes`
  // are written.
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
