#include "coordinator/rundir/lines.h"

#include <fmt/format.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "coordinator/core/job_shape.h"
#include "proto/base/check.h"
#include "proto/base/number.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"

namespace remesh::rundir {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using Json = nlohmann::ordered_json;

// How doubles are written; both give back the same bits.
constexpr const char* kAllDigits = "{:.17g}";
constexpr const char* kShortest = "{}";

std::string quoted(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string mesh_json(const pb::Mesh& m) {
  return fmt::format(R"({{"dp":{},"pp":{},"tp":{}{}}})", m.dp(), m.pp(), m.tp(),
                     m.cp() == 1 ? "" : fmt::format(R"(,"cp":{})", m.cp()));
}

std::string number_text(double v, const char* format) {
  return std::isfinite(v) ? fmt::format(fmt::runtime(format), v) : "null";
}

std::string value_text(const Message& m, const FieldDescriptor* f,
                       const char* double_format) {
  const Reflection* r = m.GetReflection();
  switch (f->type()) {
    case FieldDescriptor::TYPE_DOUBLE:
      return number_text(r->GetDouble(m, f), double_format);
    case FieldDescriptor::TYPE_BOOL:
      return r->GetBool(m, f) ? "true" : "false";
    case FieldDescriptor::TYPE_INT64:
      return fmt::format("{}", r->GetInt64(m, f));
    case FieldDescriptor::TYPE_INT32:
      return fmt::format("{}", r->GetInt32(m, f));
    case FieldDescriptor::TYPE_FIXED64:
      return fmt::format(R"("{:016x}")", r->GetUInt64(m, f));
    case FieldDescriptor::TYPE_STRING:
      return quoted(r->GetString(m, f));
    case FieldDescriptor::TYPE_ENUM:
      return quoted(enum_text(r->GetEnum(m, f)->name()));
    default:
      CHECK(f->message_type() == pb::Mesh::descriptor());
      return mesh_json(static_cast<const pb::Mesh&>(r->GetMessage(m, f)));
  }
}

// The fields that are set, as members of a JSON object without its braces.
std::string members(const Message& m, const char* double_format) {
  const Reflection* r = m.GetReflection();
  std::string out;
  const auto add = [&](const FieldDescriptor* f, const std::string& value) {
    out +=
        fmt::format(R"({}"{}":{})", out.empty() ? "" : ",", f->name(), value);
  };
  for (int i = 0; i < m.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* f = m.GetDescriptor()->field(i);
    if (!f->is_repeated()) {
      if (r->HasField(m, f)) add(f, value_text(m, f, double_format));
      continue;
    }
    std::string list;
    for (int k = 0; k < r->FieldSize(m, f); ++k)
      list += (k > 0 ? "," : "") +
              (f->type() == FieldDescriptor::TYPE_DOUBLE
                   ? number_text(r->GetRepeatedDouble(m, f, k), double_format)
                   : quoted(r->GetRepeatedString(m, f, k)));
    if (!list.empty()) add(f, "[" + list + "]");
  }
  return out;
}

bool parse_members(const Json& j, Message* m);

// A number, or null for one that JSON does not have.
bool is_double(const Json& value) {
  return value.is_number() || value.is_null();
}
double double_of(const Json& value) {
  return value.is_null() ? std::numeric_limits<double>::quiet_NaN()
                         : value.get<double>();
}

// False if the value has another type than the field.
bool parse_value(const Json& value, const FieldDescriptor* f, Message* m) {
  const Reflection* r = m->GetReflection();
  switch (f->type()) {
    case FieldDescriptor::TYPE_DOUBLE:
      if (!is_double(value)) return false;
      r->SetDouble(m, f, double_of(value));
      return true;
    case FieldDescriptor::TYPE_BOOL:
      if (!value.is_boolean()) return false;
      r->SetBool(m, f, value.get<bool>());
      return true;
    case FieldDescriptor::TYPE_INT64:
      if (!value.is_number_integer()) return false;
      r->SetInt64(m, f, value.get<int64_t>());
      return true;
    case FieldDescriptor::TYPE_INT32:
      if (!value.is_number_integer()) return false;
      r->SetInt32(m, f, static_cast<int32_t>(value.get<int64_t>()));
      return true;
    case FieldDescriptor::TYPE_FIXED64: {
      if (!value.is_string()) return false;
      const auto v = parse_number<uint64_t>(value.get<std::string>(), 16);
      r->SetUInt64(m, f, v.value_or(0));
      return v.has_value();
    }
    case FieldDescriptor::TYPE_STRING:
      if (!value.is_string()) return false;
      r->SetString(m, f, value.get<std::string>());
      return true;
    case FieldDescriptor::TYPE_ENUM:
      // A value of a later release is left out.
      if (!value.is_string()) return false;
      for (int i = 0; i < f->enum_type()->value_count(); ++i)
        if (const auto* v = f->enum_type()->value(i);
            enum_text(v->name()) == value.get<std::string>())
          r->SetEnum(m, f, v);
      return true;
    default:
      return parse_members(value, r->MutableMessage(m, f));
  }
}

// Sets the fields that `j` has; false if it has one of another type.
bool parse_members(const Json& j, Message* m) {
  if (!j.is_object()) return false;
  for (int i = 0; i < m->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* f = m->GetDescriptor()->field(i);
    const auto it = j.find(f->name());
    if (it == j.end()) continue;
    if (!f->is_repeated()) {
      if (!parse_value(*it, f, m)) return false;
      continue;
    }
    if (!it->is_array()) return false;
    for (const Json& item : *it) {
      const bool number = f->type() == FieldDescriptor::TYPE_DOUBLE;
      if (!(number ? is_double(item) : item.is_string())) return false;
      if (number)
        m->GetReflection()->AddDouble(m, f, double_of(item));
      else
        m->GetReflection()->AddString(m, f, item.get<std::string>());
    }
  }
  return true;
}

// Cuts long texts, so that a line has at most kMaxEventBytes, although JSON may
// need three bytes for one of theirs.
void shorten(pb::EventRecord* e) {
  constexpr int kMaxLines = 12;
  if (e->ByteSizeLong() <= limits::kMaxText) return;
  const Reflection* r = e->GetReflection();
  std::vector<const FieldDescriptor*> set;
  r->ListFields(*e, &set);
  for (const FieldDescriptor* f : set)
    if (f->type() == FieldDescriptor::TYPE_STRING && !f->is_repeated())
      if (const std::string text = r->GetString(*e, f);
          text.size() > limits::kMaxText)
        r->SetString(e, f, limits::printable(text) + " ...");
  auto* lines = e->mutable_last_log();
  if (lines->size() > kMaxLines)
    lines->DeleteSubrange(0, lines->size() - kMaxLines);
  for (std::string& line : *lines) line = limits::printable(line);
}

// A message without one of the `required` fields is corrupt.
template <typename T>
Result<T> parse_line(std::string_view line, const char* what,
                     std::initializer_list<const char*> required) {
  const Json j = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  T out;
  bool ok = parse_members(j, &out);
  for (const char* key : required) ok = ok && j.contains(key);
  if (ok) return out;
  return corrupt(
      fmt::format("not a line of {}: \"{}\"", what, line.substr(0, 60)));
}

}  // namespace

std::string metrics_line(const pb::StepMetrics& m) {
  std::string out = "{" + members(m, kAllDigits);
  // Redundant, for the convenience of readers.
  if (m.gemm_flops_per_s() > 0)
    out += R"(,"gemm_efficiency":)" +
           number_text(m.flops_per_s() / m.gemm_flops_per_s(), kAllDigits);
  return out + "}";
}

Result<pb::StepMetrics> parse_metrics_line(std::string_view line) {
  ASSIGN_OR_RETURN(pb::StepMetrics m, parse_line<pb::StepMetrics>(
                                          line, "metrics", {"step", "loss"}));
  if (m.step() < 1) return corrupt("metrics of a step below 1");
  return m;
}

std::string event_line(const pb::EventRecord& event) {
  pb::EventRecord e = event;
  shorten(&e);
  e.set_time(std::round(e.time() * 1e6) / 1e6);
  return "{" + members(e, kShortest) + "}";
}

Result<pb::EventRecord> parse_event_line(std::string_view line) {
  return parse_line<pb::EventRecord>(line, "events", {"event"});
}

std::vector<Kv> event_fields(const pb::EventRecord& event) {
  const Reflection* r = event.GetReflection();
  std::vector<const FieldDescriptor*> set;
  r->ListFields(event, &set);
  std::vector<Kv> out;
  for (const FieldDescriptor* f : set) {
    if (f->name() == "event" || f->name() == "time") continue;
    if (f->is_repeated()) {
      std::vector<std::string> parts;
      for (int k = 0; k < r->FieldSize(event, f); ++k)
        parts.push_back(r->GetRepeatedString(event, f, k));
      out.emplace_back(f->name(), join(parts));
    } else if (f->type() == FieldDescriptor::TYPE_STRING) {
      out.emplace_back(f->name(), r->GetString(event, f));
    } else if (f->type() == FieldDescriptor::TYPE_MESSAGE) {
      out.emplace_back(
          f->name(),
          mesh_text(static_cast<const pb::Mesh&>(r->GetMessage(event, f))));
    } else if (f->type() == FieldDescriptor::TYPE_FIXED64) {
      out.emplace_back(f->name(),
                       fmt::format("{:016x}", r->GetUInt64(event, f)));
    } else {
      out.emplace_back(f->name(), value_text(event, f, kShortest));
    }
  }
  return out;
}

std::string mesh_text(const pb::Mesh& mesh) {
  return core::layout_of(mesh).to_string();
}

std::string state_text(pb::JobStatus::State state) {
  return enum_text(pb::JobStatus::State_Name(state));
}

std::string state_text(pb::WorkerStatus::State state) {
  return enum_text(pb::WorkerStatus::State_Name(state));
}

}  // namespace remesh::rundir
