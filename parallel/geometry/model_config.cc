#include "parallel/geometry/model_config.h"

#include <fmt/format.h>

#include "parallel/geometry/family.h"
#include "parallel/geometry/lora.h"

namespace remesh::geometry {

Status ModelConfig::validate() const {
  if (find_family(arch) == nullptr)
    return invalid_argument(fmt::format(
        "model.arch = \"{}\": must be one of {}", arch, family_names()));
  // The bounds of a job file: a table of parameters is made from these.
  const struct {
    const char* name;
    int64_t value, most;
  } sizes[] = {{"dim", dim, 65536},
               {"n_layers", n_layers, 1024},
               {"n_heads", n_heads, 1024},
               {"n_kv_heads", n_kv_heads, 1024},
               {"hidden_dim", hidden_dim, 1048576},
               {"vocab_size", vocab_size, int64_t{1} << 31}};
  for (const auto& s : sizes)
    if (s.value < 1 || s.value > s.most)
      return invalid_argument(fmt::format("model.{} = {}: must be from 1 to {}",
                                          s.name, s.value, s.most));
  if (head_size == 0 && dim % n_heads != 0)
    return invalid_argument(fmt::format(
        "model.n_heads = {}: must divide model.dim = {}", n_heads, dim));
  if (head_size < 0 || head_size > 4096 || head_dim() % 2 != 0)
    return invalid_argument(fmt::format(
        "{} = {}: rotary embedding needs an even head size, at most 4096",
        head_size == 0 ? "model.dim / model.n_heads" : "model.head_dim",
        head_dim()));
  if (n_heads % n_kv_heads != 0)
    return invalid_argument(
        fmt::format("model.n_kv_heads = {}: must divide model.n_heads = {}",
                    n_kv_heads, n_heads));
  if (sliding_window < 0 || (sliding_window > 0 && !has_window(arch)))
    return invalid_argument(fmt::format(
        "model.sliding_window = {}: must be 0 where model.arch is \"{}\"; only "
        "\"mistral\" and \"phi3\" have a window",
        sliding_window, arch));
  if (!(norm_eps >= 1e-30) || !(norm_eps < 1))  // is not 0 in fp32
    return invalid_argument(
        fmt::format("model.norm_eps = {}: must be in [1e-30, 1)", norm_eps));
  if (!(rope_theta > 1))
    return invalid_argument(
        fmt::format("model.rope_theta = {}: must be above 1", rope_theta));
  if (rope_scaled &&
      (!(rope_scaling.factor >= 1) || !(rope_scaling.low_freq_factor > 0) ||
       !(rope_scaling.high_freq_factor > rope_scaling.low_freq_factor) ||
       rope_scaling.original_max_position < 1))
    return invalid_argument(
        "model.rope_scaling: needs factor >= 1, 0 < low_freq_factor < "
        "high_freq_factor, original_max_position >= 1");
  return validate_lora(lora);
}

}  // namespace remesh::geometry
