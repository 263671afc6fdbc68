#include "checkpoint/exchange/replica.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <thread>

#include "proto/base/xxh3.h"

namespace remesh::exchange {
namespace {

using geometry::kNumStateVectors;
using memory::ContentHash;
using memory::kMaxInfoWords;
using memory::StateInfo;
using memory::StateSegment;
using Committed = memory::StateSegment::Committed;

// The record as a message: number of words, their checksum, the words.
using RecordMessage = std::array<uint64_t, kMaxInfoWords + 2>;

RecordMessage record_message(const StateInfo& info) {
  RecordMessage m{};
  const std::vector<uint64_t> words = encode(info);
  m[0] = words.size();
  m[1] = xxh3(words.data(), words.size() * sizeof(words[0]));
  std::copy(words.begin(), words.end(), m.begin() + 2);
  return m;
}

Result<StateInfo> read_record(const RecordMessage& m) {
  if (m[0] > kMaxInfoWords) return corrupt("record of a wrong size");
  const std::span<const uint64_t> words(m.data() + 2,
                                        static_cast<size_t>(m[0]));
  if (xxh3(words.data(), words.size_bytes()) != m[1])
    return corrupt("the record's checksum is wrong");
  return memory::decode(words);
}

// memory::content_hash() of vectors that arrive in pieces.
class Hasher {
 public:
  void reset() {
    for (Xxh3Stream& s : streams_) s.reset();
  }
  void add(size_t vector, std::span<const float> piece) {
    streams_[vector].add(piece.data(), piece.size_bytes());
  }
  ContentHash digest() const {
    ContentHash h;
    for (size_t v = 0; v < kNumStateVectors; ++v) h[v] = streams_[v].digest();
    return h;
  }

 private:
  std::array<Xxh3Stream, kNumStateVectors> streams_;
};

// The buffer that does not hold the newest state.
int older_buffer(const StateSegment& s) {
  const auto c = s.contents();
  return c.states.empty() ? 0 : 1 - c.states.front().buffer;
}

}  // namespace

// The list of messages, which both sides share.
class Replicator::Stream {
 public:
  Stream(comm::Comm& comm, int peer, const ReplicaOptions& options)
      : comm_(comm),
        peer_(peer),
        tag_(options.tag),
        window_(static_cast<size_t>(std::max(1, options.window))),
        piece_(std::max<int64_t>(1, options.piece_bytes / 4)) {}
  virtual ~Stream() = default;
  int peer() const { return peer_; }
  bool done() const { return at_ == num_messages_ && in_flight_.empty(); }
  uint64_t messages() const { return begun_; }
  bool poll() {
    while (!in_flight_.empty() && in_flight_.front().request->test()) {
      const int64_t index = in_flight_.front().index;
      in_flight_.pop_front();
      finished(index);
    }
    if (at_ < num_messages_ && in_flight_.size() < window_) {
      in_flight_.push_back({at_, begin(at_)});
      ++at_;
      ++begun_;
    }
    return done();
  }

 protected:
  struct Piece {
    size_t vector = 0;
    size_t begin = 0, size = 0;
  };
  void restart(int64_t elements) {
    CHECK(done());
    elements_ = elements;
    pieces_per_vector_ = (elements + piece_ - 1) / piece_;
    num_messages_ =
        2 + static_cast<int64_t>(kNumStateVectors) * pieces_per_vector_;
    at_ = 0;
  }
  bool is_record(int64_t index) const { return index == 0; }
  bool is_hash(int64_t index) const { return index == num_messages_ - 1; }
  Piece piece(int64_t index) const {
    const int64_t n = index - 1;
    const int64_t begin = n % pieces_per_vector_ * piece_;
    return {.vector = static_cast<size_t>(n / pieces_per_vector_),
            .begin = static_cast<size_t>(begin),
            .size = static_cast<size_t>(std::min(piece_, elements_ - begin))};
  }
  virtual comm::RequestPtr begin(int64_t index) = 0;
  virtual void finished(int64_t index) = 0;

  comm::Comm& comm_;
  const int peer_;
  const int tag_;
  int64_t elements_ = 0;
  RecordMessage record_{};
  Hasher hasher_;
  ContentHash hash_{};

 private:
  struct InFlight {
    int64_t index = 0;
    comm::RequestPtr request;
  };
  const size_t window_;
  const int64_t piece_;
  int64_t pieces_per_vector_ = 0;
  int64_t num_messages_ = 0;
  int64_t at_ = 0;  // the next message to start
  uint64_t begun_ = 0;
  std::deque<InFlight> in_flight_;
};

class Replicator::Sender final : public Replicator::Stream {
 public:
  Sender(comm::Comm& comm, int to, const ReplicaOptions& options,
         const StateSegment& own)
      : Stream(comm, to, options), own_(own) {}
  void start(const Committed& c) {
    restart(c.info.elements);
    state_ = own_.read(c.buffer, c.info.elements);
    record_ = record_message(c.info);
    hasher_.reset();
  }

