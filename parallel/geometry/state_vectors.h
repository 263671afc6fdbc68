// StateVectors: views of the three fp32 vectors of a rank's training state,
// wherever they live: master weights and AdamW's two moments.
#pragma once

#include <cstddef>
#include <span>
#include <type_traits>

namespace remesh::geometry {

inline constexpr size_t kNumStateVectors = 3;

// A T of const float reads. The vectors are equally long, with the elements in
// the order of ZeroPlan::state_offset.
template <typename T>
struct StateVectors {
  std::span<T> weights, exp_avg, exp_avg_sq;

  std::span<T> operator[](size_t i) const {
    return i == 0 ? weights : i == 1 ? exp_avg : exp_avg_sq;
  }
  operator StateVectors<const T>() const requires(!std::is_const_v<T>) {
    return {weights, exp_avg, exp_avg_sq};
  }
};
using StateView = StateVectors<float>;
using ConstStateView = StateVectors<const float>;

}  // namespace remesh::geometry
