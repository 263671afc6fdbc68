#include "proto/jobfile/jobfile.h"

// Header-only and without exceptions: nothing of the library outside here.
#define TOML_HEADER_ONLY 1
#define TOML_EXCEPTIONS 0
#define TOML_ENABLE_FORMATTERS 0
#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "proto/base/check.h"
#include "proto/base/text.h"
#include "proto/jobfile/schema.h"

namespace remesh::jobfile {
namespace {

namespace fs = std::filesystem;

constexpr uintmax_t kMaxFileBytes = 1 << 20;

Value to_value(const toml::node& node) {
  if (const auto* b = node.as_boolean()) return b->get();
  if (const auto* i = node.as_integer()) return i->get();
  if (const auto* d = node.as_floating_point()) return d->get();
  if (const auto* s = node.as_string()) return s->get();
  return std::monostate();
}

std::string value_text(const toml::node& node) {
  const Value value = to_value(node);
  if (!std::holds_alternative<std::monostate>(value))
    return to_toml_value(value);
  return node.is_array() ? "[...]" : node.is_table() ? "{...}" : "(date)";
}

std::string absolute(const std::string& path, const std::string& base) {
  return (fs::path(base) / path).lexically_normal().string();
}

std::vector<std::string> names(const std::vector<const Field*>& fields) {
  std::vector<std::string> all;
  for (const Field* f : fields) all.push_back(f->name());
  return all;
}

// What to say after "no such key".
std::string suggest_key(const Field& section, std::string_view key) {
  if (std::string h = hint(section.name(), key); !h.empty()) return h;
  const std::vector<std::string> here = names(keys(section));
  if (const std::string near = nearest_name(key, here); !near.empty())
    return fmt::format("did you mean {}.{}?", section.name(), near);
  for (const Field* other : sections())
    if (find_key(*other, key) != nullptr)
      return fmt::format("there is {}.{}", other->name(), key);
  return fmt::format("[{}] has {}", section.name(), join(here));
}

std::string suggest_section(std::string_view name) {
  if (std::string h = hint(name, ""); !h.empty()) return h;
  const std::vector<std::string> all = names(sections());
  for (const Field* s : sections())
    if (find_key(*s, name) != nullptr)
      return fmt::format("it is a key of [{}]", s->name());
  if (const std::string near = nearest_name(name, all); !near.empty())
    return fmt::format("did you mean [{}]?", near);
  return "there are " + join(all);
}

struct Problem {
  uint32_t line = 0;
  std::string text;
};
constexpr uint32_t kNoLine = UINT32_MAX;

// A place in the file, or an override.
struct Where {
  uint32_t line = kNoLine;
  std::string text;  // "job.toml:12: "
};

Where at(const Source& source, const toml::key& key) {
  const uint32_t line = key.source().begin.line;
  return {line, fmt::format("{}:{}: ", source.name, line)};
}

// Collects problems while a job is put together.
class Reader {
 public:
  Reader(pb::Job& job, std::vector<Problem>& problems)
      : job_(job), problems_(problems) {}

  void read_file(const toml::table& root, const Source& source) {
    for (const auto& [name, node] : root) {
      const Where where = at(source, name);
      const Field* section = find_section(name.str());
      if (section == nullptr) {
        unknown_section(name.str(), node, source, where);
      } else if (const toml::table* table = node.as_table()) {
        for (const auto& [key, value] : *table)
          read_key(*section, key.str(), value, at(source, key),
                   source.base_dir);
      } else {
        problem(where, fmt::format("{} = {}: must be a section: [{}]",
                                   name.str(), value_text(node), name.str()));
      }
    }
  }

  void read_override(const std::string& text, const std::string& base) {
    const Where where{kNoLine, fmt::format("--set {}: ", text)};
    const size_t equals = text.find('=');
    const size_t dot = text.find('.');
    if (equals == std::string::npos || dot >= equals)
      return problem(where, "must be section.key=value");
    const std::string section_name = trim(text.substr(0, dot));
    const std::string key_name = trim(text.substr(dot + 1, equals - dot - 1));
    const std::string bare = text.substr(equals + 1);
    const Field* section = find_section(section_name);
    if (section == nullptr)
      return problem(where, fmt::format("no section '{}'; {}", section_name,
                                        suggest_section(section_name)));
    const Field* key = find_key(*section, key_name);
    if (key == nullptr)
      return problem(where, fmt::format("no key '{}'; {}", key_name,
                                        suggest_key(*section, key_name)));
    Value value = bare;
    const toml::parse_result parsed = toml::parse("v = " + bare);
    if (parsed.succeeded() && parsed.table().size() == 1 &&
        parsed.table().contains("v")) {
      const toml::node& node = *parsed.table().get("v");
      // A text key takes 2024-01-01 or 17 as it stands.
      if (key->cpp_type() != Field::CPPTYPE_STRING || node.is_string())
        value = to_value(node);
    }
    set(*key, value, where, base);
  }

