#include "worker/measure/host.h"

#include <algorithm>
#include <barrier>
#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/entries.h"
#include "proto/base/file_system.h"
#include "proto/base/machine.h"
#include "proto/base/median.h"

namespace remesh::measure {
namespace {

using comm::Comm;
using comm::Op;
using kernels::Backend;
using kernels::Dtype;

constexpr int kRounds = 7;

// Bytes that each of `ranks` contributes to a large collective, whose result
// every rank has.
size_t large_bytes(int ranks) {
  constexpr size_t kMost = size_t{4} << 20, kResult = size_t{32} << 20;
  return std::min(kMost, kResult / static_cast<size_t>(ranks) / 64 * 64);
}

double seconds_of(const std::function<void()>& work) {
  const int64_t began = monotonic_ns();
  work();
  return seconds_since(began);
}

class Host {
 public:
  // Ranks of the world, or `num_threads` threads of this process, measure
  // together.
  Host(Comm* world, Backend& backend) : world_(world), backend_(backend) {}
  Host(std::barrier<>& together, int num_threads, Backend& backend)
      : together_(&together), num_threads_(num_threads), backend_(backend) {}
  ~Host() {
    if (together_ != nullptr) together_->arrive_and_drop();
  }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  Result<Measured> run() {
    Measured m{.processor = processor_name(),
               .cores = usable_cores(),
               .memory_bytes = static_cast<double>(usable_memory())};
    m.memory_bytes_per_s = elementwise();
    m.fp32 = gemms(Dtype::kFp32, m.memory_bytes_per_s);
    if (backend_.supports_bf16())
      m.bf16 = gemms(Dtype::kBf16, m.memory_bytes_per_s);
    m.attention_flops = attention(Dtype::kFp32);
    if (backend_.supports_bf16())
      m.bf16_attention_flops = attention(Dtype::kBf16);
    if (world_ != nullptr) {
      m.ranks = world_->size();
      messages(&m);
      m.contention = contention();
      m.straggle = straggle();
    }
    if (short_) return exhausted("not enough memory to measure");
    return m;
  }

 private:
  void wait_for_others() {
    if (world_ != nullptr) world_->barrier();
    if (together_ != nullptr) together_->arrive_and_wait();
  }
  // After one round that warms up, in step with the other ranks.
  std::vector<double> rounds(const std::function<void()>& work) {
    std::vector<double> out;
    for (int i = 0; i <= kRounds; ++i) {
      wait_for_others();
      const double s = seconds_of(work);
      if (i > 0) out.push_back(s);
    }
    return out;
  }
  double mean_over_ranks(double x) {
    if (world_ == nullptr) return x;
    world_->all_reduce(std::span<double>(&x, 1), Op::kSum);
    return x / world_->size();
  }

  // Whether memory is short for any rank so far, which no other must wait for.
  bool lacks_memory(bool here = false) {
    short_ = mean_over_ranks(short_ || here ? 1 : 0) > 0;
    return short_;
  }

  using Buffer = std::unique_ptr<float, kernels::Release>;
  // fp32, filled with small numbers.
  Buffer buffer(int64_t n) {
    const size_t bytes = static_cast<size_t>(n) * sizeof(float);
    Buffer b(static_cast<float*>(backend_.allocate(bytes)), {&backend_});
    if (!b) {
      short_ = true;
      return b;
    }
    // Each is two small numbers in bf16, too.
    for (int64_t i = 0; i < n; ++i) {
      const float x = 0.01F * static_cast<float>(i % 61 - 30);
      const uint32_t half = std::bit_cast<uint32_t>(x) >> 16;
      b.get()[i] = std::bit_cast<float>(half << 16 | half);
    }
    return b;
  }

  // More than one core's share of the caches.
  static constexpr int64_t kColdFloats = int64_t{4} << 20;

  // The `i`th operand of `n` elements in a buffer of kColdFloats.
  static float* operand(const Buffer& b, int64_t n, size_t i) {
    return b.get() + static_cast<int64_t>(i) % (kColdFloats / n) * n;
  }