 private:
  comm::RequestPtr begin(int64_t index) override {
    if (is_record(index))
      return comm_.start_send(std::as_bytes(std::span(record_)), peer_, tag_);
    if (is_hash(index)) {
      hash_ = hasher_.digest();
      return comm_.start_send(std::as_bytes(std::span(hash_)), peer_, tag_);
    }
    const Piece p = piece(index);
    const auto part = state_[p.vector].subspan(p.begin, p.size);
    hasher_.add(p.vector, part);
    return comm_.start_send(std::as_bytes(part), peer_, tag_);
  }
  void finished(int64_t) override {}

  const StateSegment& own_;
  geometry::ConstStateView state_;
};

class Replicator::Receiver final : public Replicator::Stream {
 public:
  Receiver(comm::Comm& comm, const KeptReplica& kept,
           const ReplicaOptions& options)
      : Stream(comm, kept.rank, options),
        segment_(*kept.segment),
        kept_elements_(kept.elements) {
    CHECK(kept.elements <= segment_.capacity());
  }
  void start() {
    restart(kept_elements_);
    const int buffer = older_buffer(segment_);
    segment_.begin(buffer);
    state_ = segment_.write(buffer, kept_elements_);
    hasher_.reset();
    status_ = ok_status();
  }
  const Status& status() const { return status_; }

 private:
  comm::RequestPtr begin(int64_t index) override {
    if (is_record(index))
      return comm_.start_recv(std::as_writable_bytes(std::span(record_)), peer_,
                              tag_);
    if (is_hash(index))
      return comm_.start_recv(std::as_writable_bytes(std::span(hash_)), peer_,
                              tag_);
    const Piece p = piece(index);
    return comm_.start_recv(
        std::as_writable_bytes(state_[p.vector].subspan(p.begin, p.size)),
        peer_, tag_);
  }
  void finished(int64_t index) override {
    if (is_record(index)) return;
    if (!is_hash(index)) {
      const Piece p = piece(index);
      hasher_.add(p.vector, state_[p.vector].subspan(p.begin, p.size));
      return;
    }
    status_ = commit();
  }
  Status commit() {
    const std::string what = fmt::format("replica of rank {}: ", peer_);
    auto info = read_record(record_);
    if (!info.ok()) return corrupt(what + info.status().message());
    if (info->elements != kept_elements_)
      return corrupt(what + fmt::format("{} elements, not {}", info->elements,
                                        kept_elements_));
    if (hasher_.digest() != hash_)
      return corrupt(what + "the checksum of its content is wrong");
    info->replica = true;
    info->content = hash_;
    segment_.commit(*info);
    return ok_status();
  }

  StateSegment& segment_;
  const int64_t kept_elements_;
  geometry::StateView state_;
  Status status_;
};

Replicator::Replicator(comm::Comm& comm, const StateSegment& own,
                       std::span<const int> holders,
                       const std::vector<KeptReplica>& kept,
                       const ReplicaOptions& options) {
  for (const int h : holders)
    senders_.push_back(std::make_unique<Sender>(comm, h, options, own));
  for (const KeptReplica& k : kept)
    receivers_.push_back(std::make_unique<Receiver>(comm, k, options));
}

Replicator::~Replicator() { (void)finish(); }

void Replicator::start(const Committed& c) {
  for (auto& r : receivers_) r->start();
  for (auto& s : senders_) s->start(c);
  (void)poll();
}

bool Replicator::poll() {
  bool all = true;
  for (auto& r : receivers_) all = r->poll() && all;
  for (auto& s : senders_) all = s->poll() && all;
  return all;
}

bool Replicator::done() const {
  const auto is_done = [](const auto& s) { return s->done(); };
  return std::all_of(receivers_.begin(), receivers_.end(), is_done) &&
         std::all_of(senders_.begin(), senders_.end(), is_done);
}

uint64_t Replicator::messages() const {
  uint64_t n = 0;
  for (const auto& r : receivers_) n += r->messages();
  for (const auto& s : senders_) n += s->messages();
  return n;
}

Status Replicator::finish(const std::function<void()>& tick) {
  while (!poll()) {
    if (tick) tick();
    std::this_thread::yield();
  }
  return status();
}

Status Replicator::status() const {
  for (const auto& r : receivers_) RETURN_IF_ERROR(r->status());
  return ok_status();
}

void LocalReplica::start(const Committed& c) {
  CHECK(at_ == end_ && c.info.elements <= copy_.capacity());
  from_ = c;
  buffer_ = older_buffer(copy_);
  copy_.begin(buffer_);
  at_ = 0;
  end_ = static_cast<int64_t>(kNumStateVectors) * c.info.elements;
  if (end_ == 0) (void)copy_.commit(c.info);
}

bool LocalReplica::poll() {
  if (at_ == end_) return true;
  const int64_t n = from_.info.elements;
  const auto v = static_cast<size_t>(at_ / n);
  const int64_t begin = at_ % n;
  const int64_t size = std::min({std::max<int64_t>(1, piece_), n - begin});
  std::memcpy(copy_.write(buffer_, n)[v].data() + begin,
              own_.read(from_.buffer, n)[v].data() + begin,
              static_cast<size_t>(size) * sizeof(float));
  at_ += size;
  if (at_ < end_) return false;
  (void)copy_.commit(from_.info);
  return true;
}

}  // namespace remesh::exchange
