// remesh: the command line.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "coordinator/ctl/verbs.h"
#include "proto/base/process.h"
#include "proto/base/text.h"
#include "proto/base/version.h"

namespace remesh::ctl {
namespace {

constexpr const char* kFooter = R"(
Examples:
  remesh data prepare --input books.txt.xz --out data/books
  remesh run job.toml --local 2          train on this machine, 2 workers
  remesh status -w                       watch the newest run
  remesh resume --local 3                continue it, with 3 workers

RUN is a run directory or an address (tcp://HOST:PORT or ipc:///PATH). Default:
the run that is training, else the newest in ./runs, else the one used last. See `remesh COMMAND --help` for its options.
)";

// What could have been typed in place of `word`, which `rest` follows.
std::string usage_hint(const CLI::App& app, const std::string& word,
                       const std::string& rest) {
  std::vector<std::string> names;
  if (word.starts_with("-")) {
    for (const CLI::Option* o : app.get_options())
      for (const std::string& name : o->get_lnames())
        names.push_back("--" + name);
  } else {
    for (const CLI::App* c : app.get_subcommands({}))
      names.push_back(c->get_name());
  }
  const std::string plain = word.substr(0, word.find('='));
  const bool known =
      std::find(names.begin(), names.end(), plain) != names.end();
  if (known || names.empty() || word == "-w") return "";
  std::string hint = word.empty() ? "expected one of: " + join(names)
                                  : fmt::format(
                                        "{}: unknown; expected one of: "
                                        "{}",
                                        word, join(names));
  const std::string near = nearest_name(plain, names);
  if (word == "ckpt") {
    hint += fmt::format("; type: remesh checkpoint{}", rest);
  } else if (!near.empty()) {
    hint += fmt::format("; did you mean {}?", near);
  } else if (app.get_name() == "checkpoint" && !word.starts_with("-")) {
    hint += fmt::format("; to save one, type: remesh checkpoint save{}{}",
                        word.empty() ? "" : " " + word, rest);
  }
  return hint;
}

// The hint for the first argument that is not known.
std::string unknown_argument(const CLI::App& root, int argc, char** argv) {
  const CLI::App* app = &root;
  std::string hint;
  for (int i = 1; i < argc && hint.empty(); ++i) {
    const std::string word = argv[i];
    const auto inner = app->get_subcommands();
    if (!inner.empty() && inner[0]->get_name() == word) {
      app = inner[0];
      continue;
    }
    std::string rest;
    for (int k = i + 1; k < argc; ++k) rest += fmt::format(" {}", argv[k]);
    hint = usage_hint(*app, word, rest);
  }
  return hint.empty() ? usage_hint(*app, "", "") : hint;
}

// The option that is required and not given; nullptr: none.
const CLI::Option* required_option(const CLI::App& app) {
  for (const CLI::Option* o : app.get_options())
    if (o->get_required() && o->count() == 0) return o;
  return nullptr;
}

// The option that the last argument names without a value that it takes.
const CLI::Option* last_option(const CLI::App& app, const std::string& last) {
  const std::string name = last.substr(0, last.find('='));
  if (!last.starts_with("-") || last.size() > name.size() + 1) return nullptr;
  const auto* o = app.get_option_no_throw(name);
  return o != nullptr && o->get_items_expected_min() > 0 ? o : nullptr;
}

// "--local: needs a value (Number of workers ...)".
std::string with_description(const CLI::Option& o, const std::string& text) {
  const std::string about = o.get_description();
  return fmt::format("{} ({})", text, about.substr(0, about.find(". ")));
}

// One line: the verb, the argument, its value and what is allowed.
int usage_error(const CLI::App& root, const CLI::ParseError& error, int argc,
                char** argv) {
  if (error.get_exit_code() == 0) return root.exit(error);  // help
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
    const std::string hint = unknown_argument(root, argc, argv);
    if (!hint.empty()) text = hint;
  } else if (o != nullptr) {
    text = with_description(*o, kind == CLI::ExitCodes::RequiredError
                                    ? text
                                    : o->get_name() + ": needs a value");
  }
  print_error(fmt::format("{}: {}; see {} --help\n", verb, text, verb));
  return kExitUsage;
}

// Refuses empty values of all verbs. They would mean that nothing is given: a
// RUN of "" is the run that trains, or the newest one.
void refuse_empty_values(CLI::App* verb) {
  const CLI::Validator check(
      [](const std::string& text) {
        return std::string(text.empty() ? "must not be empty" : "");
      },
      "");
  for (CLI::Option* o : verb->get_options())
    if (o->get_items_expected_min() > 0) o->check(check);
  for (CLI::App* below : verb->get_subcommands({})) refuse_empty_values(below);
}

}  // namespace

int main(int argc, char** argv) {
  begin_program();
  CLI::App app("remesh trains language models on machines that come and go.");
  app.name("remesh");
  app.footer(std::string(kFooter) + "\n" + std::string(kExitCodesHelp));
  app.set_version_flag("-V,--version", version_line("remesh"));
  app.require_subcommand(1);
  int code = kExitOk;
  for (AddVerbs* add : kVerbs) add(&app, &code);
  refuse_empty_values(&app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return usage_error(app, e, argc, argv);
  } catch (const std::exception& e) {
    // Such as a standard output that cannot be written.
    std::fprintf(stderr, "remesh: %s\n", e.what());
    return kExitFailed;
  }
  // `remesh run` says so by itself, and its exit code tells how the job ended.
  if (app.got_subcommand("run") || app.got_subcommand("resume")) return code;
  return check_output("remesh", code);
}

}  // namespace remesh::ctl

int main(int argc, char** argv) { return remesh::ctl::main(argc, argv); }
