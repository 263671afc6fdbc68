// FlightRecord: the last operations of a rank, in the memory of its Board, for
// whoever asks what it was at when it died or stood.
//
// The rank writes an entry when an operation begins and its end when it is
// over; the daemon reads them without the rank's help, also after a SIGKILL.
// Always on: an operation costs two looks at the clock and some 30 stores.
//
// Operations of the training thread (Lane::kCompute) lie inside each other like
// calls: the one begun last is over first. What runs beside it (messages under
// way, other threads) has lanes of its own and belongs to no other.
//
// Threads: operations of Lane::kCompute are one thread's; the others may be
// any's. Lock-free. An entry has a version: one that was torn by a death, or is
// written while it is read, is recognised and left out. Nothing is recognised
// of two writers that are kFlightOps operations apart.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace remesh::board {

enum class OpKind : uint8_t {
  kStep,     // a whole step, around all others
  kForward,  // passes of a microbatch
  kBackward,
  kWeight,
  kCollective,  // a blocking operation on a group: exposed
  kWait,        // for an operation started before: exposed
  kBubble,      // for a neighbouring pipeline stage
  kOptimizer,
  kCheckpoint,
  kData,
  kRestore,
};
inline constexpr int kNumOpKinds = 11;
// "forward", "collective" ...; "unknown" for other values.
const char* op_kind_name(OpKind kind);
// Whether one of that kind only goes on when other ranks do their part.
inline bool waits_for_others(OpKind kind) {
  return kind == OpKind::kCollective || kind == OpKind::kWait ||
         kind == OpKind::kBubble;
}

enum class Lane : uint8_t {
  kCompute,        // the training thread
  kCommunication,  // under way beside it
  kBackground,     // other threads
};

inline constexpr size_t kFlightOps = 512;         // entries kept
inline constexpr size_t kFlightGroups = 64;       // groups that have a name
inline constexpr size_t kFlightGroupRanks = 128;  // members kept of a group
inline constexpr size_t kFlightName = 24;         // bytes kept of a name

// An operation, as it is begun.
struct Op {
  OpKind kind = OpKind::kStep;
  Lane lane = Lane::kCompute;
  const char* name = nullptr;  // nullptr: the kind's
  int group = -1;              // of add_group()
  int peer = -1;               // world rank, of a message
  int64_t bytes = -1;
  int64_t number = -1;  // of this rank's collectives on that group
};

// What begin() gives for end().
struct FlightTicket {
  uint64_t id = 0;  // 0: none
  uint64_t outer = 0;
  bool compute = false;
};

// ------------------------------------------------------------- as it is read

struct FlightOp {
  uint64_t id = 0;     // 1, 2, ... in the order they began
  uint64_t outer = 0;  // the one around it; 0: none
  OpKind kind = OpKind::kStep;
  Lane lane = Lane::kCompute;
  std::string name;
  int group = -1;
  int peer = -1;
  int64_t bytes = -1;
  int64_t number = -1;
  int64_t begin_ns = 0;  // CLOCK_MONOTONIC
  int64_t end_ns = 0;    // 0: still at it
  int64_t step = 0;
  int64_t microbatch = 0;
};

struct FlightGroup {
  std::string name;
  int size = 0;
  std::vector<int> ranks;  // of the world, at most kFlightGroupRanks
};

struct Flight {
  std::vector<FlightOp> ops;  // oldest first
  std::vector<FlightGroup> groups;
  uint64_t begun = 0;    // operations so far
  uint64_t current = 0;  // innermost one of the training thread; 0: none
  uint64_t torn = 0;     // entries that could not be read
};

// ------------------------------------------------- what both sides map

struct FlightMemory {
  struct Entry {
    // 2 id when whole, 2 id - 1 while it is written.
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
  // Borrows all three; entries carry the step and microbatch of their begin.
  FlightRecord(FlightMemory* memory, const std::atomic<int64_t>* step,
               const std::atomic<int64_t>* microbatch)
      : memory_(memory), step_(step), microbatch_(microbatch) {}

  // --- rank side
  // Names a group of world ranks; its number, -1 when there is no room.
  int add_group(const std::string& name, const std::vector<int>& ranks);
  // now_ns: CLOCK_MONOTONIC, not 0.
  FlightTicket begin(const Op& op, int64_t now_ns);
  void end(const FlightTicket& ticket, int64_t now_ns);

  // --- daemon side
  uint64_t begun() const { return memory_->begun.load(); }
  // What the training thread is at: the innermost operation first, then those
  // around it, as far as they are still kept.
  std::vector<FlightOp> under_way() const;
  FlightGroup group(int number) const;  // empty when there is none
  Flight read() const;

 private:
  std::optional<FlightOp> read_entry(uint64_t id) const;

  FlightMemory* memory_;
  const std::atomic<int64_t>* step_;
  const std::atomic<int64_t>* microbatch_;
};

}  // namespace remesh::board
