// What the command lines of all programs have in common.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

namespace remesh {

// What else to say of an argument of `app` that is not known, and that `rest`
// follows; "": nothing.
using UsageHint = std::string (*)(const CLI::App& app, const std::string& word,
                                  const std::string& rest);

// Parses the arguments and runs what they ask for. Returns the exit code if
// that is all: after the help, or wrong usage, which is reported in one line
// that names the command, the argument and what is allowed. Integers are
// decimal, also with zeros before them, as the names of checkpoints have them.
std::optional<int> parse_arguments(CLI::App& app, int argc, char** argv,
                                   UsageHint hint = nullptr);

// The option of a command that prints its result by print_json() then.
inline CLI::Option* add_json_option(CLI::App* command, bool* json) {
  return command->add_flag("--json", *json, "Print JSON");
}

}  // namespace remesh
