// bench_checkpoint: how fast a state is saved and loaded, compared with a plain
// write and fsync of the same bytes to the same disk in the same run; then the
// same during training, and how much each slows it down (under_load.h).
//
//   bench_checkpoint [--mib N] [--ranks N] [--trials N] [--compression C]
//                    [--threads N] [--dir DIR] [--json]
//
// The figure of merit is the ratio: 1.0 means that HDF5, checksums, index and
// commit cost nothing on top of a plain write. For saving and plain writes each
// rank is a thread with its own file; for loading it is a process, because HDF5
// has one lock per process. "streamed" is the plain write through
// FileSystem::create_streamed, as shards are written: the limit of this disk.
// The state is loaded by another number of ranks than saved it, and compared.
//
// Trials alternate, as does their order; medians are compared. Removing files
// and waiting for the disk to settle are not timed.
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "bench/checkpoint/under_load.h"
#include "bench/options.h"
#include "bench/targets.h"
#include "checkpoint/manifest/scan.h"
#include "checkpoint/store/store.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/median.h"
#include "tests/testing/llama.h"
#include "tests/testing/pieces.h"
#include "tests/testing/temp_dir.h"

namespace remesh::store {
namespace {

struct Options {
  int64_t mib = 1024;
  int ranks = 1;
  int trials = 5;
  int threads = 2;  // that train; 0: skips the measurement under load
  Compression compression = Compression::kNone;
  std::string dir = ".";
  bool json = false;
  bool smoke = false;
};

constexpr double kSaveOverPlain = 0.9;
constexpr double kSaveSlows = 0.05;  // of a step

// A Llama whose state (three fp32 tensors) has about this size.
geometry::ParamTable table_of(int64_t mib) {
  geometry::ModelConfig c =
      geometry::llama(mib < 128 ? 64 : 512, 1, 8, 8, 1376, 8192, /*tied=*/true);
  const int64_t wanted = mib * (1 << 20) / 12;
  const int64_t one = geometry::ParamTable::make(c).num_elements();
  const int64_t layer = one - c.vocab_size * c.dim - c.dim;
  c.n_layers = std::max<int64_t>(1, 1 + (wanted - one) / layer);
  return geometry::ParamTable::make(c);
}

struct Cost {
  double wall_s = 0;
  double cpu_s = 0;  // user and system time of the process and its children
};

double cpu_seconds() {
  double seconds = 0;
  for (const int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage u = {};
    getrusage(who, &u);
    seconds +=
        static_cast<double>(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
        1e-6 * static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
  }
  return seconds;
}

// Runs work(rank) in one thread per rank.
Status in_threads(int ranks, const std::function<Status(int)>& work) {
  std::vector<Status> outcome(static_cast<size_t>(ranks));
  {
    std::vector<std::jthread> threads;
    threads.reserve(static_cast<size_t>(ranks));
    for (int r = 0; r < ranks; ++r)
      threads.emplace_back(
          [&, r] { outcome[static_cast<size_t>(r)] = work(r); });
  }
  for (const Status& s : outcome) RETURN_IF_ERROR(s);
  return ok_status();
}

// Runs work(rank) in one process per rank.
Status in_processes(int ranks, const std::function<Status(int)>& work) {
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; ++r) {
    const pid_t pid = fork();
    if (pid < 0) return errno_error("fork", errno);
    if (pid == 0) {
      const Status done = work(r);
      if (!done.ok()) fmt::print(stderr, "{}\n", done.to_string());
      _exit(done.ok() ? 0 : 1);
    }
    children.push_back(pid);
  }
  bool all = true;
  for (const pid_t pid : children) {
    int status = 0;
    all = waitpid(pid, &status, 0) == pid && status == 0 && all;
  }
  return all ? ok_status() : io_error("a rank failed");
}

// Memory shared by the ranks' processes, so that none of them faults in pages.
class SharedFloats {
 public:
  explicit SharedFloats(size_t n) : n_(n) {
    void* at = mmap(nullptr, n * sizeof(float), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    data_ = static_cast<float*>(at);
    // Like weights: noise except for the exponent.
    uint32_t x = 1;
    for (size_t i = 0; i < n; ++i) {
      x = x * 1664525U + 1013904223U;
      data_[i] = (static_cast<float>(x >> 8) / (1 << 24) - 0.5F) * 0.02F;
    }
  }
  ~SharedFloats() { munmap(data_, n_ * sizeof(float)); }
  SharedFloats(const SharedFloats&) = delete;
  SharedFloats& operator=(const SharedFloats&) = delete;
  std::span<float> span() const { return {data_, n_}; }

 private:
  size_t n_;
  float* data_ = nullptr;
};

// Independent medians of wall and CPU time per GB.
Cost median_per_gb(const std::vector<Cost>& costs, double gb) {
  std::vector<double> wall, cpu;
  for (const Cost& c : costs) {
    wall.push_back(c.wall_s);
    cpu.push_back(c.cpu_s);
  }
  return {.wall_s = median(wall) / gb, .cpu_s = median(cpu) / gb};
}

class Bench {
 public:
  Bench(const Options& options, std::string dir)
      : options_(options), dir_(std::move(dir)) {}

