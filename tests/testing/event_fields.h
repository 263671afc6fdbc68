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

// Those of the fields that the event of that name must not have, separated by
// blanks; its name if it is not declared at all.
inline std::string undeclared_fields(const std::string& event,
                                     const std::vector<std::string>& fields) {
  const auto kinds = events::event_kinds();
  const auto kind = std::find_if(kinds.begin(), kinds.end(),
                                 [&](const auto& k) { return event == k; });
  if (kind == kinds.end()) return event;
  std::set<std::string> declared = {"time", "event", "generation", "step"};
  std::istringstream names{std::string(kind->fields)};
  for (std::string name; names >> name;) {
    if (name.back() == ',') name.pop_back();
    declared.insert(name);
  }
  std::string out;
  for (const std::string& f : fields)
    if (!declared.contains(f)) out += (out.empty() ? "" : " ") + f;
  return out;
}

inline std::string undeclared_fields(const pb::EventRecord& event) {
  std::vector<const google::protobuf::FieldDescriptor*> set;
  event.GetReflection()->ListFields(event, &set);
  std::vector<std::string> fields;
  for (const auto* f : set) fields.push_back(f->name());
  return undeclared_fields(event.event(), fields);
}

}  // namespace remesh
