// The options of benchmarks that measure a model: one name, text and range
// each.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "bench/models.h"

namespace remesh::bench {

// Options has size, batch, seq, dtype and smoke.
template <typename Options>
void add_model_options(CLI::App& app, Options& o) {
  std::vector<std::string> names;
  for (const auto& [name, config] : models()) names.push_back(name);
  app.add_option("--size", o.size, "Model")
      ->capture_default_str()
      ->check(CLI::IsMember(names));
  app.add_option("--batch", o.batch, "Sequences per microbatch")
      ->capture_default_str()
      ->check(CLI::Range(1, 65536));
  app.add_option("--seq", o.seq, "Tokens per sequence")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--dtype", o.dtype, "Type of the GEMMs")
      ->capture_default_str()
      ->check(CLI::IsMember({"bf16", "fp32"}));
  app.add_flag("--smoke", o.smoke, "Everything tiny; no target is judged");
}

// Options has layout, zero, schedule and chunks.
template <typename Options>
void add_schedule_options(CLI::App& app, Options& o) {
  app.add_option("--zero", o.zero, "ZeRO stage of --layout")
      ->check(CLI::Range(0, 3));
  app.add_option("--schedule", o.schedule,
                 "Schedule of --layout: gpipe, 1f1b, interleaved or zb-h1");
  app.add_option("--chunks", o.chunks, "Model chunks per rank of --layout")
      ->check(CLI::Range(1, 64));
  app.add_option("--microbatches", o.microbatches, "Microbatches per step")
      ->capture_default_str()
      ->check(CLI::Range(1, 4096));
}

}  // namespace remesh::bench
