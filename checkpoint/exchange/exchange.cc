#include "checkpoint/exchange/exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>

#include "proto/base/xxh3.h"

namespace remesh::exchange {
namespace {

using geometry::ConstStateView;
using geometry::kNumStateVectors;
using geometry::StateView;

// Messages in flight in each direction.
constexpr int kWindow = 4;
// Elements copied between two polls of the messages.
constexpr int64_t kLocalPiece = int64_t{1} << 18;

struct MessageHeader {
  uint64_t checksum;  // xxh3 of what follows, seeded with `index`
  uint64_t index;     // in its stream
};
static_assert(sizeof(MessageHeader) == 16);

// A position in a list of copies.
class Cursor {
 public:
  explicit Cursor(std::span<const Copy> copies) : copies_(copies) {}
  bool done() const { return at_ == copies_.size(); }
  // Advances by at most n elements and calls f(copy, from, to, length) for each
  // run of elements that is consecutive on both sides.
  template <typename F>
  void advance(int64_t n, const F& f) {
    int64_t left = n;
    while (left > 0 && !done()) {
      const Copy& c = copies_[at_];
      const int64_t row = offset_ / c.cols;
      const int64_t col = offset_ % c.cols;
      const bool dense = c.from_stride == c.cols && c.to_stride == c.cols;
      const int64_t run =
          std::min(left, dense ? c.numel() - offset_ : c.cols - col);
      f(c, c.from_at + row * c.from_stride + col,
        c.to_at + row * c.to_stride + col, run);
      left -= run;
      offset_ += run;
      if (offset_ == c.numel()) {
        offset_ = 0;
        ++at_;
      }
    }
  }

 private:
  std::span<const Copy> copies_;
  size_t at_ = 0;
  int64_t offset_ = 0;
};

void copy_floats(float* to, const float* from, int64_t n) {
  std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
}

// The buffer of a message: its header, then the three vectors.
class Slot {
 public:
  explicit Slot(int64_t elements)
      : data_(new std::byte[sizeof(MessageHeader) + payload(elements)]) {}
  MessageHeader header() const {
    MessageHeader h;
    std::memcpy(&h, data_.get(), sizeof(h));
    return h;
  }
  void set_header(const MessageHeader& h) {
    std::memcpy(data_.get(), &h, sizeof(h));
  }
  float* floats() {
    return reinterpret_cast<float*>(data_.get() + sizeof(MessageHeader));
  }
  std::span<std::byte> message(int64_t elements) {
    return {data_.get(), sizeof(MessageHeader) + payload(elements)};
  }
  uint64_t checksum(int64_t elements, uint64_t index) {
    return xxh3(floats(), payload(elements), index);
  }
  comm::RequestPtr request;  // when in flight

 private:
  static size_t payload(int64_t elements) {
    return static_cast<size_t>(elements) * kNumStateVectors * sizeof(float);
  }
  std::unique_ptr<std::byte[]> data_;
};

// The messages of one direction, in the order of the plan's streams, a window
// of them in flight at a time. They start and end in order, so the first
// unfinished message is in flight on both sides: there is no deadlock.
class Lane {
 public:
  Lane(std::span<const Stream> streams, int64_t elements_per_message)
      : streams_(streams), elements_per_message_(elements_per_message) {}
  virtual ~Lane() = default;
  bool done() const { return stream_ == streams_.size() && in_flight_.empty(); }
  // Returns whether anything happened.
  bool poll() {
    bool moved = false;
    while (!in_flight_.empty() && in_flight_.front().slot->request->test()) {
      Message m = in_flight_.front();
      in_flight_.pop_front();
      m.slot->request.reset();
      finish(m);
      free_.push_back(m.slot);
      moved = true;
    }
    while (stream_ < streams_.size() &&
           in_flight_.size() < static_cast<size_t>(kWindow)) {
      begin(next());
      moved = true;
    }
    return moved;
  }

 protected:
  struct Message {
    const Stream* stream = nullptr;
    uint64_t index = 0;
    int64_t elements = 0;
    bool last = false;
    Slot* slot = nullptr;
  };
  virtual void start(Message& m) = 0;
  virtual void finish(Message& m) = 0;

