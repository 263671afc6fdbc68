#include "proto/wire/elements.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

namespace remesh::wire {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// The messages of the protocol do not nest themselves, so this ends.
bool count(const Descriptor& type, CodedInputStream* in, int* left) {
  while (const uint32_t tag = in->ReadTag()) {
    const FieldDescriptor* field =
        type.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    const auto wire_type = WireFormatLite::GetTagWireType(tag);
    // No message of the protocol has groups, and one that is skipped may hold
    // any number of elements.
    if (wire_type == WireFormatLite::WIRETYPE_START_GROUP ||
        wire_type == WireFormatLite::WIRETYPE_END_GROUP)
      return false;
    const bool delimited =
        wire_type == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
    const bool allocates =
        field == nullptr || field->is_repeated() || delimited;
    if (allocates && --*left < 0) return false;
    if (!delimited || field == nullptr ||
        field->type() != FieldDescriptor::TYPE_MESSAGE) {
      if (!WireFormatLite::SkipField(in, tag)) return false;
      continue;
    }
    int size = 0;
    if (!in->ReadVarintSizeAsInt(&size)) return false;
    const auto outer = in->PushLimit(size);
    if (!count(*field->message_type(), in, left)) return false;
    if (in->BytesUntilLimit() != 0) return false;
    in->PopLimit(outer);
  }
  return true;
}

}  // namespace

bool has_few_elements(const Descriptor& type, const void* data, size_t size,
                      int most) {
  CodedInputStream in(static_cast<const uint8_t*>(data),
                      static_cast<int>(size));
  return count(type, &in, &most) &&
         static_cast<size_t>(in.CurrentPosition()) == size;
}

}  // namespace remesh::wire
