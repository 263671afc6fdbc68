// bench_data: does training wait for data that are not in memory?
//
// Each round trains twice on the same sequences: once with the data set in the
// page cache, and once after it was dropped from there, so that each sequence
// comes from the disk. The sequences of a step are far from each other in the
// data set, as in training.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "bench/options.h"
#include "bench/targets.h"
#include "proto/base/clock.h"
#include "proto/base/descriptor.h"
#include "proto/base/mapped_file.h"
#include "proto/base/median.h"
#include "proto/base/xxh3.h"
#include "tests/testing/engine.h"
#include "tests/testing/local_comm.h"
#include "tests/testing/temp_dir.h"
#include "worker/data/prepare.h"
#include "worker/tokenizer/tokenizer.h"
#include "worker/train/batch_source.h"

namespace remesh::bench {
namespace {

constexpr double kColdOverWarm = 1.02;
constexpr double kStillThere = 0.01;  // of a data set that was dropped
constexpr size_t kMiB = size_t{1} << 20;

struct Options : ModelOptions {
  Options() { size = "15m"; }
  int threads = 2;
  int steps = 10;
  int rounds = 7;
  int mib = 64;
  std::string folder = "/tmp";
};

// The files of a data set of random letters.
class Files {
 public:
  static Result<Files> make(const std::string& folder, int mib) {
    const std::string text = folder + "/text.txt";
    std::ofstream out(text, std::ios::binary);
    std::string block(kMiB, '\n');
    uint64_t x = 1;
    for (int i = 0; i < mib; ++i) {
      for (size_t at = 0; at < block.size(); ++at) {
        x = x * 6364136223846793005ULL + 1442695040888963407ULL;
        if (at % 80 != 79) block[at] = static_cast<char>('a' + (x >> 33) % 26);
      }
      out << block;
    }
    out.close();
    if (!out) return io_error(text + ": cannot be written");
    const auto fs = posix_file_system();
    Files files(folder + "/set");
    RETURN_IF_ERROR(
        data::prepare(
            {.inputs = {text}, .out_dir = files.folder_, .val_fraction = 0},
            *fs)
            .status());
    std::filesystem::remove(text);
    for (const auto& e : std::filesystem::directory_iterator(files.folder_))
      files.paths_.push_back(e.path().string());
    return files;
  }
  const std::string& folder() const { return folder_; }

  Status read() const {
    std::vector<char> block(kMiB);
    for (const std::string& path : paths_) {
      std::ifstream in(path, std::ios::binary);
      while (in.read(block.data(), static_cast<std::streamsize>(kMiB))) {
      }
      if (!in.eof()) return io_error(path + ": cannot be read");
    }
    return ok_status();
  }
  // REQUIRES: nobody maps them.
  Status drop() const {
    for (const std::string& path : paths_) {
      const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
      if (fd.get() < 0 || ::fsync(fd.get()) != 0 ||
          ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED) != 0)
        return io_error(path + ": cannot be dropped from the page cache");
    }
    return ok_status();
  }
  // The share of them that is in the page cache.
  Result<double> in_memory() const {
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    size_t pages = 0, there = 0;
    for (const std::string& path : paths_) {
      ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
      std::vector<unsigned char> each((file.bytes().size() + page - 1) / page);
      if (::mincore(const_cast<std::byte*>(file.bytes().data()),
                    file.bytes().size(), each.data()) != 0)
        return io_error(path + ": mincore");
      pages += each.size();
      there += static_cast<size_t>(std::count_if(
          each.begin(), each.end(), [](unsigned char c) { return c & 1; }));
    }
    return static_cast<double>(there) / static_cast<double>(pages);
  }

