#include "parallel/geometry/lora.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "proto/base/text.h"

namespace remesh::geometry {
namespace {

constexpr int64_t kMaxRank = 65536;

// The parts of "model.layers.0.self_attn.q_proj.weight": all but ".weight", and
// "q_proj".
struct MatrixName {
  std::string path, last;
};
MatrixName matrix_name(const std::string& name) {
  constexpr std::string_view kEnd = ".weight";
  if (!name.ends_with(kEnd)) return {};
  MatrixName out{.path = name.substr(0, name.size() - kEnd.size()), .last = {}};
  out.last = out.path.substr(out.path.rfind('.') + 1);
  return out;
}

}  // namespace

const std::vector<std::string>& lora_targets() {
  static const std::vector<std::string> kTargets = {
      "q_proj",    "k_proj",  "v_proj",   "o_proj",
      "gate_proj", "up_proj", "down_proj"};
  return kTargets;
}

Status validate_lora(const Lora& lora) {
  if (lora == Lora{}) return ok_status();
  if (lora.rank < 1 || lora.rank > kMaxRank)
    return invalid_argument(fmt::format("lora.rank = {}: must be from 1 to {}",
                                        lora.rank, kMaxRank));
  if (!(lora.alpha > 0) || !std::isfinite(lora.alpha))
    return invalid_argument(
        fmt::format("lora.alpha = {}: must be above 0", lora.alpha));
  const auto& known = lora_targets();
  auto next = known.begin();
  for (const std::string& target : lora.targets) {
    const auto at = std::find(next, known.end(), target);
    if (at == known.end())
      return invalid_argument(fmt::format(
          "lora.targets: '{}': must be of {}, each once and in this order",
          target, join(known)));
    next = at + 1;
  }
  if (lora.targets.empty())
    return invalid_argument("lora.targets: must be at least one of " +
                            join(known));
  return ok_status();
}

bool has_adapter(const ParamSpec& matrix, const Lora& lora) {
  return matrix.layer >= 0 &&
         std::ranges::find(lora.targets, matrix_name(matrix.name).last) !=
             lora.targets.end();
}

std::vector<ParamSpec> lora_parameters(const std::vector<ParamSpec>& base,
                                       const Lora& lora) {
  std::vector<ParamSpec> out;
  for (const ParamSpec& w : base) {
    if (!has_adapter(w, lora)) continue;
    const std::string path = matrix_name(w.name).path;
    ParamSpec a = w, b = w;
    a.name = path + ".lora_A.weight";
    b.name = path + ".lora_B.weight";
    a.shape = {lora.rank, w.shape[1]};
    b.shape = {w.shape[0], lora.rank};
    a.init_std = 1 / std::sqrt(3.0 * static_cast<double>(w.shape[1]));
    b.init = Init::kZeros;
    ParamSpec& whole = w.split == TensorSplit::kRows ? a : b;
    whole.split = TensorSplit::kNone;
    whole.split_unit = 1;
    out.push_back(std::move(a));
    out.push_back(std::move(b));
  }
  return out;
}

}  // namespace remesh::geometry
