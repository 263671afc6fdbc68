// JSON that others wrote: parsed strictly, in memory proportional to its size.
// Private to this folder.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "proto/base/status.h"

namespace remesh::huggingface {

using Json = nlohmann::json;

// An object. Corrupt, with `name` in front, if the text is not one, a key
// appears twice in an object, or values are nested more than 64 deep.
Result<Json> parse_json(std::string_view text, const std::string& name);

}  // namespace remesh::huggingface
