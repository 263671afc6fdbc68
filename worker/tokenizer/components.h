// The components of a tokenizer.json before and after its model: what they do
// to a text, and that the decoder undoes it. tokenizer_json.h lists them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "proto/base/status.h"
#include "worker/tokenizer/pipeline.h"

namespace remesh::tokenizer {

// What is known of the other components when one is parsed.
struct Components {
  bool byte_level = false;         // the model sees bytes in their alphabet
  bool marks_spaces = false;       // each space becomes U+2581
  bool no_spaces = false;          // and none is left
  bool prefix_mark = false;        // U+2581 is added before a document
  std::vector<TextStep> decoder;   // of the name of a token
  std::vector<std::string> lossy;  // names of what decoding does not undo
};

// Sets what the pipeline does to a text between added tokens. Fails, naming the
// component, on one that is not supported; may throw a Json::exception.
Result<Components> parse_components(const nlohmann::json& file, Pipeline& p);

// The value, shortened for a message.
std::string shown(const nlohmann::json& json);
Status unsupported(const std::string& component, const nlohmann::json& json);

}  // namespace remesh::tokenizer
