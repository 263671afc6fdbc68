#include "proto/base/json_output.h"

#include <fmt/format.h>

namespace remesh {

std::string json_output(const nlohmann::ordered_json& object,
                        JsonLayout layout) {
  nlohmann::ordered_json out{{"schema", kJsonSchema}};
  out.update(object);
  return out.dump(layout == JsonLayout::kIndented ? 2 : -1, ' ', false,
                  nlohmann::json::error_handler_t::replace) +
         "\n";
}

void print_json(const nlohmann::ordered_json& object) {
  fmt::print("{}", json_output(object));
}

}  // namespace remesh
