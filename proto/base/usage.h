// What the command lines of all programs have in common. Templates, because
// this library does not depend on CLI11.
#pragma once

#include <fmt/format.h>

#include <string>

namespace remesh {

// Wrong usage of the CLI::App is reported in one line, which names it.
template <typename App>
void report_usage_in_one_line(App& app) {
  app.failure_message([](const auto* failed, const auto& error) {
    const std::string& name = failed->get_name();
    return fmt::format("{}: {}; see {} --help\n", name, error.what(), name);
  });
}

// The option of a command that prints its result by print_json() then.
template <typename App>
auto* add_json_option(App* command, bool* json) {
  return command->add_flag("--json", *json, "Print JSON");
}

}  // namespace remesh