 private:
  Message next() {
    const Stream& s = streams_[stream_];
    Message m{.stream = &s, .index = static_cast<uint64_t>(index_)};
    const int64_t begin = index_ * elements_per_message_;
    m.elements = std::min(elements_per_message_, s.elements - begin);
    m.last = begin + m.elements == s.elements;
    index_ = m.last ? 0 : index_ + 1;
    stream_ += m.last ? 1 : 0;
    return m;
  }
  void begin(Message m) {
    if (free_.empty()) {
      slots_.push_back(std::make_unique<Slot>(elements_per_message_));
      free_.push_back(slots_.back().get());
    }
    m.slot = free_.back();
    free_.pop_back();
    start(m);
    in_flight_.push_back(m);
  }

  std::span<const Stream> streams_;
  const int64_t elements_per_message_;
  size_t stream_ = 0;  // of the next message
  int64_t index_ = 0;
  std::vector<std::unique_ptr<Slot>> slots_;  // at most kWindow
  std::vector<Slot*> free_;
  std::deque<Message> in_flight_;
};

class SendLane final : public Lane {
 public:
  SendLane(comm::Comm& comm, int tag, const Plan& plan,
           std::span<const ConstStateView> sources,
           int64_t elements_per_message)
      : Lane(plan.send, elements_per_message),
        comm_(comm),
        tag_(tag),
        sources_(sources) {}

 private:
  void start(Message& m) override {
    if (m.index == 0) cursor_ = Cursor(m.stream->copies);
    float* const out = m.slot->floats();
    int64_t at = 0;
    cursor_.advance(
        m.elements, [&](const Copy& c, int64_t from, int64_t, int64_t n) {
          const ConstStateView& s = sources_[static_cast<size_t>(c.source)];
          for (size_t v = 0; v < kNumStateVectors; ++v)
            copy_floats(out + static_cast<int64_t>(v) * m.elements + at,
                        s[v].data() + from, n);
          at += n;
        });
    m.slot->set_header(
        {.checksum = m.slot->checksum(m.elements, m.index), .index = m.index});
    m.slot->request =
        comm_.start_send(m.slot->message(m.elements), m.stream->peer, tag_);
  }
  void finish(Message&) override {}

  comm::Comm& comm_;
  const int tag_;
  std::span<const ConstStateView> sources_;
  Cursor cursor_{{}};
};

class ReceiveLane final : public Lane {
 public:
  ReceiveLane(comm::Comm& comm, int tag, const Plan& plan,
              const StateView& target, int64_t elements_per_message)
      : Lane(plan.receive, elements_per_message),
        comm_(comm),
        tag_(tag),
        target_(target) {}
  Status status;

 private:
  void start(Message& m) override {
    m.slot->request =
        comm_.start_recv(m.slot->message(m.elements), m.stream->peer, tag_);
  }
  void finish(Message& m) override {
    const MessageHeader h = m.slot->header();
    if (status.ok() && (h.index != m.index ||
                        h.checksum != m.slot->checksum(m.elements, m.index)))
      status = corrupt(fmt::format(
          "exchange: message {} from process {} ({} elements) has a wrong "
          "checksum",
          m.index, m.stream->peer, m.elements));
    if (m.index == 0) cursor_ = Cursor(m.stream->copies);
    const float* const in = m.slot->floats();
    int64_t at = 0;
    cursor_.advance(
        m.elements, [&](const Copy&, int64_t, int64_t to, int64_t n) {
          for (size_t v = 0; v < kNumStateVectors; ++v)
            copy_floats(target_[v].data() + to,
                        in + static_cast<int64_t>(v) * m.elements + at, n);
          at += n;
        });
  }

