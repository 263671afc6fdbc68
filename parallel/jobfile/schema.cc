#include "parallel/jobfile/schema.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "parallel/geometry/layout.h"
#include "parallel/geometry/lora.h"
#include "parallel/jobfile/param_groups.h"
#include "proto/base/check.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"

namespace remesh::jobfile {
namespace {

using google::protobuf::FieldOptions;

const FieldOptions& options(const Field& key) { return key.options(); }

std::vector<std::string> allowed_values(const Field& key) {
  std::vector<std::string> values;
  std::string_view rest = options(key).GetExtension(pb::allowed);
  while (!rest.empty()) {
    const size_t bar = rest.find('|');
    values.emplace_back(rest.substr(0, bar));
    rest = bar == std::string_view::npos ? "" : rest.substr(bar + 1);
  }
  return values;
}

bool is_integer(const Field& key) {
  return key.cpp_type() == Field::CPPTYPE_INT64 ||
         key.cpp_type() == Field::CPPTYPE_UINT64;
}

// A bound as the user would write it: 1048576, 1e-08.
std::string bound_text(double bound) {
  if (bound == std::floor(bound) && std::fabs(bound) < 1e15)
    return fmt::format("{}", static_cast<int64_t>(bound));
  return fmt::format("{}", bound);
}

// A key whose minimum is -1 uses it for "not given" or "automatic"; values
// between -1 and the first sensible one are not allowed.
bool has_sentinel(const Field& key) {
  return options(key).HasExtension(pb::min) &&
         options(key).GetExtension(pb::min) == -1;
}

// A key whose default is 0, below its minimum, uses it for "none".
bool zero_is_none(const Field& key) {
  return key.cpp_type() == Field::CPPTYPE_DOUBLE && key.has_default_value() &&
         key.default_value_double() == 0 &&
         options(key).GetExtension(pb::min) > 0;
}

std::string range_text(const Field& key) {
  const FieldOptions& o = options(key);
  std::string text;
  if (has_sentinel(key)) {
    text = is_integer(key) ? ", -1 or from 1" : ", -1 or above 0";
  } else if (o.HasExtension(pb::min)) {
    text = fmt::format("{} {} {}", zero_is_none(key) ? ", 0 or" : "",
                       o.GetExtension(pb::above_min) ? "above" : "from",
                       bound_text(o.GetExtension(pb::min)));
  } else if (key.cpp_type() == Field::CPPTYPE_UINT64) {
    return " from 0 to 2^63 - 1";
  }
  if (o.HasExtension(pb::max))
    text += fmt::format(" to {}", bound_text(o.GetExtension(pb::max)));
  return text;
}

bool in_range(const Field& key, double value) {
  const FieldOptions& o = options(key);
  if (!std::isfinite(value)) return false;
  if (has_sentinel(key)) {
    if (value != -1 && value <= 0) return false;
  } else if (o.HasExtension(pb::min) && !(value == 0 && zero_is_none(key))) {
    const double min = o.GetExtension(pb::min);
    if (value < min || (o.GetExtension(pb::above_min) && value == min))
      return false;
  }
  return !o.HasExtension(pb::max) || value <= o.GetExtension(pb::max);
}

bool is_name(const std::string& text) {
  const auto good = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
  };
  return !text.empty() && text.size() <= 64 && text[0] != '.' &&
         std::ranges::all_of(text, good);
}

// What job.toml can hold, and whoever shows it can print.
bool is_text(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '\n' || c == '\t'; },
      ' ');
  return limits::is_printable(text, text.size());
}

std::string check_text(const Field& key, const std::string& text) {
  const std::vector<std::string> allowed = allowed_values(key);
  if (!allowed.empty()) {
    if (std::ranges::find(allowed, text) != allowed.end()) return "";
    std::string near = nearest_name(text, allowed);
    if (text == "bfloat16") near = "bf16";
    if (text == "float32") near = "fp32";
    std::string problem = "must be " + allowed_text(key);
    const bool known = std::ranges::find(allowed, near) != allowed.end();
    if (known) problem += fmt::format("; did you mean \"{}\"?", near);
    return problem;
  }
  if (!is_text(text)) return "must be UTF-8 without control characters";
  if (full_name(key) == "job.name" && !is_name(text))
    return "must be 1 to 64 letters, digits, '-', '_' or '.', not starting "
           "with '.'";
  const bool folder = options(key).GetExtension(pb::is_path) ||
                      full_name(key) == "checkpoint.folder";
  // Where nothing is the default, it is a choice.
  const bool needed = options(key).GetExtension(pb::required) ||
                      !key.default_value_string().empty();
  if (folder && needed && text.empty()) return "must not be empty";
  return "";
}

