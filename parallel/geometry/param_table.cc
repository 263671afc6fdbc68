#include "parallel/geometry/param_table.h"

#include <functional>
#include <numeric>

#include "parallel/geometry/family.h"
#include "parallel/geometry/lora.h"

namespace remesh::geometry {

int64_t ParamSpec::numel() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1},
                         std::multiplies<>());
}

ParamTable ParamTable::make(const ModelConfig& config) {
  CHECK(config.validate().ok());
  ParamTable t;
  t.config_ = config;
  t.specs_ = find_family(config.arch)->parameters(config);
  if (config.lora.rank > 0) t.specs_ = lora_parameters(t.specs_, config.lora);
  t.offsets_.push_back(0);
  for (const ParamSpec& s : t.specs_)
    t.offsets_.push_back(t.offsets_.back() + s.numel());
  return t;
}

int ParamTable::find(Role role, int64_t layer) const {
  for (size_t i = 0; i < specs_.size(); ++i)
    if (specs_[i].role == role && specs_[i].layer == layer)
      return static_cast<int>(i);
  return -1;
}

int ParamTable::find(const std::string& name) const {
  for (size_t i = 0; i < specs_.size(); ++i)
    if (specs_[i].name == name) return static_cast<int>(i);
  return -1;
}

}  // namespace remesh::geometry
