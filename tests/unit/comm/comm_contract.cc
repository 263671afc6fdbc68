#include "tests/unit/comm/comm_contract.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "proto/base/rng.h"

namespace remesh::comm {
namespace {

class Checker {
 public:
  Checker(Comm& comm, uint64_t seed, size_t max_length)
      : comm_(comm), seed_(seed), max_length_(max_length) {}

  std::vector<std::string> run(int rounds) {
    for (round_ = 0; round_ < rounds; ++round_) one_round();
    point_to_point_keeps_order();
    requests_finish_in_any_order();
    overlapping_groups_do_not_block();
    return failures_;
  }

 private:
  // The same on every rank.
  uint64_t common(uint64_t i) const {
    return random_u64(seed_, 1000 + static_cast<uint64_t>(round_), i);
  }
  // Element i of rank r's input of this round: of very different sizes, so
  // that any other order of addition gives other bits.
  float input(int r, size_t i) const {
    // splitmix64 (Steele, Lea and Flood 2014): millions are needed.
    uint64_t u = seed_ + static_cast<uint64_t>(round_) * 977 +
                 static_cast<uint64_t>(r) * 0xD1B54A32D192ED03 +
                 static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15;
    u = (u ^ (u >> 30)) * 0xBF58476D1CE4E5B9;
    u = (u ^ (u >> 27)) * 0x94D049BB133111EB;
    u ^= u >> 31;
    const float mantissa = 1.0F + static_cast<float>(u & 0xFFFFFF) / 0x1p24F;
    const float v = std::ldexp(mantissa, static_cast<int>((u >> 24) % 40) - 20);
    return (u >> 40 & 1) != 0 ? -v : v;
  }
  template <typename T>
  std::vector<T> inputs(int r, size_t n) const {
    std::vector<T> v(n);
    for (size_t i = 0; i < n; ++i) v[i] = static_cast<T>(input(r, i));
    return v;
  }
  template <typename T>
  std::vector<T> reduced(Op op, size_t n) const {
    std::vector<T> acc = inputs<T>(0, n);
    for (int r = 1; r < comm_.size(); ++r) {
      const std::vector<T> in = inputs<T>(r, n);
      for (size_t i = 0; i < n; ++i) {
        if (op == Op::kSum) acc[i] = acc[i] + in[i];
        if (op == Op::kMax) acc[i] = std::max(acc[i], in[i]);
      }
    }
    return acc;
  }

  template <typename T>
  void expect_same(const std::vector<T>& got, const std::vector<T>& want,
                   const std::string& what) {
    if (got.size() == want.size() &&
        (got.empty() ||
         std::memcmp(got.data(), want.data(), got.size() * sizeof(T)) == 0))
      return;
    size_t i = 0;
    while (i < got.size() && got[i] == want[i]) ++i;
    fail(fmt::format("{}: {} elements, first difference at {}", what,
                     got.size(), i));
  }
  void fail(const std::string& what) {
    failures_.push_back(fmt::format("rank {} of {}, seed {}, round {}: {}",
                                    comm_.rank(), comm_.size(), seed_, round_,
                                    what));
  }

  // Empty, tiny, around the borders of the algorithms, several blocks.
  size_t some_length() const {
    switch (common(1) % 5) {
      case 0:
        return common(2) % 5;
      case 1:
        return common(2) % 300;
      case 2:
        return 2040 + common(2) % 20;  // around kWholeBytes
      case 3:
        return common(2) % (max_length_ / 10);
      default:
        return max_length_ / 2 + common(2) % (max_length_ / 2);
    }
  }

  void one_round() {
    const size_t n = some_length();
    const Op op = static_cast<Op>(common(3) % 2);
    switch (common(4) % 8) {
      case 0:
        return all_reduce<float>(op, n);
      case 1:
        return all_reduce<double>(op, n / 2);
      case 2:
        return all_reduce<int64_t>(op, n / 2);
      case 3:
        return bucketed_all_reduce(op, n);
      case 4:
        return broadcast(n);
      case 5:
        return all_gather(n / 8);
      case 6:
        return reduce_scatter(n / 3);
      default:
        comm_.barrier();
        return split();
    }
  }

  template <typename T>
  void all_reduce(Op op, size_t n) {
    auto data = inputs<T>(comm_.rank(), n);
    comm_.all_reduce(std::span<T>(data), op);
    expect_same(data, reduced<T>(op, n), "all_reduce");
  }

