// bench_checkpoint: how fast a state is saved and loaded, beside a plain write
// of as many bytes to the same disk in the same run.
//
//   bench_checkpoint [--mib N] [--ranks N] [--trials N] [--dir DIR] [--json]
//
// The figure is the ratio: 1.0 means that HDF5, chunk checksums, the whole-file
// checksum and the commit cost nothing beside the disk. Trials alternate, so
// that both meet the same neighbours; the median of each is taken.
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/manifest/scan.h"
#include "checkpoint/store/store.h"
#include "proto/base/clock.h"

namespace remesh::store {
namespace {

struct Options {
  int64_t mib = 256;
  int ranks = 1;
  int trials = 3;
  std::string dir = ".";
  bool json = false;
};

Result<Options> parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--json") {
      o.json = true;
      continue;
    }
    const char* value = i + 1 < argc ? argv[++i] : nullptr;
    const int64_t number = value == nullptr ? 0 : std::atoll(value);
    if (flag == "--dir" && value != nullptr)
      o.dir = value;
    else if (flag == "--mib" && number >= 1 && number <= 1 << 20)
      o.mib = number;
    else if (flag == "--ranks" && number >= 1 && number <= 1024)
      o.ranks = static_cast<int>(number);
    else if (flag == "--trials" && number >= 1 && number <= 1000)
      o.trials = static_cast<int>(number);
    else
      return invalid_argument(
          "usage: bench_checkpoint [--mib N] [--ranks N] [--trials N] "
          "[--dir DIR] [--json]; not understood: " +
          flag);
  }
  return o;
}