 private:
  static std::string trim(const std::string& text) {
    const size_t a = text.find_first_not_of(" \t");
    if (a == std::string::npos) return "";
    return text.substr(a, text.find_last_not_of(" \t") - a + 1);
  }

  void problem(const Where& where, const std::string& what) {
    problems_.push_back({where.line, where.text + what});
  }

  void unknown_section(std::string_view name, const toml::node& node,
                       const Source& source, const Where& where) {
    const toml::table* table = node.as_table();
    if (table == nullptr)
      return problem(where,
                     fmt::format("{} = {}: no such section; {}", name,
                                 value_text(node), suggest_section(name)));
    problem(where, fmt::format("[{}]: no such section; {}", name,
                               suggest_section(name)));
    for (const auto& [key, value] : *table) {
      const std::string h = hint(name, key.str());
      if (!h.empty())
        problem(at(source, key), fmt::format("{}.{}: {}", name, key.str(), h));
    }
  }

  void read_key(const Field& section, std::string_view name,
                const toml::node& node, const Where& where,
                const std::string& base) {
    const Field* key = find_key(section, name);
    if (key == nullptr)
      return problem(where,
                     fmt::format("{}.{}: no such key; {}", section.name(), name,
                                 suggest_key(section, name)));
    set(*key, to_value(node),
        {where.line, fmt::format("{}{} = {}: ", where.text, full_name(*key),
                                 value_text(node))},
        base);
  }

  void set(const Field& key, Value value, const Where& where,
           const std::string& base) {
    auto* text = std::get_if<std::string>(&value);
    if (text != nullptr && !text->empty() &&
        key.options().GetExtension(pb::is_path))
      *text = absolute(*text, base);
    const std::string what = set_key(job_, key, value);
    if (!what.empty()) problem(where, what);
  }

  pb::Job& job_;
  std::vector<Problem>& problems_;
};

Result<std::string> read_text(const std::string& path) {
  std::error_code ec;
  const fs::file_status status = fs::status(path, ec);
  if (status.type() == fs::file_type::not_found)
    return not_found(path + ": no such job file");
  if (!fs::is_regular_file(status))
    return invalid_argument(path + ": must be a file, a job in TOML");
  if (fs::file_size(path, ec) > kMaxFileBytes && !ec)
    return invalid_argument(path + ": over 1 MiB: not a job file");
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  if (!in) return io_error(path + ": cannot be read");
  return text.str();
}

}  // namespace

Result<pb::Job> parse_job(std::string_view toml, const Source& source,
                          const std::vector<std::string>& overrides,
                          const std::string& override_dir) {
  const toml::parse_result parsed = toml::parse(toml, source.name);
  if (parsed.failed())
    return invalid_argument(fmt::format("{}:{}: not TOML: {}", source.name,
                                        parsed.error().source().begin.line,
                                        parsed.error().description()));
  pb::Job job;
  std::vector<Problem> problems;
  Reader reader(job, problems);
  reader.read_file(parsed.table(), source);
  for (const std::string& text : overrides)
    reader.read_override(text, override_dir);
  for (const Field* section : sections()) {
    for (const Field* key : keys(*section)) {
      if (has_key(job, *key)) continue;
      const bool required = key->options().GetExtension(pb::required);
      const Value value = default_value(*key);
      // Where a default path starts must be settled here, where the current
      // folder is known.
      if (!required && key->options().GetExtension(pb::is_path)) {
        CHECK(set_key(job, *key,
                      absolute(std::get<std::string>(value), override_dir))
                  .empty());
      } else if (required) {
        problems.push_back(
            {kNoLine, fmt::format("{}: {}: {}", source.name, full_name(*key),
                                  check_key(job, *key))});
      }
    }
  }
  if (problems.empty()) return job;
  // The parser's tables are sorted by name; people read by line.
  std::stable_sort(
      problems.begin(), problems.end(),
      [](const Problem& a, const Problem& b) { return a.line < b.line; });
  std::vector<std::string> texts;
  for (const Problem& p : problems) texts.push_back(p.text);
  return invalid_argument(join(texts, "\n"));
}

Result<pb::Job> load_job(const std::string& path,
                         const std::vector<std::string>& overrides) {
  ASSIGN_OR_RETURN(const std::string text, read_text(path));
  std::error_code ec;
  const fs::path here = fs::current_path(ec);
  if (ec) return io_error("current folder: " + ec.message());
  const Source source{path, (here / path).parent_path().string()};
  return parse_job(text, source, overrides, here.string());
}

}  // namespace remesh::jobfile
