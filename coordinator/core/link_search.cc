#include "coordinator/core/link_search.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "proto/base/text.h"

namespace remesh::core {
namespace {

using Hosts = std::set<std::string>;
using Field = google::protobuf::RepeatedPtrField<std::string>;

Hosts to_set(const Field& field) { return {field.begin(), field.end()}; }

void assign(const Hosts& hosts, Field* field) {
  field->Assign(hosts.begin(), hosts.end());
}

Hosts common(const Hosts& a, const Hosts& b) {
  Hosts out;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(),
                        std::inserter(out, out.end()));
  return out;
}

Hosts without(const Hosts& a, const Hosts& b) {
  Hosts out;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(),
                      std::inserter(out, out.end()));
  return out;
}

}  // namespace

pb::LinkSearch begin_link_search(const Hosts& hosts) {
  pb::LinkSearch s;
  assign(hosts, s.mutable_ends());
  assign(hosts, s.mutable_others());
  return s;
}

void narrow(const Hosts& hosts, bool passed, pb::LinkSearch* s) {
  const Hosts ends = to_set(s->ends());
  const Hosts others = to_set(s->others());
  if (!passed) {
    assign(common(ends, hosts), s->mutable_ends());
    assign(common(others, hosts), s->mutable_others());
    return;
  }
  const Hosts ends_out = without(ends, hosts);
  const Hosts others_out = without(others, hosts);
  if (ends_out.empty()) {
    assign(others_out, s->mutable_others());
  } else if (std::ranges::includes(ends_out, others_out)) {
    Hosts all = ends;
    all.insert(others.begin(), others.end());
    assign(ends_out, s->mutable_ends());
    assign(all, s->mutable_others());
  }
  // Else some pairs are out of question that these sets cannot leave out.
}

size_t num_links(const pb::LinkSearch& s) {
  const Hosts ends = to_set(s.ends());
  const size_t both = common(ends, to_set(s.others())).size();
  const size_t ordered = ends.size() * s.others().size() - both;
  return ordered - both * (both > 0 ? both - 1 : 0) / 2;
}

std::optional<Link> found_link(const pb::LinkSearch& s) {
  if (num_links(s) != 1) return std::nullopt;
  for (const std::string& a : s.ends())
    for (const std::string& b : s.others())
      if (a != b) return std::minmax(a, b);
  return std::nullopt;
}

bool set_apart(const std::function<bool(const Hosts&)>& can,
               const Hosts& unproven, pb::LinkSearch* s) {
  const Hosts ends = to_set(s->ends());
  const Hosts others = to_set(s->others());
  // A share of 1/sqrt(2) of the hosts has half of all pairs.
  const bool both = ends == others;
  Hosts first = common(ends, unproven);
  while (!first.empty() && first.size() + 2 > ends.size())
    first.erase(std::prev(first.end()));
  if (both && !first.empty() && can(first)) {
    assign(first, s->mutable_apart());
    return true;
  }
  const Hosts from = ends.size() == 1 ? without(others, ends) : ends;
  const double share = both ? 1 - std::sqrt(0.5) : 0.5;
  const auto most = std::max<size_t>(
      1, std::lround(share * static_cast<double>(from.size())));
  Hosts apart(from.begin(),
              std::next(from.begin(), std::min(most, from.size())));
  if (!can(apart)) apart.clear();
  for (const std::string& host : from) {
    if (apart.size() >= most) break;
    apart.insert(host);
    if (!can(apart)) apart.erase(host);
  }
  assign(apart, s->mutable_apart());
  return !apart.empty();
}

bool in_question(const pb::LinkSearch& s, const std::string& host) {
  const auto has = [&](const Field& field) {
    return std::ranges::find(field, host) != field.end();
  };
  return has(s.ends()) || has(s.others());
}

bool is_apart(const pb::LinkSearch& s, const std::string& host) {
  return std::ranges::find(s.apart(), host) != s.apart().end();
}

std::string link_text(const pb::LinkSearch& s) {
  if (const auto link = found_link(s))
    return fmt::format("between hosts {} and {}", link->first, link->second);
  const Hosts ends = to_set(s.ends());
  Hosts others = to_set(s.others());
  if (ends == others)
    return "between two of the hosts " + join({ends.begin(), ends.end()});
  if (ends.size() == 1) others = without(others, ends);
  return fmt::format(
      "between {} and {}{}",
      ends.size() == 1 ? "host " + *ends.begin()
                       : "one of the hosts " + join({ends.begin(), ends.end()}),
      others.size() == 1 ? "" : "one of ",
      join({others.begin(), others.end()}));
}

std::string search_text(const pb::LinkSearch& s) {
  return fmt::format("a bad link is searched for, {}", link_text(s));
}

}  // namespace remesh::core