  Status run() {
    for (int t = 0; t < options_.trials; ++t) {
      const std::function<Status()> ways[] = {
          [&] { return measure(plain_, [&] { return write_plain(false); }); },
          [&] { return measure(save_, [&] { return save(t); }); },
          [&] { return measure(stream_, [&] { return write_plain(true); }); }};
      for (int i = 0; i < 3; ++i) {
        RETURN_IF_ERROR(ways[(t + i) % 3]());
        RETURN_IF_ERROR(remove_all(*fs_, plain_dir()));
      }
      RETURN_IF_ERROR(check_load());
      RETURN_IF_ERROR(remove_all(*fs_, path_));
    }
    if (options_.threads > 0) {
      ASSIGN_OR_RETURN(
          under_load_,
          bench::measure_under_load(
              {.dir = dir_,
               .threads = options_.threads,
               .trials = options_.trials,
               .compression = options_.compression == Compression::kZlib
                                  ? "zlib"
                                  : "none"},
              table_, state()));
    }
    report();
    return ok_status();
  }

  void judge(bench::Targets& targets) const {
    const Cost plain = median_per_gb(plain_, 1), save = median_per_gb(save_, 1);
    targets.at_least("speed of a save over that of a plain write",
                     kSaveOverPlain, plain.wall_s / save.wall_s);
    if (options_.threads > 0)
      targets.at_most("a step during a save takes longer by", kSaveSlows,
                      under_load_.save_slows);
  }

 private:
  uint64_t bytes() const { return 12U * weights_.span().size(); }
  std::pair<int64_t, int64_t> share(int rank, int ranks) const {
    const int64_t n = table_.num_elements();
    return {n * rank / ranks, n * (rank + 1) / ranks};
  }

  Status measure(std::vector<Cost>& costs,
                 const std::function<Status()>& work) {
    bench::settle_disk(dir_);
    const int64_t begin = monotonic_ns();
    const double cpu = cpu_seconds();
    RETURN_IF_ERROR(work());
    costs.push_back(
        {.wall_s = seconds_since(begin), .cpu_s = cpu_seconds() - cpu});
    return ok_status();
  }

  // In a directory of their own, as shards are: the directory decides where on
  // the disk a file system places its files, which may be faster or slower.
  std::string plain_dir() const { return path_join(dir_, "plain"); }
  Status write_plain(bool streamed) {
    RETURN_IF_ERROR(fs_->create_dirs(plain_dir()));
    return in_threads(options_.ranks, [&](int r) -> Status {
      const auto part = share(r, options_.ranks);
      const std::string path = path_join(plain_dir(), std::to_string(r));
      ASSIGN_OR_RETURN(const auto file, streamed ? fs_->create_streamed(path)
                                                 : fs_->create(path));
      const auto mine = [&](const SharedFloats& tensor) {
        return tensor.span().subspan(part.first, part.second - part.first);
      };
      return bench::write_vectors(
          *file, {mine(weights_), mine(exp_avg_), mine(exp_avg_sq_)});
    });
  }