// An entry of a list.
Status check_entry(const std::string& name, const std::string& text) {
  if (name == "optimizer.groups") return parse_param_group(text).status();
  if (name == "elastic.layouts") return geometry::Layout::parse(text).status();
  const auto& targets = geometry::lora_targets();
  if (std::ranges::find(targets, text) != targets.end()) return ok_status();
  return invalid_argument(
      fmt::format("'{}': must be one of {}", text, join(targets)));
}

std::string check_texts(const Field& key, const Texts& texts) {
  for (const std::string& text : texts) {
    const Status status = check_entry(full_name(key), text);
    if (!status.ok()) return status.message();
  }
  return "";
}

// The problem with a value of the key's own type, or "".
std::string check_value(const Field& key, const Value& value) {
  if (const auto* texts = std::get_if<Texts>(&value))
    return check_texts(key, *texts);
  if (const auto* text = std::get_if<std::string>(&value))
    return check_text(key, *text);
  double number = 0;
  if (const auto* i = std::get_if<int64_t>(&value))
    number = static_cast<double>(*i);
  if (const auto* d = std::get_if<double>(&value)) number = *d;
  const bool negative = key.cpp_type() == Field::CPPTYPE_UINT64 && number < 0;
  const bool boolean = std::holds_alternative<bool>(value);
  if (negative || (!boolean && !in_range(key, number)))
    return "must be " + allowed_text(key);
  return "";
}

const Field& section_of_key(const Section& file, const Field& key) {
  for (const Field* s : sections(file))
    if (s->message_type() == key.containing_type()) return *s;
  CHECK_MSG(false, "a key of another file");
  return key;
}

File* section_of(File& file, const Field& key) {
  return file.GetReflection()->MutableMessage(
      &file, &section_of_key(*file.GetDescriptor(), key));
}

const File& section_of(const File& file, const Field& key) {
  return file.GetReflection()->GetMessage(
      file, &section_of_key(*file.GetDescriptor(), key));
}

}  // namespace

std::vector<const Field*> sections(const Section& file) {
  std::vector<const Field*> all;
  for (int i = 0; i < file.field_count(); ++i) all.push_back(file.field(i));
  return all;
}

std::vector<const Field*> keys(const Field& section) {
  std::vector<const Field*> all;
  const Section& type = *section.message_type();
  for (int i = 0; i < type.field_count(); ++i) all.push_back(type.field(i));
  return all;
}

const Field* find_section(const Section& file, std::string_view name) {
  return file.FindFieldByName(std::string(name));
}

const Field* find_key(const Field& section, std::string_view name) {
  return section.message_type()->FindFieldByName(std::string(name));
}

std::string full_name(const Field& key) {
  for (int i = 0; i < key.file()->message_type_count(); ++i)
    for (const Field* s : sections(*key.file()->message_type(i)))
      if (s->message_type() == key.containing_type())
        return s->name() + "." + key.name();
  return key.name();
}

std::string allowed_text(const Field& key) {
  if (key.is_repeated()) return "a list of quoted strings";
  switch (key.cpp_type()) {
    case Field::CPPTYPE_BOOL:
      return "true or false";
    case Field::CPPTYPE_STRING: {
      const std::vector<std::string> values = allowed_values(key);
      if (values.size() == 1) return fmt::format("\"{}\"", values[0]);
      if (!values.empty())
        return fmt::format("one of \"{}\"", join(values, "\", \""));
      return options(key).GetExtension(pb::is_path) ? "a quoted path"
                                                    : "a quoted string";
    }
    default:
      return (is_integer(key) ? "an integer" : "a number") + range_text(key);
  }
}