  // The three products of linear layers, as in a training step: a layer's
  // weight and its gradient are not in the caches, its input and output are.
  // Without the time in which the gradient is read and written, which
  // parallel/planner/step_cost.cc counts apart.
  std::vector<GemmTime> gemms(Dtype d, double memory_bytes_per_s) {
    constexpr double kBudgetS = 0.09;
    constexpr size_t kWarmUp = 1;
    constexpr int64_t kLayers[][3] = {{256, 512, 64},
                                      {256, 256, 256},
                                      {512, 1536, 512},
                                      {512, 512, 1376},
                                      {512, 1024, 1024}};
    const Buffer masters = buffer(kColdFloats), inputs = buffer(kColdFloats);
    const Buffer outputs = buffer(kColdFloats), sums = buffer(kColdFloats);
    std::vector<GemmTime> times;
    for (const auto& layer : kLayers) {
      const int64_t rows = layer[0], out = layer[1], in = layer[2];
      std::vector<std::unique_ptr<kernels::Weight>> weights;
      for (int64_t i = 0; i < kColdFloats / (out * in) && !short_; ++i) {
        weights.push_back(backend_.make_weight(d, out, in));
        short_ = weights.back() == nullptr;
      }
      if (lacks_memory()) return {};
      for (size_t i = 0; i < weights.size(); ++i)
        backend_.load_weight(*weights[i], operand(masters, out * in, i));
      const auto N = static_cast<double>(rows), O = static_cast<double>(out),
                 I = static_cast<double>(in);
      constexpr size_t kWeight = 2;
      const GemmTime of[] = {{N, O, I}, {N, I, O}, {O, I, N}};
      std::vector<double> seconds[std::size(of)];
      wait_for_others();
      const int64_t began = monotonic_ns();
      for (size_t i = 0; i < kWarmUp + 1 || seconds_since(began) < kBudgetS;
           ++i) {
        const kernels::Weight& w = *weights[i % weights.size()];
        const float* x = operand(inputs, rows * in, i);
        float* y = operand(outputs, rows * std::max(in, out), 2 * i);
        float* dx = operand(outputs, rows * std::max(in, out), 2 * i + 1);
        const std::function<void()> products[] = {
            [&] { backend_.linear(w, x, rows, d, y); },
            [&] { backend_.linear_backward_input(w, y, rows, d, false, dx); },
            [&] {
              backend_.linear_backward_weight(d, y, x, rows, out, in,
                                              operand(sums, out * in, i));
            }};
        for (size_t k = 0; k < std::size(of); ++k) {
          const double s = seconds_of([&] {
            products[k]();
            backend_.synchronize();
          });
          if (i >= kWarmUp) seconds[k].push_back(s);
        }
      }
      for (size_t k = 0; k < std::size(of); ++k) {
        times.push_back(of[k]);
        double& s = times.back().seconds;
        s = mean_over_ranks(median(seconds[k]));
        if (k == kWeight)
          s = std::max(s / 2, s - 8 * O * I / memory_bytes_per_s);
      }
    }
    return times;
  }

  // As parallel/planner/layer_cost.cc counts the forward pass: 2 N (T + 128) q.
  double attention(Dtype d) {
    constexpr int64_t T = 1024, kWidth = 512;
    const kernels::AttentionSegment s{.B = 1,
                                      .Tq = T,
                                      .Tk = T,
                                      .num_heads = 8,
                                      .num_kv_heads = 8,
                                      .head_dim = 64,
                                      .q_stride = kWidth,
                                      .kv_stride = kWidth,
                                      .q_batch = T,
                                      .kv_batch = T,
                                      .lse_T = T};
    const int64_t n = T * kWidth;
    const Buffer q = buffer(n), k = buffer(n), v = buffer(n), o = buffer(n);
    const Buffer lse = buffer(T * s.num_heads);
    if (lacks_memory()) return 1;
    const double s_each = median(rounds([&] {
      backend_.attention(d, s, q.get(), k.get(), v.get(), o.get(), lse.get());
      backend_.synchronize();
    }));
    const double flops = 2.0 * static_cast<double>(T * (T + 128) * kWidth);
    return mean_over_ranks(flops / s_each);
  }