  geometry::StateView state() const {
    return {weights_.span(), exp_avg_.span(), exp_avg_sq_.span()};
  }

  Status save(int trial) {
    const SaveId id{.step = trial + 1, .generation = 1};
    pb::Manifest m;
    m.set_step(id.step);
    m.set_generation(id.generation);
    *m.mutable_model() = manifest::model_info(table_.config());
    RETURN_IF_ERROR(in_threads(options_.ranks, [&](int r) {
      const auto [begin, end] = share(r, options_.ranks);
      WriteOptions options{.compression = options_.compression};
      options.stream.room = bytes();
      return write_shard(*fs_, dir_, id, r, table_,
                         pieces_of_range(table_, begin, end), state(), options)
          .status();
    }));
    const int64_t begin_ns = monotonic_ns();
    ASSIGN_OR_RETURN(const CommitResult done,
                     commit(*fs_, dir_, m, options_.ranks, table_, {}));
    commit_s_.push_back(seconds_since(begin_ns));
    path_ = done.path;
    stored_ = 0;
    for (const pb::ShardFile& f : done.manifest.shards()) stored_ += f.bytes();
    return done.cleanup;
  }

  Status check_load() {
    std::vector<std::string> before;
    for (const SharedFloats* tensor : {&weights_, &exp_avg_, &exp_avg_sq_}) {
      before.push_back(sum_of(*tensor));
      std::fill(tensor->span().begin(), tensor->span().end(), 0.0F);
    }
    RETURN_IF_ERROR(measure(load_, [&] { return load_all(); }));
    if (before[0] == sum_of(weights_) && before[1] == sum_of(exp_avg_) &&
        before[2] == sum_of(exp_avg_sq_))
      return ok_status();
    return corrupt(path_ + ": the loaded state differs from the saved one");
  }
  static std::string sum_of(const SharedFloats& v) {
    return xxh128_text({reinterpret_cast<const char*>(v.span().data()),
                        v.span().size_bytes()});
  }

  Status load_all() {
    return in_processes(options_.ranks + 1, [&](int r) -> Status {
      const auto [begin, end] = share(r, options_.ranks + 1);
      ASSIGN_OR_RETURN(const auto m, manifest::read_checkpoint(*fs_, path_));
      return load(*fs_, path_, m, table_, pieces_of_range(table_, begin, end),
                  state());
    });
  }

