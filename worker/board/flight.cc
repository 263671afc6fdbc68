#include "worker/board/flight.h"

#include <algorithm>
#include <cstring>

namespace remesh::board {
namespace {

// Words of an entry.
enum Word : size_t {
  kBegin,
  kEnd,
  kStepWord,
  kWhere,  // microbatch, peer
  kBytes,
  kNumber,
  kOuter,
  kWhat,  // kind, lane, sends, group
  kNameWord,
  kNumWords = kNameWord + kFlightName / 8,
};
static_assert(kNumWords ==
              std::tuple_size_v<decltype(FlightMemory::Entry::words)>);

constexpr const char* kNames[kNumOpKinds] = {
    "step",   "forward",   "backward",   "weight", "collective", "wait",
    "bubble", "optimizer", "checkpoint", "data",   "restore"};
constexpr int kMaxDepth = 16;
constexpr int kTries = 4;

uint64_t pair_of(int64_t high, int64_t low) {
  return static_cast<uint64_t>(high) << 32 |
         (static_cast<uint64_t>(low) & 0xFFFFFFFFU);
}
int32_t high_of(uint64_t word) { return static_cast<int32_t>(word >> 32); }
int32_t low_of(uint64_t word) { return static_cast<int32_t>(word); }

FlightMemory::Entry& entry_of(FlightMemory* m, uint64_t id) {
  return m->entries[id % kFlightOps];
}

FlightOp decode(uint64_t id, const std::array<uint64_t, kNumWords>& w) {
  FlightOp op;
  op.id = id;
  op.outer = w[kOuter];
  op.kind = static_cast<OpKind>(w[kWhat] & 0xFF);
  op.lane = static_cast<Lane>(w[kWhat] >> 8 & 0xFF);
  op.sends = (w[kWhat] >> 16 & 1) != 0;
  op.group = high_of(w[kWhat]);
  op.peer = low_of(w[kWhere]);
  op.microbatch = high_of(w[kWhere]);
  op.bytes = static_cast<int64_t>(w[kBytes]);
  op.number = static_cast<int64_t>(w[kNumber]);
  op.begin_ns = static_cast<int64_t>(w[kBegin]);
  op.end_ns = static_cast<int64_t>(w[kEnd]);
  op.step = static_cast<int64_t>(w[kStepWord]);
  char name[kFlightName];
  std::memcpy(name, &w[kNameWord], kFlightName);
  op.name.assign(name, strnlen(name, kFlightName));
  return op;
}

}  // namespace

const char* op_kind_name(OpKind kind) {
  const auto i = static_cast<size_t>(kind);
  return i < kNumOpKinds ? kNames[i] : "unknown";
}

int FlightRecord::add_group(const std::string& name,
                            const std::vector<int>& ranks) {
  const uint32_t n = memory_->num_groups.load(std::memory_order_relaxed);
  if (n >= kFlightGroups) return -1;
  FlightMemory::Group& g = memory_->groups[n];
  std::copy_n(name.data(), std::min(name.size(), g.name.size()),
              g.name.begin());
  g.size = static_cast<int32_t>(ranks.size());
  for (size_t i = 0; i < std::min(ranks.size(), kFlightGroupRanks); ++i)
    g.ranks[i] = static_cast<uint16_t>(ranks[i]);
  memory_->num_groups.store(n + 1, std::memory_order_release);
  return static_cast<int>(n);
}

// A seqlock: the version is odd before any word changes and even after all
// have. Every store is a release and every load an acquire, so a reader that
// sees a new word subsequently sees an odd or a later version.
FlightTicket FlightRecord::begin(const Op& op, int64_t now_ns) {
  FlightTicket t;
  t.id = memory_->begun.fetch_add(1, std::memory_order_relaxed) + 1;
  t.compute = op.lane == Lane::kCompute;
  if (t.compute) t.outer = memory_->current.load(std::memory_order_relaxed);
  FlightMemory::Entry& e = entry_of(memory_, t.id);
  e.version.store(2 * t.id - 1, std::memory_order_relaxed);
  const auto put = [&](size_t word, uint64_t value) {
    e.words[word].store(value, std::memory_order_release);
  };
  put(kBegin, static_cast<uint64_t>(now_ns));
  put(kEnd, 0);
  put(kStepWord, static_cast<uint64_t>(step_->load(std::memory_order_relaxed)));
  put(kWhere, pair_of(microbatch_->load(std::memory_order_relaxed), op.peer));
  put(kBytes, static_cast<uint64_t>(op.bytes));
  put(kNumber, static_cast<uint64_t>(op.number));
  put(kOuter, t.outer);
  put(kWhat, pair_of(op.group, static_cast<int64_t>(op.kind) |
                                   static_cast<int64_t>(op.lane) << 8 |
                                   static_cast<int64_t>(op.sends) << 16));
  const char* const name = op.name != nullptr ? op.name : op_kind_name(op.kind);
  std::array<uint64_t, kFlightName / 8> text{};
  std::memcpy(text.data(), name, strnlen(name, kFlightName));
  for (size_t i = 0; i < text.size(); ++i) put(kNameWord + i, text[i]);
  e.version.store(2 * t.id, std::memory_order_release);
  if (t.compute) memory_->current.store(t.id, std::memory_order_release);
  return t;
}

void FlightRecord::end(const FlightTicket& t, int64_t now_ns) {
  if (t.id == 0) return;
  FlightMemory::Entry& e = entry_of(memory_, t.id);
  if (e.version.load(std::memory_order_relaxed) == 2 * t.id)
    e.words[kEnd].store(static_cast<uint64_t>(now_ns),
                        std::memory_order_release);
  if (t.compute) memory_->current.store(t.outer, std::memory_order_release);
}

std::optional<FlightOp> FlightRecord::read_entry(uint64_t id) const {
  const FlightMemory::Entry& e = memory_->entries[id % kFlightOps];
  for (int i = 0; i < kTries; ++i) {
    const uint64_t before = e.version.load(std::memory_order_acquire);
    if (before > 2 * id) return std::nullopt;  // overwritten
    std::array<uint64_t, kNumWords> words;
    for (size_t w = 0; w < words.size(); ++w)
      words[w] = e.words[w].load(std::memory_order_acquire);
    if (before == 2 * id && e.version.load(std::memory_order_relaxed) == before)
      return decode(id, words);
  }
  return std::nullopt;
}

std::vector<FlightOp> FlightRecord::under_way() const {
  std::vector<FlightOp> out;
  for (int i = 0; i < kTries; ++i) {
    out.clear();
    uint64_t id = memory_->current.load(std::memory_order_acquire);
    for (int depth = 0; id != 0 && depth < kMaxDepth; ++depth) {
      auto op = read_entry(id);
      if (!op) break;  // overwritten
      id = op->outer;
      out.push_back(std::move(*op));
    }
    // Retry if an operation ended during the read.
    if (std::all_of(out.begin(), out.end(),
                    [](const FlightOp& op) { return op.end_ns == 0; }))
      break;
  }
  std::erase_if(out, [](const FlightOp& op) { return op.end_ns != 0; });
  return out;
}

FlightGroup FlightRecord::group(int number) const {
  FlightGroup out;
  if (number < 0 || static_cast<uint32_t>(number) >=
                        memory_->num_groups.load(std::memory_order_acquire))
    return out;
  const FlightMemory::Group& g = memory_->groups[static_cast<size_t>(number)];
  out.name.assign(g.name.data(), strnlen(g.name.data(), g.name.size()));
  out.size = g.size;
  const auto kept = std::min<size_t>(static_cast<size_t>(std::max(0, g.size)),
                                     kFlightGroupRanks);
  out.ranks.assign(g.ranks.begin(),
                   g.ranks.begin() + static_cast<std::ptrdiff_t>(kept));
  return out;
}

Flight FlightRecord::read() const {
  Flight f;
  f.begun = begun();
  f.current = memory_->current.load(std::memory_order_acquire);
  const uint32_t groups = memory_->num_groups.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < groups && i < kFlightGroups; ++i)
    f.groups.push_back(group(static_cast<int>(i)));
  const uint64_t first = f.begun > kFlightOps ? f.begun - kFlightOps + 1 : 1;
  for (uint64_t id = first; id <= f.begun; ++id) {
    auto op = read_entry(id);
    if (op)
      f.ops.push_back(std::move(*op));
    else
      ++f.torn;
  }
  return f;
}

}  // namespace remesh::board