  // The update of the weights moves most bytes of all elementwise operations:
  // four vectors are read, and three written elsewhere, in fp32.
  double elementwise() {
    // More than the caches of all have.
    const int64_t n = std::clamp((int64_t{16} << 20) / num_threads_,
                                 int64_t{1} << 19, int64_t{4} << 20);
    Buffer vectors[7];
    for (Buffer& v : vectors) v = buffer(n);
    if (lacks_memory()) return 1;
    float* const variance = vectors[3].get();
    std::transform(variance, variance + n, variance,
                   [](float x) { return std::abs(x); });
    const double s = median(rounds([&] {
      backend_.adamw({}, n, vectors[0].get(), vectors[1].get(),
                     vectors[2].get(), variance, vectors[4].get(),
                     vectors[5].get(), vectors[6].get());
      backend_.synchronize();
    }));
    return mean_over_ranks(28.0 * static_cast<double>(n) / s);
  }

  double gather_s(size_t bytes_each) {
    std::vector<std::byte> mine(bytes_each);
    std::vector<std::byte> all(bytes_each *
                               static_cast<size_t>(world_->size()));
    return median(rounds([&] { world_->all_gather(mine, all); }));
  }

  void messages(Measured* m) {
    const size_t large = large_bytes(world_->size());
    constexpr int kTrips = 200;
    const double n = world_->size();
    std::byte small{};
    const std::span<std::byte> data(&small, 1);
    const int rank = world_->rank();
    const double trips = median(rounds([&] {
      for (int i = 0; i < kTrips; ++i) {
        if (rank == 0) world_->send(data, 1, 0);
        if (rank <= 1) world_->recv(data, 1 - rank, 0);
        if (rank == 1) world_->send(data, 0, 0);
      }
    }));
    // Seconds of a message of rank 0, in both directions.
    double message_s = rank == 0 ? trips / kTrips / 2 : 0;
    world_->all_reduce(std::span<double>(&message_s, 1), Op::kSum);
    m->message_s = message_s;
    m->small_gather_s = mean_over_ranks(gather_s(8));
    const double gathered = gather_s(large);
    std::vector<float> all(large / sizeof(float) *
                           static_cast<size_t>(world_->size()));
    std::vector<float> mine(large / sizeof(float));
    const double scattered =
        median(rounds([&] { world_->reduce_scatter(all, mine); }));
    const double seconds =
        mean_over_ranks((gathered + scattered) / 2) - m->small_gather_s;
    m->gather_bytes_per_s =
        static_cast<double>(large) * (n - 1) / std::max(seconds, 1e-9);
  }

  // Gathers beside GEMMs that take about as long and drive them, against each
  // of the two alone.
  double contention() {
    constexpr int64_t kRows = 256, kWidth = 512;
    constexpr int kGathers = 16, kMostGemms = 64;
    const size_t each = large_bytes(world_->size());
    const auto w = backend_.make_weight(Dtype::kFp32, kWidth, kWidth);
    const Buffer master = buffer(kWidth * kWidth), x = buffer(kRows * kWidth),
                 y = buffer(kRows * kWidth);
    if (lacks_memory(w == nullptr)) return 1;
    backend_.load_weight(*w, master.get());
    std::vector<std::byte> mine(each);
    std::vector<std::byte> all(each * static_cast<size_t>(world_->size()));
    const auto gather = [&] { return world_->start_all_gather(mine, all); };
    const auto gemm = [&] {
      backend_.linear(*w, x.get(), kRows, Dtype::kFp32, y.get());
      backend_.synchronize();
    };
    const auto repeat = [](int times, const auto& work) {
      for (int i = 0; i < times; ++i) work();
    };
    const double comm =
        median(rounds([&] { repeat(kGathers, [&] { gather()->wait(); }); }));
    const double one = mean_over_ranks(
        median(rounds([&] { repeat(kMostGemms, gemm); })) / kMostGemms);
    const auto gemms = static_cast<int>(std::clamp(
        mean_over_ranks(comm) / kGathers / one, 1.0, double{kMostGemms}));
    const double compute =
        median(rounds([&] { repeat(kGathers * gemms, gemm); }));
    const double both = median(rounds([&] {
      repeat(kGathers, [&] {
        const auto request = gather();
        repeat(gemms, [&] {
          gemm();
          request->test();
        });
        request->wait();
      });
    }));
    const double shared =
        (both - std::max(compute, comm)) / std::min(compute, comm);
    return mean_over_ranks(shared);
  }