 private:
  explicit Files(std::string folder) : folder_(std::move(folder)) {}
  std::string folder_;
  std::vector<std::string> paths_;
};

struct Trained {
  double in_memory = 0;  // share of the data set before
  double read_s = 0;     // the first step's sequences, which nothing read ahead
  double step_s = 0;     // the median of the other steps
  uint64_t sequences = 0;  // hash
};

Result<Trained> train_from(const Options& o, const Files& files, bool cold,
                           int64_t first, engine::Engine& engine) {
  Trained t;
  RETURN_IF_ERROR(cold ? files.drop() : files.read());
  ASSIGN_OR_RETURN(t.in_memory, files.in_memory());
  ASSIGN_OR_RETURN(data::Dataset set, data::Dataset::open(files.folder()));
  ASSIGN_OR_RETURN(
      train::BatchSource source,
      train::BatchSource::make(
          std::move(set),
          {.seq_len = o.seq, .global_batch = o.batch, .local_batch = o.batch}));
  std::vector<double> steps;
  for (int64_t step = first; step <= first + o.steps; ++step) {
    const int64_t began = monotonic_ns();
    ASSIGN_OR_RETURN(const auto batch, source.step(step));
    if (step == first) t.read_s = seconds_since(began);
    RETURN_IF_ERROR(engine
                        .run({.lr = 1e-4,
                              .microbatches = batch,
                              .global_tokens = o.batch * o.seq})
                        .status());
    if (step != first) steps.push_back(seconds_since(began));
    for (const model::MicroBatch& m : batch)
      t.sequences =
          xxh3(m.tokens_BT, static_cast<size_t>(m.B * m.T) * sizeof(int32_t),
               t.sequences);
  }
  t.step_s = median(steps);
  return t;
}

struct Measured {
  std::vector<Trained> cold, warm;  // by round
};

Result<Measured> measure(const Options& o, const Files& files) {
  geometry::ModelConfig model = models().at(o.size);
  model.vocab_size =
      std::max<int64_t>(model.vocab_size, tokenizer::kByteEndOfText + 1);
  const auto table = geometry::ParamTable::make(model);
  const auto backend = kernels::make_cpu_backend(o.threads);
  const auto world = comm::make_local_comms(1);
  ASSIGN_OR_RETURN(const auto mesh, comm::Mesh::make(*world[0], {}));
  ASSIGN_OR_RETURN(
      const auto engine,
      engine::make_ready_engine(
          table, *mesh,
          {.dtype = dtype_of(o.dtype), .max_batch = o.batch, .max_seq = o.seq},
          *backend, /*seed=*/0));
  Measured m;
  for (int round = 0; round < o.rounds; ++round)
    for (const bool cold : {round % 2 == 0, round % 2 != 0}) {
      ASSIGN_OR_RETURN(
          Trained t,
          train_from(o, files, cold, int64_t{round} * (o.steps + 1), *engine));
      (cold ? m.cold : m.warm).push_back(t);
    }
  return m;
}

// A quantile over the rounds.
double over(const std::vector<Trained>& rounds, double Trained::*figure,
            double quantile = 0.5) {
  std::vector<double> v;
  for (const Trained& t : rounds) v.push_back(t.*figure);
  return median(std::move(v), quantile);
}

Result<int> run(const Options& o) {
  const TempDir dir(o.folder);
  ASSIGN_OR_RETURN(const Files files, Files::make(dir.path(), o.mib));
  ASSIGN_OR_RETURN(const Measured m, measure(o, files));
  std::vector<double> ratios;
  bool same = true;
  for (size_t i = 0; i < m.cold.size(); ++i) {
    ratios.push_back(m.cold[i].step_s / m.warm[i].step_s);
    same = same && m.cold[i].sequences == m.warm[i].sequences;
  }
  const double left = over(m.cold, &Trained::in_memory, 1);
  if (left > kStillThere && !o.smoke)
    return failed("bench_data",
                  fmt::format("{:.0f} % of the data set stay in memory: "
                              "--folder {} must be on a disk",
                              100 * left, o.folder));
  constexpr double kMs = 1e3;
  fmt::print(
      "{}, {} threads, {} steps of {} x {} tokens in each of {} rounds\n"
      "{:<28} {:>9} {:>9}\n",
      o.size, o.threads, o.steps, o.batch, o.seq, o.rounds, "", "cold", "warm");
  const auto row = [&](const char* what, double Trained::*figure,
                       double factor) {
    fmt::print("{:<28} {:>9.2f} {:>9.2f}\n", what,
               factor * over(m.cold, figure), factor * over(m.warm, figure));
  };
  row("% of the data in memory", &Trained::in_memory, 100);
  row("ms to read a step's data", &Trained::read_s, kMs);
  row("ms per step", &Trained::step_s, kMs);
  fmt::print("ratio {:.4f}, quartiles {:.4f} to {:.4f}\n", median(ratios),
             median(ratios, 0.25), median(ratios, 0.75));
  Targets targets(o.smoke);
  targets.require("the sequences are the same, wherever they come from", same);
  targets.at_most("a step with data from the disk over one from memory",
                  kColdOverWarm, median(ratios));
  return targets.report();
}

int main(int argc, char** argv) {
  CLI::App app(
      "Does training wait for data that are not in memory?\n\nExample:\n  "
      "bench_data --size 15m --folder /var/tmp\n");
  Options o;
  add_model_options(app, o);
  add_number(app, "--threads", o.threads, "CPU threads", 1, 1024);
  add_number(app, "--steps", o.steps,
             "Steps that count, twice in each round, after one that does not",
             1, 1 << 20);
  add_number(app, "--rounds", o.rounds, "Rounds", 1, 1000);
  add_number(app, "--mib", o.mib, "Tokens of the data set, in 2^20", 1,
             1 << 20);
  app.add_option("--folder", o.folder, "Where the data set is made, on a disk")
      ->capture_default_str()
      ->check(CLI::ExistingDirectory);
  CLI11_PARSE(app, argc, argv);
  if (o.smoke) {
    o.make_tiny(2);
    o.steps = 2;
    o.rounds = 2;
    o.mib = 1;
  }
  const auto code = run(o);
  if (code.ok()) return *code;
  return failed("bench_data", code.status().to_string());
}

}  // namespace
}  // namespace remesh::bench

int main(int argc, char** argv) { return remesh::bench::main(argc, argv); }
