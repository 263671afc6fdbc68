// FlightRecord: the last operations of a rank, in the memory of its Board. It
// shows what the rank was doing when it died or hung.
//
// The rank adds an entry when an operation begins, and its end time when it
// ends. The daemon reads the entries without the rank's cooperation, also after
// a SIGKILL. The record is always on: an operation costs two clock reads and
// about 30 stores.
//
// Operations of the training thread (Lane::kCompute) nest like calls.
// Operations that overlap it (messages in flight, other threads) have lanes of
// their own and do not nest.
//
// Threads: one thread writes the operations of Lane::kCompute; any thread may
// write those of other lanes. Lock-free. Each entry has a version, by which the
// reader recognises and skips an entry that is incomplete or being written. It
// does not detect two concurrent writers of one entry, which are kFlightOps
// operations apart.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace remesh::board {

enum class OpKind : uint8_t {
  kStep,     // a step, which encloses all others
  kForward,  // of a microbatch, like the next two
  kBackward,
  kWeight,
  kCollective,  // blocking, on a group: exposed communication
  kWait,        // for a nonblocking operation: exposed communication
  kBubble,      // waiting for a neighbouring pipeline stage
  kOptimizer,
  kCheckpoint,
  kData,
  kRestore,
};
inline constexpr int kNumOpKinds = 11;
// "forward", "collective" ...; "unknown" for other values.
const char* op_kind_name(OpKind kind);
// Whether an operation of that kind waits for other ranks.
inline bool waits_for_others(OpKind kind) {
  return kind == OpKind::kCollective || kind == OpKind::kWait ||
         kind == OpKind::kBubble;
}

enum class Lane : uint8_t {
  kCompute,        // the training thread
  kCommunication,  // overlapped with it
  kBackground,     // other threads
};

inline constexpr size_t kFlightOps = 512;         // entries kept
inline constexpr size_t kFlightGroups = 64;       // named groups
inline constexpr size_t kFlightGroupRanks = 128;  // members kept of a group
inline constexpr size_t kFlightName = 24;         // bytes kept of a name

// An operation at its begin.
struct Op {
  OpKind kind = OpKind::kStep;
  Lane lane = Lane::kCompute;
  const char* name = nullptr;  // nullptr: the name of the kind
  int group = -1;              // from add_group()
  int peer = -1;               // of a message: the world rank
  bool sends = false;          // the message, to that peer
  int64_t bytes = -1;
  int64_t number = -1;  // sequence number of the collective on that group
};

// Returned by begin(), passed to end().
struct FlightTicket {
  uint64_t id = 0;  // 0: none
  uint64_t outer = 0;
  bool compute = false;
};

// ------------------------------------------------------------- read results

struct FlightOp {
  uint64_t id = 0;     // 1, 2, ... in the order they began
  uint64_t outer = 0;  // the enclosing operation; 0: none
  OpKind kind = OpKind::kStep;
  Lane lane = Lane::kCompute;
  std::string name;
  int group = -1;
  int peer = -1;
  bool sends = false;
  int64_t bytes = -1;
  int64_t number = -1;
  int64_t begin_ns = 0;  // CLOCK_MONOTONIC
  int64_t end_ns = 0;    // 0: not ended
  int64_t step = 0;
  int64_t microbatch = 0;
};

struct FlightGroup {
  std::string name;
  int size = 0;
  std::vector<int> ranks;  // world ranks, at most kFlightGroupRanks
};

struct Flight {
  std::vector<FlightOp> ops;  // oldest first
  std::vector<FlightGroup> groups;
  uint64_t begun = 0;    // number of operations so far
  uint64_t current = 0;  // innermost operation of the training thread; 0: none
  uint64_t torn = 0;     // number of entries that could not be read
};

// ----------------------------------------------------- shared memory layout

struct FlightMemory {
  struct Entry {
    // 2 id if complete, 2 id - 1 during a write.
    std::atomic<uint64_t> version{0};
    std::array<std::atomic<uint64_t>, 11> words{};
  };
  struct Group {
    std::array<char, 12> name{};
    int32_t size = 0;
    std::array<uint16_t, kFlightGroupRanks> ranks{};
  };
  std::atomic<uint64_t> begun{0};
  std::atomic<uint64_t> current{0};
  std::atomic<uint32_t> num_groups{0};
  std::array<Group, kFlightGroups> groups{};
  std::array<Entry, kFlightOps> entries{};
};

class FlightRecord {
 public:
  // Borrows all three. Entries record the step and microbatch at their begin.
  FlightRecord(FlightMemory* memory, const std::atomic<int64_t>* step,
               const std::atomic<int64_t>* microbatch)
      : memory_(memory), step_(step), microbatch_(microbatch) {}

  // --- rank side
  // Adds a named group of world ranks. Returns its number, -1 if there is no
  // room.
  int add_group(const std::string& name, const std::vector<int>& ranks);
  // now_ns: CLOCK_MONOTONIC, not 0.
  FlightTicket begin(const Op& op, int64_t now_ns);
  void end(const FlightTicket& ticket, int64_t now_ns);

  // --- daemon side
  uint64_t begun() const { return memory_->begun.load(); }
  // The current operations of the training thread, innermost first, as far as
  // they are still in the record.
  std::vector<FlightOp> under_way() const;
  FlightGroup group(int number) const;  // empty if there is none
  Flight read() const;

 private:
  std::optional<FlightOp> read_entry(uint64_t id) const;

  FlightMemory* memory_;
  const std::atomic<int64_t>* step_;
  const std::atomic<int64_t>* microbatch_;
};

}  // namespace remesh::board
