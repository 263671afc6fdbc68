#include "tests/testing/local_comm.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "parallel/comm/fold.h"
#include "proto/base/check.h"

namespace remesh::comm {
namespace {

using Bytes = std::vector<std::byte>;

Bytes copy_of(std::span<const std::byte> data) {
  return {data.begin(), data.end()};
}

// What the ranks of one group share. Every collective is one Round: each rank
// puts its contribution down, and once all have, each takes what it needs.
class Shared {
 public:
  explicit Shared(int size) : size_(size) {}
  int size() const { return size_; }

  struct Round {
    std::string kind;
    std::vector<Bytes> parts;  // by rank
    int arrived = 0;
    int taken = 0;
    std::map<int, std::shared_ptr<Shared>> groups;  // split only, by color
  };
  using Take = std::function<void(Round&)>;

  void put(uint64_t sequence, const std::string& kind, int rank, Bytes part) {
    const std::lock_guard lock(mutex_);
    Round& round = rounds_[sequence];
    if (round.arrived == 0) {
      round.kind = kind;
      round.parts.resize(static_cast<size_t>(size_));
    }
    CHECK_MSG(round.kind == kind, "ranks call different collectives");
    round.parts[static_cast<size_t>(rank)] = std::move(part);
    if (++round.arrived == size_) changed_.notify_all();
  }

  // Runs `take` once every rank has put; false when they have not and `block`
  // is not set.
  bool take(uint64_t sequence, bool block, const Take& take) {
    std::unique_lock lock(mutex_);
    Round& round = rounds_[sequence];
    if (!block && round.arrived < size_) return false;
    changed_.wait(lock, [&] { return round.arrived == size_; });
    take(round);
    if (++round.taken == size_) rounds_.erase(sequence);
    return true;
  }

  struct Message {
    Bytes data;
    bool received = false;
  };
  using MessagePtr = std::shared_ptr<Message>;

  MessagePtr post(int from, int to, int tag, Bytes data) {
    const std::lock_guard lock(mutex_);
    auto message = std::make_shared<Message>();
    message->data = std::move(data);
    boxes_[{from, to, tag}].messages.push_back(message);
    changed_.notify_all();
    return message;
  }
  // A sender's request is done when the message was received: a program that
  // counts on buffered sends would hang under MPI, so it hangs here too.
  bool sent(const MessagePtr& message, bool block) {
    std::unique_lock lock(mutex_);
    if (block) changed_.wait(lock, [&] { return message->received; });
    return message->received;
  }
  // Receives are matched with messages in the order they were started.
  uint64_t start_recv(int from, int to, int tag) {
    const std::lock_guard lock(mutex_);
    return boxes_[{from, to, tag}].next_ticket++;
  }
  bool recv(int from, int to, int tag, uint64_t ticket, bool block,
            std::span<std::byte> out) {
    std::unique_lock lock(mutex_);
    Box& box = boxes_[{from, to, tag}];
    const auto here = [&] {
      return ticket - box.first_ticket < box.messages.size();
    };
    if (!block && !here()) return false;
    changed_.wait(lock, here);
    MessagePtr& message = box.messages[ticket - box.first_ticket];
    CHECK_MSG(message->data.size() == out.size(),
              "a message of another size than asked");
    std::copy(message->data.begin(), message->data.end(), out.begin());
    message->received = true;
    message.reset();
    while (!box.messages.empty() && box.messages.front() == nullptr) {
      box.messages.pop_front();
      ++box.first_ticket;
    }
    changed_.notify_all();
    return true;
  }

 private:
  struct Box {
    std::deque<MessagePtr> messages;  // null: taken out of order
    uint64_t first_ticket = 0;        // of messages.front()
    uint64_t next_ticket = 0;
  };

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint64_t, Round> rounds_;
  std::map<std::tuple<int, int, int>, Box> boxes_;  // (from, to, tag)
};

// `attempt(block)` says whether the operation is done.
class LocalRequest final : public Request {
 public:
  explicit LocalRequest(std::function<bool(bool)> attempt)
      : attempt_(std::move(attempt)) {}
  ~LocalRequest() override { wait(); }
  void wait() override {
    if (!done_) done_ = attempt_(true);
  }
  bool test() override {
    if (!done_) done_ = attempt_(false);
    return done_;
  }

 private:
  std::function<bool(bool)> attempt_;
  bool done_ = false;
};

class LocalComm final : public Comm {
 public:
  LocalComm(std::shared_ptr<Shared> shared, int rank)
      : shared_(std::move(shared)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return shared_->size(); }

  void barrier() override {
    round("barrier", {}, [](Shared::Round&) {});
  }
  void broadcast(std::span<std::byte> data, int root) override {
    CHECK(root >= 0 && root < size());
    round("broadcast from " + std::to_string(root),
          rank_ == root ? copy_of(data) : Bytes(), [&](Shared::Round& r) {
            const Bytes& from = r.parts[static_cast<size_t>(root)];
            CHECK(from.size() == data.size());
            std::copy(from.begin(), from.end(), data.begin());
          });
  }
  void all_reduce(std::span<float> data, Op op) override {
    start_reduce(data, op)->wait();
  }
  void all_reduce(std::span<double> data, Op op) override {
    start_reduce(data, op)->wait();
  }
  void all_reduce(std::span<int64_t> data, Op op) override {
    start_reduce(data, op)->wait();
  }

