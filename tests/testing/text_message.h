// Messages written as text: text_message<pb::StepMetrics>("step: 3 loss: 2.5").
#pragma once

#include <google/protobuf/text_format.h>

#include <string>

#include "proto/base/check.h"

namespace remesh {

// Sets these fields of the message, and adds to repeated ones. Ends the program
// if the text is not one of such a message.
template <typename M>
void merge_text(const std::string& text, M* to) {
  CHECK_MSG(google::protobuf::TextFormat::MergeFromString(text, to),
            text.c_str());
}

// A message of these fields.
template <typename M>
M text_message(const std::string& text) {
  M out;
  merge_text(text, &out);
  return out;
}

}  // namespace remesh
