// Commands of remesh-sample. They store the exit code of the process in *code
// and print errors on stderr.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "proto/base/machine.h"
#include "worker/kernels/backend.h"
#include "worker/sample/model_files.h"

namespace remesh::sample {

void add_sample_command(CLI::App& app, int* code);
void add_eval_command(CLI::App& app, int* code);

// With what a command computes.
struct Compute {
  std::string dtype = "auto";
  int threads = 0;  // 0: one for each core
};

inline void add_model_options(CLI::App& app, ModelChoice* o) {
  o->path = "runs/latest";
  app.add_option("MODEL", o->path,
                 "Run directory, checkpoint, Hugging Face folder, or .bin file "
                 "of llama2.c")
      ->capture_default_str();
  app.add_option("--step", o->step, "Checkpoint of a run. Default: the newest")
      ->check(CLI::Range(int64_t{0}, INT64_MAX));
  app.add_option(
      "--tokenizer", o->tokenizer,
      std::string("Default: the model's own. ") + tokenizer::kTokenizerHelp);
}

inline void add_compute_options(CLI::App& app, Compute* o) {
  app.add_option("--dtype", o->dtype,
                 "fp32 or bf16; auto: bf16 if the processor has it")
      ->check(CLI::IsMember({"auto", "fp32", "bf16"}))
      ->capture_default_str();
  app.add_option("--threads", o->threads, "Default: one for each core")
      ->check(CLI::Range(1, 1024));
}

inline std::unique_ptr<kernels::Backend> backend_of(const Compute& o) {
  return kernels::make_cpu_backend(o.threads > 0 ? o.threads : usable_cores());
}

inline kernels::Dtype dtype_of(const Compute& o,
                               const kernels::Backend& backend) {
  return o.dtype == "fp32" || (o.dtype == "auto" && !backend.supports_bf16())
             ? kernels::Dtype::kFp32
             : kernels::Dtype::kBf16;
}

}  // namespace remesh::sample
