// bench_import: which memory does a rank need to take its part of a large model
// of Hugging Face's files?
//
// The file is sparse: it takes no room on the disk, and its elements are zeros.
// Each rank is a process of its own that loads its weights as a trainer does
// with model.init_from, and reads its own memory from /proc. One follows the
// other, so that the machine needs the memory of one.
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "bench/options.h"
#include "bench/process_use.h"
#include "bench/targets.h"
#include "checkpoint/huggingface/config.h"
#include "checkpoint/huggingface/file_tensors.h"
#include "checkpoint/huggingface/model_folder.h"
#include "parallel/geometry/sharding.h"
#include "proto/base/clock.h"
#include "tests/testing/llama.h"
#include "tests/testing/temp_dir.h"
#include "worker/train/restore.h"

namespace remesh::bench {
namespace {

constexpr int kRanks = 8;
constexpr double kMostGb = 2;
constexpr double kGb = 1e9;

struct Options {
  std::string folder = "/tmp";
  bool smoke = false;
};

// That of Llama 3.2 3B: 12.9 GB in fp32.
geometry::ModelConfig model_of(const Options& o) {
  return o.smoke ? geometry::llama(64, 4, 8, 8, 192, 256)
                 : geometry::llama(3072, 28, 24, 8, 8192, 128256, true);
}

struct Mesh {
  const char* name;
  geometry::Layout layout;
  int zero;
};
constexpr Mesh kMeshes[] = {{"dp8, ZeRO 3", {.dp = kRanks}, 3},
                            {"tp8", {.tp = kRanks}, 0}};

// The size of the weights.
Result<uint64_t> write_model(const geometry::ParamTable& table,
                             const std::string& folder) {
  std::vector<huggingface::TensorShape> shapes;
  for (const huggingface::FileTensor& t : huggingface::file_tensors(table))
    shapes.push_back(t.tensor);
  constexpr auto kType = huggingface::Dtype::kFp32;
  const std::string header = huggingface::safetensors_header(shapes, kType);
  const uint64_t bytes = static_cast<uint64_t>(table.num_elements()) *
                         huggingface::dtype_size(kType);
  const std::string path = folder + "/" + huggingface::kWeightsName;
  std::ofstream(path, std::ios::binary) << header;
  std::error_code error;
  std::filesystem::resize_file(path, header.size() + bytes, error);
  if (error) return io_error(path + ": " + error.message());
  std::ofstream(folder + "/" + huggingface::kConfigName)
      << huggingface::config_json({.model = table.config()}, kType);
  return bytes;
}

struct Loaded {
  bool right = false;
  uint64_t weights = 0;   // that it keeps
  uint64_t of_files = 0;  // the most that was mapped and resident at a time
  uint64_t peak = 0;      // resident: private, files and shared memory
  double seconds = 0;
  std::array<char, 200> error{};
};

Status load(const geometry::ParamTable& table, const Mesh& mesh, int rank,
            const std::string& folder, Loaded* out) {
  geometry::Sharding sharding{.layout = mesh.layout,
                              .zero = {.stage = mesh.zero}};
  ASSIGN_OR_RETURN(sharding.bounds,
                   geometry::stage_bounds(table.config(), 1, 1024));
  ASSIGN_OR_RETURN(const auto shard,
                   geometry::make_rank_shard(table, sharding, rank));
  std::vector<float> weights(static_cast<size_t>(shard.zero.state_elements()),
                             1.0F);
  out->weights = weights.size() * sizeof(float);
  const int64_t began = monotonic_ns();
  const auto fs = posix_file_system();
  RETURN_IF_ERROR(train::load_initial_weights(
      *fs, folder, shard,
      [&] { out->of_files = std::max(out->of_files, status_bytes("RssFile")); },
      weights));
  out->seconds = seconds_since(began);
  out->peak = status_bytes("VmHWM");
  out->right = std::all_of(weights.begin(), weights.end(),
                           [](float x) { return x == 0; });
  return ok_status();
}

// In a process of its own.
Result<Loaded> load_apart(const geometry::ParamTable& table, const Mesh& mesh,
                          int rank, const std::string& folder) {
  constexpr auto kSize = static_cast<ssize_t>(sizeof(Loaded));  // < PIPE_BUF
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) return errno_error("pipe", errno);
  const pid_t child = ::fork();
  if (child < 0) return errno_error("fork", errno);
  if (child == 0) {
    Loaded done;
    const Status s = load(table, mesh, rank, folder, &done);
    if (!s.ok()) s.message().copy(done.error.data(), done.error.size() - 1);
    const bool told = ::write(ends[1], &done, sizeof done) == kSize;
    ::_exit(told ? 0 : 1);
  }
  ::close(ends[1]);
  Loaded done;
  const bool heard = ::read(ends[0], &done, sizeof done) == kSize;
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  if (!heard) return internal(fmt::format("rank {} did not end", rank));
  if (done.error[0] != 0) return internal(done.error.data());
  return done;
}

Result<int> run(const Options& o) {
  const TempDir dir(o.folder);
  const auto table = geometry::ParamTable::make(model_of(o));
  ASSIGN_OR_RETURN(const uint64_t bytes, write_model(table, dir.path()));
  fmt::print(
      "{:.2f} GB in {}, {} ranks; GB of the rank that needs most\n"
      "{:<14} {:>8} {:>8} {:>8} {:>8} {:>8}\n",
      static_cast<double>(bytes) / kGb, dir.path(), kRanks, "mesh", "weights",
      "of files", "peak", "of limit", "seconds");
  Targets targets(o.smoke);
  for (const Mesh& mesh : kMeshes) {
    Loaded worst{.right = true};
    for (int rank = 0; rank < kRanks; ++rank) {
      ASSIGN_OR_RETURN(const Loaded one,
                       load_apart(table, mesh, rank, dir.path()));
      worst.right = worst.right && one.right;
      worst.weights = std::max(worst.weights, one.weights);
      worst.of_files = std::max(worst.of_files, one.of_files);
      worst.peak = std::max(worst.peak, one.peak);
      worst.seconds = std::max(worst.seconds, one.seconds);
    }
    const double peak = static_cast<double>(worst.peak) / kGb;
    fmt::print("{:<14} {:>8.3f} {:>8.3f} {:>8.3f} {:>8.3f} {:>8.1f}\n",
               mesh.name, static_cast<double>(worst.weights) / kGb,
               static_cast<double>(worst.of_files) / kGb, peak, peak / kMostGb,
               worst.seconds);
    std::fflush(stdout);
    targets.require(fmt::format("{}: every weight is the file's", mesh.name),
                    worst.right);
    targets.at_most(fmt::format("GB that a rank needs at most, {}", mesh.name),
                    kMostGb, peak);
  }
  return targets.report();
}

int main(int argc, char** argv) {
  CLI::App app("Which memory does a rank need to load a large model?");
  Options o;
  app.add_option("--folder", o.folder,
                 "Where the sparse file is made, on a disk, not a tmpfs")
      ->capture_default_str()
      ->check(CLI::ExistingDirectory);
  app.add_flag("--smoke", o.smoke, "A tiny model; no target is judged");
  CLI11_PARSE(app, argc, argv);
  const auto code = run(o);
  if (code.ok()) return *code;
  return failed("bench_import", code.status().to_string());
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) { return remesh::bench::main(argc, argv); }
