// The fields of an event against those that proto/rundir/events.inc declares.
#pragma once

#include <google/protobuf/message.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "proto/control.pb.h"
#include "proto/rundir/events.h"

namespace remesh {

// Those that the event has and must not have, separated by blanks; its name if
// it is not declared at all.
inline std::string undeclared_fields(const pb::EventRecord& event) {
  const auto kinds = events::event_kinds();
  const auto kind =
      std::find_if(kinds.begin(), kinds.end(),
                   [&](const auto& k) { return event.event() == k; });
  if (kind == kinds.end()) return event.event();
  std::set<std::string> declared = {"time", "event", "generation", "step"};
  std::istringstream names{std::string(kind->fields)};
  for (std::string name; names >> name;) {
    if (name.back() == ',') name.pop_back();
    declared.insert(name);
  }
  std::vector<const google::protobuf::FieldDescriptor*> set;
  event.GetReflection()->ListFields(event, &set);
  std::string out;
  for (const auto* f : set)
    if (!declared.contains(f->name()))
      out += (out.empty() ? "" : " ") + f->name();
  return out;
}

}  // namespace remesh