  comm::Comm& comm_;
  const int tag_;
  const StateView& target_;
  Cursor cursor_{{}};
};

// Makes one piece of the local copies.
void copy_local(Cursor& cursor, std::span<const ConstStateView> sources,
                const StateView& target) {
  cursor.advance(
      kLocalPiece, [&](const Copy& c, int64_t from, int64_t to, int64_t n) {
        const ConstStateView& s = sources[static_cast<size_t>(c.source)];
        for (size_t v = 0; v < kNumStateVectors; ++v)
          copy_floats(target[v].data() + to, s[v].data() + from, n);
      });
}

int64_t extent(const Copy& c, bool from) {
  return from ? c.from_at + (c.rows - 1) * c.from_stride + c.cols
              : c.to_at + (c.rows - 1) * c.to_stride + c.cols;
}

// Checks that the vectors are as long as the plan requires.
Status check_views(const Plan& plan, std::span<const ConstStateView> sources,
                   const StateView& target) {
  const auto reads = [&](const Copy& c) {
    if (static_cast<size_t>(c.source) >= sources.size()) return false;
    for (size_t v = 0; v < kNumStateVectors; ++v)
      if (extent(c, true) >
          static_cast<int64_t>(
              sources[static_cast<size_t>(c.source)][v].size()))
        return false;
    return true;
  };
  const auto missing = [](const Copy& c) {
    return invalid_argument(fmt::format(
        "exchange: source {} is shorter than the plan requires", c.source));
  };
  for (const Stream& s : plan.send)
    for (const Copy& c : s.copies)
      if (!reads(c)) return missing(c);
  for (const Copy& c : plan.local)
    if (!reads(c)) return missing(c);
  if (plan.local.empty() && plan.receive.empty()) return ok_status();
  for (size_t v = 0; v < kNumStateVectors; ++v)
    if (static_cast<int64_t>(target[v].size()) != plan.elements)
      return invalid_argument(
          fmt::format("exchange: {} elements to fill, the vectors have {}",
                      plan.elements, target[v].size()));
  return ok_status();
}

// Before anything is sent: all processes are ready and have the same plan.
Status agree_to_begin(comm::Comm& comm, const Plan& plan, const Status& mine,
                      int64_t elements_per_message) {
  const auto digest = static_cast<int64_t>(
      plan.digest ^ static_cast<uint64_t>(elements_per_message));
  std::array<int64_t, 3> facts = {mine.ok() ? 0 : 1, digest, ~digest};
  comm.all_reduce(std::span<int64_t>(facts), comm::Op::kMax);
  if (!mine.ok()) return mine;
  if (facts[0] != 0)
    return cancelled("exchange: another process could not begin");
  if (facts[1] != ~facts[2])
    return invalid_argument("exchange: the processes have different plans");
  return ok_status();
}

// At the end: nobody is done before all are.
Status agree(comm::Comm& comm, const Status& mine) {
  int64_t failed = mine.ok() ? 0 : 1;
  comm.all_reduce(std::span<int64_t>(&failed, 1), comm::Op::kMax);
  if (!mine.ok() || failed == 0) return mine;
  return cancelled("exchange: another process failed");
}

}  // namespace

Status run_exchange(comm::Comm& comm, const Plan& plan,
                    std::span<const ConstStateView> sources,
                    const StateView& target, const Status& ready,
                    const ExchangeOptions& options) {
  const int64_t message_bytes = options.staging_bytes / (2 * kWindow);
  const int64_t elements_per_message = std::max<int64_t>(
      1, (message_bytes - static_cast<int64_t>(sizeof(MessageHeader))) /
             static_cast<int64_t>(kNumStateVectors * sizeof(float)));
  const Status mine = ready.ok() ? check_views(plan, sources, target) : ready;
  RETURN_IF_ERROR(agree_to_begin(comm, plan, mine, elements_per_message));
  SendLane send(comm, options.tag, plan, sources, elements_per_message);
  ReceiveLane receive(comm, options.tag, plan, target, elements_per_message);
  Cursor local(plan.local);
  while (!send.done() || !receive.done() || !local.done()) {
    bool moved = send.poll();
    moved = receive.poll() || moved;
    if (!local.done()) {
      copy_local(local, sources, target);
      moved = true;
    }
    if (!moved)
      std::this_thread::yield();
    else if (options.tick)
      options.tick();
  }
  return agree(comm, receive.status);
}

}  // namespace remesh::exchange
