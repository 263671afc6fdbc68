#include "parallel/jobfile/param_groups.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>

#include "proto/base/number.h"

namespace remesh::jobfile {
namespace {

// A number that is at least 0.
bool parse_factor(std::string_view text, double* out) {
  *out = parse_number<double>(text).value_or(-1);
  return *out >= 0 && *out <= 1e6;
}

}  // namespace

Result<ParamGroup> parse_param_group(std::string_view text) {
  const auto wrong = [&](std::string_view what) {
    return invalid_argument(fmt::format(
        "\"{}\": {}; must be like \"PATTERN lr=0.1 weight_decay=0\" or "
        "\"PATTERN frozen\"",
        text, what));
  };
  ParamGroup out;
  size_t words = 0;
  for (size_t at = 0; at < text.size(); ++words) {
    at = text.find_first_not_of(' ', at);
    if (at == std::string_view::npos) break;
    const size_t end = std::min(text.find(' ', at), text.size());
    const std::string_view word = text.substr(at, end - at);
    at = end;
    double number = 0;
    if (words == 0) {
      out.pattern = word;
    } else if (word == "frozen") {
      out.frozen = true;
    } else if (word.starts_with("lr=") &&
               parse_factor(word.substr(3), &number)) {
      out.lr = number;
    } else if (word.starts_with("weight_decay=") &&
               parse_factor(word.substr(13), &number)) {
      out.weight_decay = number;
    } else {
      return wrong(fmt::format("'{}' is no setting", word));
    }
  }
  if (words < 2) return wrong("has no setting");
  if (out.frozen && words > 2) return wrong("is frozen, and has more");
  return out;
}

std::vector<const ParamGroup*> groups_of(
    const geometry::ParamTable& table, const std::vector<ParamGroup>& groups) {
  std::vector<const ParamGroup*> out(table.size());
  for (size_t i = 0; i < table.size(); ++i) {
    const auto group = std::ranges::find_if(groups, [&](const ParamGroup& g) {
      return ::fnmatch(g.pattern.c_str(), table[i].name.c_str(), 0) == 0;
    });
    if (group != groups.end()) out[i] = &*group;
  }
  return out;
}

Result<std::vector<ParamGroup>> param_groups(
    const pb::Optimizer& optimizer, const geometry::ModelConfig& model) {
  std::vector<ParamGroup> groups;
  for (const std::string& text : optimizer.groups()) {
    ASSIGN_OR_RETURN(groups.emplace_back(), parse_param_group(text));
  }
  const auto table = geometry::ParamTable::make(model);
  const auto whole = geometry::ParamTable::make(model.base());
  const auto of = groups_of(table, groups), of_whole = groups_of(whole, groups);
  const auto has = [](const auto& of, const ParamGroup& g) {
    return std::ranges::find(of, &g) != of.end();
  };
  for (const ParamGroup& g : groups)
    if (!has(of, g) && !has(of_whole, g))
      return invalid_argument(fmt::format(
          "\"{}\": no parameter has this group; names are like {} and {}",
          g.pattern, table[0].name, table[table.size() / 2].name));
  if (std::ranges::all_of(
          of, [](const ParamGroup* g) { return g != nullptr && g->frozen; }))
    return invalid_argument("all parameters are frozen");
  return groups;
}

}  // namespace remesh::jobfile
