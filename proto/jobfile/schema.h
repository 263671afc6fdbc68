// What job.proto says of each key, and setting a key from a value: the part
// of the job-file reader that is neither TOML nor text of a whole file.
// Private to this folder. Pure.
#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "proto/job.pb.h"

namespace remesh::jobfile {

using Field = google::protobuf::FieldDescriptor;
using Section = google::protobuf::Descriptor;

// A list of texts, the only kind of list that keys have.
using Texts = std::vector<std::string>;
// A value as it was written; monostate: something no key takes (another array,
// a table, a date).
using Value =
    std::variant<std::monostate, bool, int64_t, double, std::string, Texts>;

// The sections' fields in pb::Job, and a section's keys, in schema order.
std::vector<const Field*> sections();
std::vector<const Field*> keys(const Field& section);
// The field of that name, or nullptr.
const Field* find_section(std::string_view name);
const Field* find_key(const Field& section, std::string_view name);

// "train.steps".
std::string full_name(const Field& key);

// "an integer from 1 to 1024", "one of fp32, bf16", "true or false" ...
std::string allowed_text(const Field& key);

// The problem with setting the key to this value ("must be ..."), or "" when
// it is set in `job`. An integer is taken for a floating-point key.
std::string set_key(pb::Job& job, const Field& key, const Value& value);

// The problem with the key's present or default value, or "".
std::string check_key(const pb::Job& job, const Field& key);

// The key's value (its default when absent), and its default. A list is always
// present; by default it is empty.
Value get_key(const pb::Job& job, const Field& key);
Value default_value(const Field& key);
bool has_key(const pb::Job& job, const Field& key);

// The value as TOML; reads back as the same value.
std::string to_toml_value(const Value& value);

// What to say of a name that TorchTitan or Hugging Face users may expect,
// e.g. ("training", "batch_size"); "" when there is nothing to say. The key
// may be empty (the section itself).
std::string hint(std::string_view section, std::string_view key);

}  // namespace remesh::jobfile
