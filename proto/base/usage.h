// Messages about wrong usage, the same in all programs. A template, because
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

}  // namespace remesh