  RequestPtr start_all_reduce(std::span<float> data, Op op) override {
    return start_reduce(data, op);
  }
  RequestPtr start_all_gather(std::span<const std::byte> mine,
                              std::span<std::byte> all) override {
    CHECK(all.size() == mine.size() * static_cast<size_t>(size()));
    return start_round("all_gather of " + std::to_string(mine.size()),
                       copy_of(mine), [all](Shared::Round& r) {
                         auto at = all.begin();
                         for (const Bytes& part : r.parts)
                           at = std::copy(part.begin(), part.end(), at);
                       });
  }
  RequestPtr start_reduce_scatter(std::span<const float> all,
                                  std::span<float> mine) override {
    const size_t n = mine.size();
    CHECK(all.size() == n * static_cast<size_t>(size()));
    const size_t begin = static_cast<size_t>(rank_) * n;
    return start_round("reduce_scatter of " + std::to_string(n),
                       copy_of(std::as_bytes(all)),
                       [begin, mine](Shared::Round& r) {
                         fold_parts(r, Op::kSum, begin, mine);
                       });
  }
  RequestPtr start_send(std::span<const std::byte> data, int to,
                        int tag) override {
    CHECK(to >= 0 && to < size() && tag >= 0);
    auto message = shared_->post(rank_, to, tag, copy_of(data));
    return std::make_unique<LocalRequest>(
        [shared = shared_, message](bool block) {
          return shared->sent(message, block);
        });
  }
  RequestPtr start_recv(std::span<std::byte> data, int from, int tag) override {
    CHECK(from >= 0 && from < size() && tag >= 0);
    const uint64_t ticket = shared_->start_recv(from, rank_, tag);
    return std::make_unique<LocalRequest>(
        [shared = shared_, rank = rank_, from, tag, ticket, data](bool block) {
          return shared->recv(from, rank, tag, ticket, block, data);
        });
  }

  std::unique_ptr<Comm> split(int color, int key) override {
    const int mine[2] = {color, key};
    std::unique_ptr<Comm> out;
    round("split", copy_of(std::as_bytes(std::span(mine))),
          [&](Shared::Round& r) {
            if (color < 0) return;
            std::vector<std::pair<int, int>> members;  // (key, rank)
            for (int peer = 0; peer < size(); ++peer) {
              int theirs[2];
              std::memcpy(theirs, r.parts[static_cast<size_t>(peer)].data(),
                          sizeof(theirs));
              if (theirs[0] == color) members.emplace_back(theirs[1], peer);
            }
            std::sort(members.begin(), members.end());
            const auto me = std::find(members.begin(), members.end(),
                                      std::pair(key, rank_));
            auto& group = r.groups[color];
            if (!group)
              group =
                  std::make_shared<Shared>(static_cast<int>(members.size()));
            out = std::make_unique<LocalComm>(
                group, static_cast<int>(me - members.begin()));
          });
    return out;
  }

 private:
  void round(const std::string& kind, Bytes part, const Shared::Take& take) {
    const uint64_t sequence = sequence_++;
    shared_->put(sequence, kind, rank_, std::move(part));
    shared_->take(sequence, true, take);
  }

  template <typename T>
  static void fold_parts(const Shared::Round& r, Op op, size_t begin,
                         std::span<T> out) {
    std::vector<const T*> parts;
    for (const Bytes& part : r.parts)
      parts.push_back(reinterpret_cast<const T*>(part.data()) + begin);
    fold<T>(op, parts, out.data(), out.size());
  }

  template <typename T>
  RequestPtr start_reduce(std::span<T> data, Op op) {
    return start_round(
        "all_reduce " + std::to_string(static_cast<int>(op)) + " of " +
            std::to_string(data.size_bytes()),
        copy_of(std::as_bytes(data)),
        [op, data](Shared::Round& r) { fold_parts(r, op, 0, data); });
  }

  RequestPtr start_round(const std::string& kind, Bytes part,
                         Shared::Take take) {
    const uint64_t sequence = sequence_++;
    shared_->put(sequence, kind, rank_, std::move(part));
    return std::make_unique<LocalRequest>(
        [shared = shared_, sequence, take = std::move(take)](bool block) {
          return shared->take(sequence, block, take);
        });
  }

  std::shared_ptr<Shared> shared_;
  int rank_;
  uint64_t sequence_ = 0;  // of collectives, the same on every rank
};

}  // namespace

std::vector<std::unique_ptr<Comm>> make_local_comms(int n) {
  CHECK(n >= 1);
  const auto shared = std::make_shared<Shared>(n);
  std::vector<std::unique_ptr<Comm>> comms;
  for (int r = 0; r < n; ++r)
    comms.push_back(std::make_unique<LocalComm>(shared, r));
  return comms;
}

void on_ranks(int n, const std::function<void(Comm&)>& f) {
  const auto comms = make_local_comms(n);
  std::vector<std::jthread> threads;
  for (const auto& c : comms) threads.emplace_back([&] { f(*c); });
}

}  // namespace remesh::comm
