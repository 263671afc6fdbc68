// Counts what parsing a message would allocate, before it is parsed: a few
// bytes on the wire may become an object of some hundred bytes in memory.
#pragma once

#include <cstddef>

namespace google::protobuf {
class Descriptor;
}

namespace remesh::wire {

// Whether the serialized message of that type has at most `most` strings,
// messages, elements of lists and unknown fields. False also if it is no such
// message.
bool has_few_elements(const google::protobuf::Descriptor& type,
                      const void* data, size_t size, int most);

}  // namespace remesh::wire
