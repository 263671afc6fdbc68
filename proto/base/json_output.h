// What programs print with --json: one object, whose first key is `schema`.
// proto/PROTOCOL.md lists the other keys of each command. A library of its own,
// because few programs need nlohmann/json.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>

namespace remesh {

// It grows when a key changes its meaning or disappears; new keys may appear at
// any time.
inline constexpr int kJsonSchema = 1;

// One line if a command prints several objects, for readers of lines.
enum class JsonLayout { kIndented, kOneLine };

// The text of `object` after its schema, with a line end. Bytes that are not
// UTF-8 become U+FFFD: JSON has no others, but file names and tokens do.
std::string json_output(const nlohmann::ordered_json& object,
                        JsonLayout layout = JsonLayout::kIndented);

// The value, or null if it is not known.
inline nlohmann::ordered_json or_null(bool known,
                                      nlohmann::ordered_json value) {
  return known ? std::move(value) : nlohmann::ordered_json();
}

// Prints it on the standard output.
void print_json(const nlohmann::ordered_json& object);

}  // namespace remesh
