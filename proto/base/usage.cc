#include "proto/base/usage.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <vector>

#include "proto/base/exit_code.h"
#include "proto/base/text.h"

namespace remesh {
namespace {

// CLI11 takes 0030 for an octal number.
void read_decimal(CLI::App& app) {
  for (CLI::Option* o : app.get_options()) {
    const std::string type = o->get_type_name();
    if (type.starts_with("INT") || type.starts_with("UINT"))
      o->transform([](std::string text) {
        const size_t begin = text.starts_with('-') ? 1 : 0;
        const size_t digits = text.find_first_not_of('0', begin);
        const bool decimal =
            text.find_first_not_of("0123456789", begin) == std::string::npos;
        if (decimal && text.size() > begin)
          text.erase(begin, std::min(digits, text.size() - 1) - begin);
        return text;
      });
  }
  for (CLI::App* below : app.get_subcommands({})) read_decimal(*below);
}

// The option that `word` names; nullptr: none.
const CLI::Option* named_option(const CLI::App& app, const std::string& word) {
  return word.starts_with("-")
             ? app.get_option_no_throw(word.substr(0, word.find('=')))
             : nullptr;
}

bool takes_value(const CLI::Option& o) {
  return o.get_items_expected_min() > 0;
}

// What could have been typed in place of `word`, which `rest` follows.
std::string hint_of(const CLI::App& app, const std::string& word,
                    const std::string& rest, UsageHint more) {
  std::vector<std::string> names;
  if (word.starts_with("-")) {
    if (named_option(app, word) != nullptr) return "";
    for (const CLI::Option* o : app.get_options())
      for (const std::string& name : o->get_lnames())
        names.push_back("--" + name);
  } else {
    for (const CLI::App* c : app.get_subcommands({}))
      names.push_back(c->get_name());
  }
  if (names.empty() ||
      std::find(names.begin(), names.end(), word) != names.end())
    return "";
  std::string hint =
      fmt::format("{}expected one of: {}",
                  word.empty() ? "" : word + ": unknown; ", join(names));
  const std::string near = nearest_name(word.substr(0, word.find('=')), names);
  const std::string other = more != nullptr ? more(app, word, rest) : "";
  if (!near.empty())
    hint += fmt::format("; did you mean {}?", near);
  else if (!other.empty())
    hint += "; " + other;
  return hint;
}

// The hint for the first argument that is not known.
std::string unknown_argument(const CLI::App& root, int argc, char** argv,
                             UsageHint more) {
  const CLI::App* app = &root;
  std::string hint;
  for (int i = 1; i < argc && hint.empty(); ++i) {
    const std::string word = argv[i];
    const auto inner = app->get_subcommands();
    if (!inner.empty() && inner[0]->get_name() == word) {
      app = inner[0];
      continue;
    }
    const CLI::Option* const known = named_option(*app, word);
    if (known != nullptr && takes_value(*known) &&
        word.find('=') == std::string::npos)
      ++i;
    std::string rest;
    for (int k = i + 1; k < argc; ++k) rest += fmt::format(" {}", argv[k]);
    hint = hint_of(*app, word, rest, more);
  }
  return hint.empty() ? hint_of(*app, "", "", more) : hint;
}

// The option that is required and not given; nullptr: none.
const CLI::Option* required_option(const CLI::App& app) {
  for (const CLI::Option* o : app.get_options())
    if (o->get_required() && o->count() == 0) return o;
  return nullptr;
}

// The option that the last argument names without a value that it takes.
const CLI::Option* last_option(const CLI::App& app, const std::string& last) {
  const CLI::Option* const o = named_option(app, last);
  const size_t value = last.find('=');
  return o != nullptr && takes_value(*o) &&
                 (value == std::string::npos || value + 1 == last.size())
             ? o
             : nullptr;
}

// "--local: needs a value (Number of workers ...)".
std::string with_description(const CLI::Option& o, const std::string& text) {
  const std::string& about = o.get_description();
  return fmt::format("{} ({})", text, about.substr(0, about.find(". ")));
}

int usage_error(const CLI::App& root, const CLI::ParseError& error, int argc,
                char** argv, UsageHint more) {
  const CLI::App* app = &root;
  std::string verb = root.get_name();
  while (!app->get_subcommands().empty()) {
    app = app->get_subcommands()[0];
    verb += " " + app->get_name();
  }
  const auto kind = static_cast<CLI::ExitCodes>(error.get_exit_code());
  std::string text = error.what();
  const CLI::Option* o = nullptr;
  if (kind == CLI::ExitCodes::RequiredError)
    o = required_option(*app);
  else if (kind == CLI::ExitCodes::ArgumentMismatch)
    o = last_option(*app, argv[argc - 1]);
  if (kind == CLI::ExitCodes::ExtrasError ||
      (kind == CLI::ExitCodes::RequiredError && o == nullptr)) {
    const std::string hint = unknown_argument(root, argc, argv, more);
    if (!hint.empty()) text = hint;
  } else if (o != nullptr) {
    text = with_description(*o, kind == CLI::ExitCodes::RequiredError
                                    ? text
                                    : o->get_name() + ": needs a value");
  }
  print_error(fmt::format("{}: {}; see {} --help\n", verb, text, verb));
  return kExitUsage;
}

}  // namespace

std::optional<int> parse_arguments(CLI::App& app, int argc, char** argv,
                                   UsageHint hint) {
  read_decimal(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return e.get_exit_code() == 0 ? app.exit(e)  // the help
                                  : usage_error(app, e, argc, argv, hint);
  } catch (const std::exception& e) {
    // Such as a standard output that cannot be written.
    print_error(fmt::format("{}: {}\n", app.get_name(), e.what()));
    return kExitFailed;
  }
  return std::nullopt;
}

}  // namespace remesh
