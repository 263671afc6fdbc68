// The options of benchmarks: numbers with their limits, and those of benchmarks
// that measure a model, with one name, text and range each.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

#include "parallel/geometry/model_config.h"
#include "tests/testing/llama.h"
#include "worker/kernels/cpu/onednn_gemm.h"

namespace remesh::bench {

// The models that benchmarks measure, by name: the Llama sizes of the stories
// models (karpathy/llama2.c) with a vocabulary of 32,000, and a tiny one.
inline const std::map<std::string, geometry::ModelConfig>& models() {
  static const std::map<std::string, geometry::ModelConfig> kModels = {
      {"tiny", geometry::llama(64, 4, 8, 4, 192, 256)},
      {"15m", geometry::llama(288, 6, 6, 6, 768, 32000)},
      {"42m", geometry::llama(512, 8, 8, 8, 1376, 32000)},
      {"110m", geometry::llama(768, 12, 12, 12, 2048, 32000)}};
  return kModels;
}

// The default of --dtype: "bf16" where the processor has instructions for it,
// else "fp32".
inline const char* default_dtype() {
  return kernels::bf16_hardware() == kernels::Bf16Hardware::kNone ? "fp32"
                                                                  : "bf16";
}

inline kernels::Dtype dtype_of(const std::string& name) {
  return name == "bf16" ? kernels::Dtype::kBf16 : kernels::Dtype::kFp32;
}

// The help shows the default and the limits.
template <typename T, typename Limit>
CLI::Option* add_number(CLI::App& app, const std::string& name, T& value,
                        const std::string& text, Limit least, Limit most) {
  return app.add_option(name, value, text)
      ->capture_default_str()
      ->check(CLI::Range(least, most));
}

// What a benchmark trains, and on which microbatches.
struct ModelOptions {
  std::string size = "42m";
  int64_t batch = 8;
  int64_t seq = 256;
  std::string dtype = default_dtype();
  bool smoke = false;

  // Of --smoke.
  void make_tiny(int64_t sequences) {
    size = "tiny";
    batch = sequences;
    seq = 32;
  }
};

inline void add_model_options(CLI::App& app, ModelOptions& o) {
  app.add_option("--size", o.size, "Model")
      ->capture_default_str()
      ->check(CLI::IsMember(models()));
  add_number(app, "--batch", o.batch, "Sequences per microbatch", 1, 65536);
  add_number(app, "--seq", o.seq, "Tokens per sequence", 1, 1 << 20);
  app.add_option("--dtype", o.dtype, "Type of the GEMMs")
      ->capture_default_str()
      ->check(CLI::IsMember({"bf16", "fp32"}));
  app.add_flag("--smoke", o.smoke, "Everything tiny; no target is judged");
}

// The arguments that give these options to ranks, and then others.
inline std::vector<std::string> model_arguments(const ModelOptions& o,
                                                std::vector<std::string> more) {
  more.insert(more.begin(),
              {"--size", o.size, "--batch", std::to_string(o.batch), "--seq",
               std::to_string(o.seq), "--dtype", o.dtype});
  return more;
}

// How the ranks of --layout share the work.
struct ScheduleOptions {
  std::string layout;
  int zero = 0;
  std::string schedule = "1f1b";
  int chunks = 1;
  int64_t microbatches = 8;
};

inline void add_schedule_options(CLI::App& app, ScheduleOptions& o) {
  add_number(app, "--zero", o.zero, "ZeRO stage of --layout", 0, 3);
  app.add_option("--schedule", o.schedule,
                 "Schedule of --layout: gpipe, 1f1b, interleaved or zb-h1");
  add_number(app, "--chunks", o.chunks, "Model chunks per rank of --layout", 1,
             64);
  add_number(app, "--microbatches", o.microbatches, "Microbatches per step", 1,
             4096);
}

}  // namespace remesh::bench
