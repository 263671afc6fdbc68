// Which versions of the control protocol a program speaks. Two programs work
// together if they have a version in common, whatever their releases, so that
// hosts can be upgraded one after the other; channel.h has the version of the
// frames, which says only whether the other end can be understood at all.
#pragma once

#include <fmt/format.h>

#include <string>

namespace remesh::wire {

struct ProtocolRange {
  int newest = 1;
  int oldest = 1;

  bool meets(const ProtocolRange& other) const {
    return oldest <= other.newest && other.oldest <= newest;
  }
  // "version 2", "versions 1 to 3".
  std::string to_string() const {
    return oldest == newest ? fmt::format("version {}", newest)
                            : fmt::format("versions {} to {}", oldest, newest);
  }
};

// What a Report, a Directive or a Refusal says.
template <typename Message>
ProtocolRange protocol_of(const Message& m) {
  return {.newest = m.protocol(), .oldest = m.oldest_protocol()};
}

template <typename Message>
void set_protocol(const ProtocolRange& range, Message* m) {
  m->set_protocol(range.newest);
  m->set_oldest_protocol(range.oldest);
}

// The versions that this program speaks, and its build (version.h).
ProtocolRange own_protocol();
std::string own_build();

}  // namespace remesh::wire