// A Llama whose state (three fp32 tensors) has about that size.
geometry::ParamTable table_of(int64_t mib) {
  geometry::ModelConfig c{.dim = 512,
                          .n_layers = 1,
                          .n_heads = 8,
                          .n_kv_heads = 8,
                          .hidden_dim = 1376,
                          .vocab_size = 8192,
                          .tie_embeddings = true};
  const int64_t wanted = mib * (1 << 20) / 12;
  const int64_t one = geometry::ParamTable::llama(c).num_elements();
  const int64_t layer = one - c.vocab_size * c.dim - c.dim;
  c.n_layers = std::max<int64_t>(1, 1 + (wanted - one) / layer);
  return geometry::ParamTable::llama(c);
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

struct Cost {
  double wall_s = 0;
  double cpu_s = 0;  // of the process, user and system: what neighbours feel
};

double cpu_seconds() {
  rusage u = {};
  getrusage(RUSAGE_SELF, &u);
  return static_cast<double>(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
         1e-6 * static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

Result<Cost> cost_of(const std::function<Status()>& work) {
  const int64_t begin = monotonic_ns();
  const double cpu = cpu_seconds();
  RETURN_IF_ERROR(work());
  return Cost{.wall_s = static_cast<double>(monotonic_ns() - begin) * 1e-9,
              .cpu_s = cpu_seconds() - cpu};
}

// Medians of wall and CPU time, each by itself, a GB.
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
      : options_(options), dir_(std::move(dir)) {
    const auto n = static_cast<size_t>(table_.num_elements());
    for (auto* tensor : {&weights_, &exp_avg_, &exp_avg_sq_}) {
      tensor->resize(n);
      for (size_t i = 0; i < n; ++i)
        (*tensor)[i] = static_cast<float>(i * 2654435761U % 1000003U);
    }
  }

  Status run() {
    for (int t = 0; t < options_.trials; ++t) {
      ASSIGN_OR_RETURN(const Cost plain,
                       cost_of([&] { return write_plain(); }));
      ASSIGN_OR_RETURN(const Cost save,
                       cost_of([&] { return write_checkpoint(t); }));
      ASSIGN_OR_RETURN(const Cost load, cost_of([&] { return load_all(); }));
      plain_.push_back(plain);
      save_.push_back(save);
      load_.push_back(load);
    }
    report();
    return ok_status();
  }

 private:
  uint64_t bytes() const { return 12U * weights_.size(); }

  Status write_plain() {
    const std::string path = manifest::path_join(dir_, "plain");
    ASSIGN_OR_RETURN(const auto file, fs_->create(path));
    uint64_t at = 0;
    for (const auto* tensor : {&weights_, &exp_avg_, &exp_avg_sq_}) {
      const auto all = std::as_bytes(std::span(*tensor));
      constexpr size_t kBlock = 4 << 20;
      for (size_t i = 0; i < all.size(); i += kBlock) {
        const auto part = all.subspan(i, std::min(kBlock, all.size() - i));
        RETURN_IF_ERROR(file->write_at(at, part));
        at += part.size();
      }
    }
    RETURN_IF_ERROR(file->sync());
    RETURN_IF_ERROR(file->close());
    return fs_->remove(path);
  }

  Status write_checkpoint(int trial) {
    const SaveId id{.step = trial + 1, .generation = 1};
    const FlatState<const float> state{
        .weights = weights_, .exp_avg = exp_avg_, .exp_avg_sq = exp_avg_sq_};
    const int64_t n = table_.num_elements();
    for (int r = 0; r < options_.ranks; ++r)
      RETURN_IF_ERROR(
          write_shard(*fs_, dir_, id, r, table_,
                      pieces_of_range(table_, n * r / options_.ranks,
                                      n * (r + 1) / options_.ranks, state))
              .status());
    pb::Manifest m;
    m.set_step(id.step);
    m.set_generation(id.generation);
    *m.mutable_model() = manifest::model_info(table_.config());
    ASSIGN_OR_RETURN(const Committed done,
                     commit(*fs_, dir_, std::move(m), options_.ranks, table_,
                            {.keep_latest_k = 1}));
    path_ = done.path;
    return done.cleanup;
  }

  Status load_all() {
    ASSIGN_OR_RETURN(const auto m, manifest::read_checkpoint(*fs_, path_));
    const FlatState<float> state{
        .weights = weights_, .exp_avg = exp_avg_, .exp_avg_sq = exp_avg_sq_};
    return load(*fs_, path_, m, table_,
                pieces_of_range(table_, 0, table_.num_elements(), state));
  }

  void report() const {
    const double gb = static_cast<double>(bytes()) * 1e-9;
    const Cost plain = median_per_gb(plain_, gb);
    const Cost save = median_per_gb(save_, gb);
    const Cost load = median_per_gb(load_, gb);
    if (options_.json) {
      fmt::print(
          "{{\"bytes\": {}, \"ranks\": {}, \"plain_gb_per_s\": {:.4f}, "
          "\"save_gb_per_s\": {:.4f}, \"load_gb_per_s\": {:.4f}, "
          "\"save_over_plain\": {:.4f}, \"plain_cpu_s_per_gb\": {:.4f}, "
          "\"save_cpu_s_per_gb\": {:.4f}, \"load_cpu_s_per_gb\": {:.4f}}}\n",
          bytes(), options_.ranks, 1 / plain.wall_s, 1 / save.wall_s,
          1 / load.wall_s, plain.wall_s / save.wall_s, plain.cpu_s, save.cpu_s,
          load.cpu_s);
      return;
    }
    fmt::print("state {:.0f} MiB, {} shards, median of {} trials\n",
               static_cast<double>(bytes()) / (1 << 20), options_.ranks,
               options_.trials);
    const auto line = [](const char* what, const Cost& c, std::string note) {
      fmt::print("{:<18}{:7.3f} GB/s {:7.3f} CPU s/GB  {}\n", what,
                 1 / c.wall_s, c.cpu_s, note);
    };
    line("write + fsync", plain, "");
    line("save, committed", save,
         fmt::format("{:.2f} of the plain write", plain.wall_s / save.wall_s));
    line("load, verified", load, "from the page cache");
  }

  const Options options_;
  const std::string dir_;
  const geometry::ParamTable table_ = table_of(options_.mib);
  const std::unique_ptr<FileSystem> fs_ = manifest::posix_file_system();
  std::vector<float> weights_, exp_avg_, exp_avg_sq_;
  std::string path_;
  std::vector<Cost> plain_, save_, load_;
};

int run_main(int argc, char** argv) {
  const auto options = parse(argc, argv);
  if (!options.ok()) {
    fmt::print(stderr, "{}\n", options.status().message());
    return 2;
  }
  std::string dir = manifest::path_join(options->dir, "bench-ckpt-XXXXXX");
  if (mkdtemp(dir.data()) == nullptr) {
    fmt::print(stderr, "cannot make a directory in {}\n", options->dir);
    return 3;
  }
  const Status done = Bench(*options, dir).run();
  const Status removed =
      manifest::remove_all(*manifest::posix_file_system(), dir);
  for (const Status& s : {done, removed})
    if (!s.ok()) fmt::print(stderr, "{}\n", s.to_string());
  return done.ok() && removed.ok() ? 0 : 3;
}

}  // namespace
}  // namespace remesh::store

int main(int argc, char** argv) { return remesh::store::run_main(argc, argv); }
