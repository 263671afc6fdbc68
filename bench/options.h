// The options of benchmarks: numbers with their limits, and those of benchmarks
// that measure a model, with one name, text and range each.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "bench/models.h"

namespace remesh::bench {

// The help shows the default and the limits.
template <typename T, typename Limit>
CLI::Option* add_number(CLI::App& app, const std::string& name, T& value,
                        const std::string& text, Limit least, Limit most) {
  return app.add_option(name, value, text)
      ->capture_default_str()
      ->check(CLI::Range(least, most));
}

// Options has size, batch, seq, dtype and smoke.
template <typename Options>
void add_model_options(CLI::App& app, Options& o) {
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
template <typename Options>
std::vector<std::string> model_arguments(const Options& o,
                                         std::vector<std::string> more) {
  more.insert(more.begin(),
              {"--size", o.size, "--batch", std::to_string(o.batch), "--seq",
               std::to_string(o.seq), "--dtype", o.dtype});
  return more;
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
  add_number(app, "--microbatches", o.microbatches, "Microbatches per step", 1,
             4096);
}

}  // namespace remesh::bench