  // Several in progress at once: pieces give the bits of the full vector.
  void bucketed_all_reduce(Op op, size_t n) {
    auto data = inputs<float>(comm_.rank(), n);
    const size_t bucket = 1 + common(5) % (n + 1);
    std::vector<RequestPtr> requests;
    for (size_t at = 0; at < n; at += bucket)
      if (requests.size() < 8 || at + bucket >= n)
        requests.push_back(comm_.start_all_reduce(
            std::span(data).subspan(at, std::min(bucket, n - at)), op));
      else
        comm_.all_reduce(std::span(data).subspan(at, std::min(bucket, n - at)),
                         op);
    if (!requests.empty() && common(6) % 2 == 0) requests.front()->test();
    for (auto& r : requests) r->wait();
    expect_same(data, reduced<float>(op, n), "start_all_reduce");
  }

  void broadcast(size_t n) {
    const int root =
        static_cast<int>(common(5) % static_cast<uint64_t>(comm_.size()));
    auto data = inputs<float>(comm_.rank(), n);
    comm_.broadcast(std::as_writable_bytes(std::span(data)), root);
    expect_same(data, inputs<float>(root, n), "broadcast");
  }

  // Blocking, in place or not; or several in progress at once, together with an
  // all-reduce.
  void all_gather(size_t n) {
    const auto p = static_cast<size_t>(comm_.size());
    const auto me = static_cast<size_t>(comm_.rank());
    const auto mine = inputs<float>(comm_.rank(), n);
    std::vector<float> want;
    for (int r = 0; r < comm_.size(); ++r) {
      const auto part = inputs<float>(r, n);
      want.insert(want.end(), part.begin(), part.end());
    }
    std::vector<float> all(n * p);
    const auto gather = [&](std::span<float> out) {
      const bool in_place = common(5) % 2 == 0;
      const auto part = out.subspan(me * n, n);
      if (in_place) std::copy(mine.begin(), mine.end(), part.begin());
      return comm_.start_all_gather(
          std::as_bytes(in_place ? part : std::span(mine)),
          std::as_writable_bytes(out));
    };
    if (common(6) % 3 == 0) {
      comm_.all_gather(std::as_bytes(std::span(mine)),
                       std::as_writable_bytes(std::span(all)));
      return expect_same(all, want, "all_gather");
    }
    std::vector<float> more(n * p);
    auto sums = inputs<float>(comm_.rank(), n);
    const auto first = gather(all);
    const auto between = comm_.start_all_reduce(sums, Op::kSum);
    const auto second = gather(more);
    if (common(7) % 2 == 0) first->test();
    for (const auto* r : {&second, &first, &between}) (*r)->wait();
    expect_same(all, want, "start_all_gather");
    expect_same(more, want, "second start_all_gather");
    expect_same(sums, reduced<float>(Op::kSum, n), "all_reduce between");
  }

  // The same.
  void reduce_scatter(size_t n) {
    const auto p = static_cast<size_t>(comm_.size());
    const auto me = static_cast<size_t>(comm_.rank());
    auto all = inputs<float>(comm_.rank(), n * p);
    auto copy = all;
    const auto whole = reduced<float>(Op::kSum, n * p);
    const std::vector<float> want(
        whole.begin() + static_cast<std::ptrdiff_t>(me * n),
        whole.begin() + static_cast<std::ptrdiff_t>(me * n + n));
    std::vector<float> mine(n);
    if (common(6) % 3 == 0) {
      comm_.reduce_scatter(all, mine);
      return expect_same(mine, want, "reduce_scatter");
    }
    const auto part = std::span(copy).subspan(me * n, n);
    const auto first = comm_.start_reduce_scatter(all, mine);
    const auto second = comm_.start_reduce_scatter(copy, part);
    if (common(7) % 2 == 0) first->test();
    second->wait();
    first->wait();
    expect_same(mine, want, "start_reduce_scatter");
    expect_same(std::vector<float>(part.begin(), part.end()), want,
                "start_reduce_scatter in place");
  }

