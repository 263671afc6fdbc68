#include "parallel/geometry/layout.h"

#include <fmt/format.h>

#include <set>

#include "proto/base/number.h"

namespace remesh::geometry {
namespace {

constexpr int64_t kMaxWorld = 1 << 20;

}  // namespace

Coord Layout::coord(int rank) const {
  CHECK(rank >= 0 && rank < world());
  Coord c;
  c.tp = rank % tp;
  rank /= tp;
  c.cp = rank % cp;
  rank /= cp;
  c.dp = rank % dp;
  c.pp = rank / dp;
  return c;
}

int Layout::rank(const Coord& c) const {
  CHECK(c.dp >= 0 && c.dp < dp && c.pp >= 0 && c.pp < pp);
  CHECK(c.tp >= 0 && c.tp < tp && c.cp >= 0 && c.cp < cp);
  return ((c.pp * dp + c.dp) * cp + c.cp) * tp + c.tp;
}

std::string Layout::to_string() const {
  std::string out = fmt::format("dp{}", dp);
  if (pp != 1) out += fmt::format(",pp{}", pp);
  if (tp != 1) out += fmt::format(",tp{}", tp);
  if (cp != 1) out += fmt::format(",cp{}", cp);
  return out;
}

Result<Layout> Layout::parse(std::string_view text) {
  const auto fail = [&](const std::string& why) {
    return invalid_argument(fmt::format(
        "layout '{}': {}; write axes dp, pp, tp, cp with degrees 1 to 65536, "
        "like dp2,pp2,tp2",
        text, why));
  };
  Layout layout;
  std::set<std::string_view> seen;
  std::string_view rest = text;
  while (true) {
    const size_t comma = rest.find(',');
    const std::string_view part = rest.substr(0, comma);
    if (part.size() < 3) return fail(fmt::format("'{}' is not an axis", part));
    const std::string_view axis = part.substr(0, 2);
    const int degree = parse_number<int>(part.substr(2)).value_or(0);
    if (degree < 1 || degree > 65536)
      return fail(fmt::format("bad degree in '{}'", part));
    if (!seen.insert(axis).second)
      return fail(fmt::format("axis '{}' occurs twice", axis));
    if (axis == "dp") {
      layout.dp = degree;
    } else if (axis == "pp") {
      layout.pp = degree;
    } else if (axis == "tp") {
      layout.tp = degree;
    } else if (axis == "cp") {
      layout.cp = degree;
    } else {
      return fail(fmt::format("unknown axis '{}'", axis));
    }
    if (comma == std::string_view::npos) break;
    rest.remove_prefix(comma + 1);
  }
  int64_t world = 1;  // the product of all four may exceed 64 bits
  for (const int degree : {layout.dp, layout.pp, layout.tp, layout.cp})
    if ((world *= degree) > kMaxWorld)
      return fail(fmt::format("has more than {} ranks", kMaxWorld));
  return layout;
}

}  // namespace remesh::geometry
