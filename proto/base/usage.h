// What the command lines of all programs have in common. Templates, because
// this library does not depend on CLI11.
#pragma once

#include <fmt/format.h>

#include <exception>
#include <optional>
#include <string>

#include "proto/base/exit_code.h"

namespace remesh {

// Parses the arguments of a CLI::App and runs what they ask for. Returns the
// exit code if that is all: after the help, or wrong usage, which is reported
// in one line that names the command. ParseError: CLI::ParseError.
template <typename ParseError, typename App>
std::optional<int> parse_arguments(App& app, int argc, char** argv) {
  app.failure_message([](const auto* failed, const auto& error) {
    const std::string& name = failed->get_name();
    return fmt::format("{}: {}; see {} --help\n", name, error.what(), name);
  });
  try {
    app.parse(argc, argv);
  } catch (const ParseError& e) {
    return app.exit(e) == 0 ? kExitOk : kExitUsage;
  } catch (const std::exception& e) {
    // Such as a standard output that cannot be written.
    print_error(fmt::format("{}: {}\n", app.get_name(), e.what()));
    return kExitFailed;
  }
  return std::nullopt;
}

// The option of a command that prints its result by print_json() then.
template <typename App>
auto* add_json_option(App* command, bool* json) {
  return command->add_flag("--json", *json, "Print JSON");
}

}  // namespace remesh
