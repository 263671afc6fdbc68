#include "worker/model/llama/rope.h"

#include <cmath>
#include <numbers>

namespace remesh::model {
namespace {

// Long wavelengths are stretched by `factor`, short ones kept, those between
// blended: "rope_type": "llama3" of Hugging Face's modeling_rope_utils.
double scale_frequency(const geometry::RopeScaling& s, double frequency) {
  const double wavelength = 2.0 * std::numbers::pi / frequency;
  const auto original = static_cast<double>(s.original_max_position);
  if (wavelength > original / s.low_freq_factor) return frequency / s.factor;
  if (wavelength < original / s.high_freq_factor) return frequency;
  const double smooth = (original / wavelength - s.low_freq_factor) /
                        (s.high_freq_factor - s.low_freq_factor);
  return (1.0 - smooth) * frequency / s.factor + smooth * frequency;
}

}  // namespace

std::vector<double> rope_frequencies(const geometry::ModelConfig& config) {
  const int64_t head_dim = config.head_dim();
  std::vector<double> frequencies;
  for (int64_t j = 0; j < head_dim; j += 2) {
    const double f =
        1.0 / std::pow(config.rope_theta,
                       static_cast<double>(j) / static_cast<double>(head_dim));
    frequencies.push_back(
        config.rope_scaled ? scale_frequency(config.rope_scaling, f) : f);
  }
  return frequencies;
}

RopeTables make_rope_tables(const geometry::ModelConfig& config, int64_t T) {
  const std::vector<double> frequencies = rope_frequencies(config);
  RopeTables tables;
  for (int64_t t = 0; t < T; ++t)
    for (const double f : frequencies) {
      const double angle = static_cast<double>(t) * f;
      tables.cos.push_back(static_cast<float>(std::cos(angle)));
      tables.sin.push_back(static_cast<float>(std::sin(angle)));
    }
  return tables;
}

}  // namespace remesh::model