  void report() const {
    const double gb = static_cast<double>(bytes()) * 1e-9;
    const Cost plain = median_per_gb(plain_, gb);
    const Cost save = median_per_gb(save_, gb);
    const Cost stream = median_per_gb(stream_, gb);
    const Cost load = median_per_gb(load_, gb);
    if (options_.json) {
      fmt::print(
          "{{\"bytes\": {}, \"stored_bytes\": {}, \"ranks\": {}, "
          "\"plain_gb_per_s\": {:.4f}, \"save_gb_per_s\": {:.4f}, "
          "\"load_gb_per_s\": {:.4f}, \"save_over_plain\": {:.4f}, "
          "\"save_over_streamed\": {:.4f}, \"plain_cpu_s_per_gb\": {:.4f}, "
          "\"save_cpu_s_per_gb\": {:.4f}, \"load_cpu_s_per_gb\": {:.4f}, "
          "\"beside_save_over_plain\": {:.4f}, \"save_slows\": {:.4f}, "
          "\"plain_slows\": {:.4f}, \"copy_waits\": {}}}\n",
          bytes(), stored_, options_.ranks, 1 / plain.wall_s, 1 / save.wall_s,
          1 / load.wall_s, plain.wall_s / save.wall_s,
          stream.wall_s / save.wall_s, plain.cpu_s, save.cpu_s, load.cpu_s,
          under_load_.plain_over_save, under_load_.save_slows,
          under_load_.plain_slows, under_load_.copy_waits);
      return;
    }
    fmt::print("state {:.0f} MiB, {} shards, median of {} trials\n",
               static_cast<double>(bytes()) / (1 << 20), options_.ranks,
               options_.trials);
    const auto line = [](const char* what, const Cost& c, std::string note) {
      fmt::print("{:<19}{:7.3f} GB/s {:7.3f} CPU s/GB  {}\n", what,
                 1 / c.wall_s, c.cpu_s, note);
    };
    line("write + fsync", plain, "");
    line("streamed write", stream, "");
    line("save + commit", save,
         fmt::format("{:.2f} of the plain write, {:.2f} of the streamed; "
                     "{:.0f} MiB, commit {:.0f} ms",
                     plain.wall_s / save.wall_s, stream.wall_s / save.wall_s,
                     static_cast<double>(stored_) / (1 << 20),
                     1e3 * median(commit_s_)));
    line("load + verify", load,
         fmt::format("{} shards to {} ranks", options_.ranks,
                     options_.ranks + 1));
    if (options_.threads == 0) return;
    fmt::print(
        "with {} threads training: save {:.3f} GB/s, plain write {:.3f} GB/s, "
        "ratio {:.2f}\n"
        "  a step takes {:.1f} % longer during the save, {:.1f} % during the "
        "plain write; {} updates waited for the copy\n",
        options_.threads, gb / under_load_.save_s, gb / under_load_.plain_s,
        under_load_.plain_over_save, 100 * under_load_.save_slows,
        100 * under_load_.plain_slows, under_load_.copy_waits);
  }

  const Options options_;
  const std::string dir_;
  const geometry::ParamTable table_ = table_of(options_.mib);
  const std::unique_ptr<FileSystem> fs_ = posix_file_system();
  const size_t n_ = static_cast<size_t>(table_.num_elements());
  const SharedFloats weights_{n_}, exp_avg_{n_}, exp_avg_sq_{n_};
  std::string path_;
  bench::UnderLoadResult under_load_;
  uint64_t stored_ = 0;
  std::vector<double> commit_s_;  // part of save_
  std::vector<Cost> plain_, stream_, save_, load_;
};

int run(const Options& o) {
  const TempDir dir(o.dir);
  Bench bench(o, dir.path());
  const Status done = bench.run();
  if (!done.ok()) return bench::failed("bench_checkpoint", done.to_string());
  bench::Targets targets(o.smoke);
  bench.judge(targets);
  return targets.report(stderr);
}

}  // namespace
}  // namespace remesh::store

int main(int argc, char** argv) {
  using namespace remesh;  // NOLINT: a program
  store::Options o;
  CLI::App app{
      "Speed of saving and loading a state, beside a plain write.\n"
      "Example: bench_checkpoint --mib 1024 --dir /data"};
  bench::add_number(app, "--mib", o.mib, "Size of the state", 1, 1 << 20);
  bench::add_number(app, "--ranks", o.ranks, "Ranks that save, one shard each",
                    1, 1024);
  bench::add_number(app, "--trials", o.trials, "Trials", 1, 1000);
  bench::add_number(app, "--threads", o.threads,
                    "Threads that train; 0: not measured beside training", 0,
                    1024);
  app.add_option("--compression", o.compression, "none or zlib")
      ->transform(
          CLI::CheckedTransformer(std::map<std::string, store::Compression>{
              {"none", store::Compression::kNone},
              {"zlib", store::Compression::kZlib}}));
  app.add_option("--dir", o.dir, "Folder on the disk to measure")
      ->capture_default_str()
      ->check(CLI::ExistingDirectory);
  app.add_flag("--json", o.json, "One JSON object");
  app.add_flag("--smoke", o.smoke, "Everything tiny; no target is judged");
  CLI11_PARSE(app, argc, argv);
  if (o.smoke) {
    o.mib = 8;
    o.ranks = 2;
    o.trials = 1;
  }
  return store::run(o);
}