  // Colors and keys at random; some ranks stay out.
  void split() {
    const auto color_of = [&](int r) {
      return static_cast<int>(common(100 + static_cast<uint64_t>(r)) % 3) - 1;
    };
    const auto key_of = [&](int r) {
      return static_cast<int>(common(200 + static_cast<uint64_t>(r)) % 2);
    };
    const int me = comm_.rank();
    std::vector<int> members;
    for (int key = 0; key < 2; ++key)
      for (int r = 0; r < comm_.size(); ++r)
        if (color_of(r) == color_of(me) && key_of(r) == key)
          members.push_back(r);
    const auto sub = comm_.split(color_of(me), key_of(me));
    if ((sub == nullptr) != (color_of(me) < 0)) fail("split: wrong nullptr");
    if (sub == nullptr) return;
    if (sub->size() != static_cast<int>(members.size()) ||
        members.at(static_cast<size_t>(sub->rank())) != me)
      return fail("split: wrong members");
    int64_t sum = me;
    sub->all_reduce(std::span(&sum, 1), Op::kSum);
    for (const int r : members) sum -= r;
    if (sum != 0) fail("split: all_reduce reaches other ranks");
  }

  // A ring; two tags cross, messages of one tag do not.
  void point_to_point_keeps_order() {
    const int p = comm_.size();
    const int next = (comm_.rank() + 1) % p;
    const int prev = (comm_.rank() + p - 1) % p;
    const size_t sizes[] = {0, 3, max_length_ / 9, 7, max_length_};
    std::vector<std::vector<float>> out, in;
    std::vector<RequestPtr> requests;
    for (size_t k = 0; k < std::size(sizes); ++k) {
      out.push_back(inputs<float>(comm_.rank(), sizes[k] + k));
      in.emplace_back(sizes[k] + k);
    }
    for (size_t k = std::size(sizes); k-- > 0;)
      if (k % 2 == 1)
        requests.push_back(comm_.start_recv(
            std::as_writable_bytes(std::span(in[k])), prev, 100 + int(k)));
    for (size_t k = 0; k < std::size(sizes); ++k)
      requests.push_back(
          comm_.start_send(std::as_bytes(std::span(out[k])), next,
                           k % 2 == 1 ? 100 + static_cast<int>(k) : 7));
    for (size_t k = 0; k < std::size(sizes); k += 2)
      comm_.recv(std::as_writable_bytes(std::span(in[k])), prev, 7);
    for (auto& r : requests) r->wait();
    for (size_t k = 0; k < std::size(sizes); ++k)
      expect_same(in[k], inputs<float>(prev, sizes[k] + k), "send/recv");
  }

  // Ranks wait for the same operations in different orders.
  void requests_finish_in_any_order() {
    constexpr size_t kCount = 4;
    const size_t length = max_length_ / 3;
    std::vector<std::vector<float>> data;
    std::vector<RequestPtr> requests;
    for (size_t k = 0; k < kCount; ++k) {
      data.push_back(inputs<float>(comm_.rank(), length + k));
      requests.push_back(comm_.start_all_reduce(data[k], Op::kSum));
    }
    for (size_t k = 0; k < kCount; ++k)
      requests[(k + static_cast<size_t>(comm_.rank())) % kCount]->wait();
    for (size_t k = 0; k < kCount; ++k)
      expect_same(data[k], reduced<float>(Op::kSum, length + k),
                  "waits in another order");
  }

  // Rank 0 enters a barrier of one group while an all-reduce of another still
  // needs it: the barrier must make that progress.
  void overlapping_groups_do_not_block() {
    if (comm_.size() < 2) return;
    const auto other = comm_.split(0, -comm_.rank());
    auto data = inputs<float>(comm_.rank(), max_length_);
    auto request = comm_.start_all_reduce(data, Op::kSum);
    if (comm_.rank() % 2 == 0) {
      other->barrier();
      request->wait();
    } else {
      request->wait();
      other->barrier();
    }
    expect_same(data, reduced<float>(Op::kSum, data.size()),
                "all_reduce beside a barrier");
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const Op op : {Op::kSum, Op::kMax}) {
      float x = comm_.rank() == comm_.size() / 2 ? nan : 1.0F;
      comm_.all_reduce(std::span(&x, 1), op);
      if (!std::isnan(x)) fail("a NaN is lost");
    }
  }

  Comm& comm_;
  uint64_t seed_;
  size_t max_length_;
  int round_ = 0;
  std::vector<std::string> failures_;
};

}  // namespace

std::vector<std::string> check_contract(Comm& comm, uint64_t seed, int rounds,
                                        size_t max_length) {
  return Checker(comm, seed, max_length).run(rounds);
}

}  // namespace remesh::comm