std::string set_key(File& file, const Field& key, const Value& value) {
  Value typed = value;
  if (const auto* i = std::get_if<int64_t>(&value);
      i != nullptr && key.cpp_type() == Field::CPPTYPE_DOUBLE)
    typed = static_cast<double>(*i);
  if (typed.index() != default_value(key).index())
    return "must be " + allowed_text(key);
  if (std::string problem = check_value(key, typed); !problem.empty())
    return problem;
  File* section = section_of(file, key);
  const google::protobuf::Reflection& set = *section->GetReflection();
  if (key.is_repeated()) {
    set.ClearField(section, &key);
    for (const std::string& text : std::get<Texts>(typed))
      set.AddString(section, &key, text);
    return "";
  }
  switch (key.cpp_type()) {
    case Field::CPPTYPE_BOOL:
      set.SetBool(section, &key, std::get<bool>(typed));
      break;
    case Field::CPPTYPE_STRING:
      set.SetString(section, &key, std::get<std::string>(typed));
      break;
    case Field::CPPTYPE_DOUBLE:
      set.SetDouble(section, &key, std::get<double>(typed));
      break;
    case Field::CPPTYPE_UINT64:
      set.SetUInt64(section, &key,
                    static_cast<uint64_t>(std::get<int64_t>(typed)));
      break;
    case Field::CPPTYPE_INT64:
      set.SetInt64(section, &key, std::get<int64_t>(typed));
      break;
    default:
      CHECK_MSG(false, "the schema has a type that files do not have");
  }
  return "";
}

std::string check_key(const File& file, const Field& key) {
  const Value value = get_key(file, key);
  if (std::holds_alternative<std::monostate>(value))
    return "must be " + allowed_text(key);
  if (!has_key(file, key) && options(key).GetExtension(pb::required))
    return "is required: give " + allowed_text(key);
  return check_value(key, value);
}

bool has_key(const File& file, const Field& key) {
  if (key.is_repeated()) return true;
  const File& section = section_of(file, key);
  return section.GetReflection()->HasField(section, &key);
}

namespace {

Value value_in(const File& section, const Field& key) {
  const google::protobuf::Reflection& get = *section.GetReflection();
  if (key.is_repeated()) {
    Texts texts;
    for (int i = 0; i < get.FieldSize(section, &key); ++i)
      texts.push_back(get.GetRepeatedString(section, &key, i));
    return texts;
  }
  switch (key.cpp_type()) {
    case Field::CPPTYPE_BOOL:
      return get.GetBool(section, &key);
    case Field::CPPTYPE_STRING:
      return get.GetString(section, &key);
    case Field::CPPTYPE_DOUBLE:
      return get.GetDouble(section, &key);
    case Field::CPPTYPE_INT64:
      return get.GetInt64(section, &key);
    case Field::CPPTYPE_UINT64: {
      const uint64_t value = get.GetUInt64(section, &key);
      // TOML has no larger integer, so no job file can have set it.
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
        return std::monostate();
      return static_cast<int64_t>(value);
    }
    default:
      CHECK_MSG(false, "the schema has a type that files do not have");
      return std::monostate();
  }
}

}  // namespace

Value get_key(const File& file, const Field& key) {
  return value_in(section_of(file, key), key);
}

Value default_value(const Field& key) {
  return value_in(
      *google::protobuf::MessageFactory::generated_factory()->GetPrototype(
          key.containing_type()),
      key);
}

std::string to_toml_value(const Value& value) {
  if (const auto* b = std::get_if<bool>(&value)) return *b ? "true" : "false";
  if (const auto* i = std::get_if<int64_t>(&value))
    return fmt::format("{}", *i);
  if (const auto* d = std::get_if<double>(&value)) {
    std::string text = fmt::format("{}", *d);
    if (text.find_first_of(".einf") == std::string::npos) text += ".0";
    return text;
  }
  if (const auto* texts = std::get_if<Texts>(&value)) {
    std::vector<std::string> parts;
    for (const std::string& t : *texts) parts.push_back(to_toml_value(t));
    return "[" + join(parts) + "]";
  }
  const auto* s = std::get_if<std::string>(&value);
  if (s == nullptr) return "(not a value)";
  std::string text = "\"";
  for (const char c : *s) {
    const auto b = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      text += {'\\', c};
    else if (b < 0x20 || b == 0x7F)
      text += fmt::format("\\u{:04X}", b);
    else
      text += c;
  }
  return text + "\"";
}

}  // namespace remesh::jobfile
