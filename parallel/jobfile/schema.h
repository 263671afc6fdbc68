// The schema of each key in job.proto and cluster.proto, and setting a key from
// a value: the part of the reader that knows neither TOML nor files. A file is
// a message (pb::Job, pb::Cluster, ...) whose fields are its sections. Private
// to this folder. Pure.
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
using File = google::protobuf::Message;
using Section = google::protobuf::Descriptor;

// A list of strings, the only list type of keys.
using Texts = std::vector<std::string>;
// A value as written; monostate: a type that no key has (another array, a
// table, a date).
using Value =
    std::variant<std::monostate, bool, int64_t, double, std::string, Texts>;

// The sections' fields in a file, and a section's keys, in schema order.
std::vector<const Field*> sections(
    const Section& file = *pb::Job::descriptor());
std::vector<const Field*> keys(const Field& section);
// The field of that name, or nullptr.
const Field* find_section(const Section& file, std::string_view name);
const Field* find_key(const Field& section, std::string_view name);

// "train.steps".
std::string full_name(const Field& key);

// "an integer from 1 to 1024", "one of fp32, bf16", "true or false" ...
std::string allowed_text(const Field& key);

// Sets the key in the file and returns "", or returns the problem with the
// value
// ("must be ..."). A floating-point key accepts an integer.
std::string set_key(File& file, const Field& key, const Value& value);

// The problem with the key's current or default value, or "".
std::string check_key(const File& file, const Field& key);

// The key's value (its default if absent), and its default. A list is always
// present; its default is empty.
Value get_key(const File& file, const Field& key);
Value default_value(const Field& key);
bool has_key(const File& file, const Field& key);

// Clears what model.flavor sets, where it is not given.
void clear_flavor_keys(pb::Model& model);

// The value as TOML; reads back as the same value.
std::string to_toml_value(const Value& value);

// A hint for a name that TorchTitan or Hugging Face users may expect, such as
// ("training", "batch_size"); "" if there is none. The key may be empty (the
// section itself).
std::string hint(std::string_view section, std::string_view key);

}  // namespace remesh::jobfile
