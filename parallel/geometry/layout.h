// Layout: the degrees of a mesh as one small value, and the bijection between
// ranks and mesh coordinates. Pure; no communication.
//
// Axes, fastest-varying first: tp, cp, dp, pp, as in Megatron-LM (Narayanan et
// al., SC'21). So tensor-parallel peers, which communicate most, are
// neighbours, and pipeline stages, which communicate least, are farthest apart.
//
//   rank = ((pp_i * dp + dp_i) * cp + cp_i) * tp + tp_i
#pragma once

#include <string>
#include <string_view>

#include "proto/base/status.h"

namespace remesh::geometry {

struct Coord {
  int dp = 0, pp = 0, tp = 0, cp = 0;
  friend bool operator==(const Coord&, const Coord&) = default;
};

struct Layout {
  int dp = 1, pp = 1, tp = 1, cp = 1;

  friend bool operator==(const Layout&, const Layout&) = default;

  // Number of ranks.
  int world() const { return dp * pp * tp * cp; }
  // REQUIRES: 0 <= rank < world().
  Coord coord(int rank) const;
  // REQUIRES: every coordinate inside its degree.
  int rank(const Coord& c) const;
  // "dp2", "dp1,pp2,tp4": dp, and each other degree that is not 1.
  std::string to_string() const;

  // Reads "dp2,pp2,tp2", "dp2", "tp4,cp2"; omitted degrees are 1. Fails on an
  // unknown axis, a repeated one, or a degree outside 1..65536.
  static Result<Layout> parse(std::string_view text);
};

}  // namespace remesh::geometry