  // Relative deviation of the time for the same work, over rounds and ranks.
  double straggle() {
    constexpr int64_t kRows = 512, kWidth = 512;
    constexpr int kGemms = 40;
    const auto w = backend_.make_weight(Dtype::kFp32, kWidth, kWidth);
    const Buffer master = buffer(kWidth * kWidth), x = buffer(kRows * kWidth),
                 y = buffer(kRows * kWidth);
    if (lacks_memory(w == nullptr)) return 0;
    backend_.load_weight(*w, master.get());
    const std::vector<double> times = rounds([&] {
      for (int i = 0; i < kGemms; ++i)
        backend_.linear(*w, x.get(), kRows, Dtype::kFp32, y.get());
    });
    double sum = 0, squares = 0;
    for (const double t : times) {
      sum += t;
      squares += t * t;
    }
    const double n = static_cast<double>(times.size());
    const double mean = mean_over_ranks(sum / n);
    const double square = mean_over_ranks(squares / n);
    return std::sqrt(std::max(0.0, square - mean * mean)) / mean;
  }

  Comm* world_ = nullptr;
  std::barrier<>* together_ = nullptr;
  int num_threads_ = 1;
  Backend& backend_;
  bool short_ = false;  // of memory
};

}  // namespace

Result<Measured> measure_host(Comm& world, Backend& backend) {
  return Host(&world, backend).run();
}

namespace {

// The same work, on so many threads at once.
Measured mean_of(const std::vector<Measured>& all) {
  Measured out = all.front();
  const auto n = static_cast<double>(all.size());
  const auto mean = [&](const auto& of) {
    double sum = 0;
    for (const Measured& m : all) sum += of(m);
    return sum / n;
  };
  for (auto gemms : {&Measured::fp32, &Measured::bf16})
    for (size_t i = 0; i < (out.*gemms).size(); ++i)
      (out.*gemms)[i].seconds =
          mean([&](const Measured& m) { return (m.*gemms)[i].seconds; });
  for (double Measured::*rate :
       {&Measured::attention_flops, &Measured::bf16_attention_flops,
        &Measured::memory_bytes_per_s})
    out.*rate = mean([&](const Measured& m) { return m.*rate; });
  return out;
}

}  // namespace

Result<Measured> measure_cores(int num_threads) {
  CHECK(num_threads >= 1);
  std::vector<Result<Measured>> results(static_cast<size_t>(num_threads),
                                        internal("not measured"));
  {
    std::barrier<> together(num_threads);
    std::vector<std::jthread> threads;
    for (Result<Measured>& result : results)
      threads.emplace_back([&, num_threads] {
        const auto backend = kernels::make_cpu_backend(1);
        result = Host(together, num_threads, *backend).run();
      });
    for (std::jthread& t : threads) t.join();
  }
  std::vector<Measured> all;
  for (Result<Measured>& result : results) {
    ASSIGN_OR_RETURN(all.emplace_back(), std::move(result));
  }
  return mean_of(all);
}

// Virtual interfaces report any speed, and lead to no other host beside a real
// one; a container has nothing else.
double network_speed() {
  namespace fs = std::filesystem;
  constexpr double kMegabit = 1e6 / 8;
  double real = 0, any = 0;
  for (const fs::path& path : entries_of("/sys/class/net")) {
    double megabits = 0;  // -1 or unreadable: the interface does not say
    std::ifstream(path / "speed") >> megabits;
    std::string state;
    std::ifstream(path / "operstate") >> state;
    if (state != "up") continue;
    any = std::max(any, megabits * kMegabit);
    if (path_exists(path / "device"))
      real = std::max(real, megabits * kMegabit);
  }
  return real > 0 ? real : any;
}

std::string processor_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("model name")) {
      const size_t value = line.find_first_not_of(" \t:", 10);
      if (value != std::string::npos) return line.substr(value);
    }
  return "processor";
}

}  // namespace remesh::measure
