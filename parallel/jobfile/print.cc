#include <fmt/format.h>

#include <sstream>

#include "parallel/jobfile/jobfile.h"
#include "parallel/jobfile/schema.h"
#include "proto/base/text.h"

namespace remesh::jobfile {
namespace {

constexpr size_t kWidth = 78;
constexpr std::string_view kFirstLine =
    "# The job, every key as the run uses it.\n";

// "# text", wrapped between words.
std::string comment(const std::string& text) {
  std::istringstream words(text);
  std::string out;
  std::string line = "#";
  for (std::string word; words >> word;) {
    if (line.size() > 1 && line.size() + 1 + word.size() > kWidth) {
      out += line + "\n";
      line.resize(1);
    }
    line += " " + word;
  }
  return out + line + "\n";
}

std::string capitalized(std::string text) {
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z')
    text[0] = static_cast<char>(text[0] - 'a' + 'A');
  return text;
}

}  // namespace

bool is_written_by_run(std::string_view text) {
  return text.starts_with(kFirstLine);
}

std::string to_toml(const pb::Job& job) {
  std::string out(kFirstLine);
  for (const Field* section : sections()) {
    out += fmt::format("\n[{}]\n", section->name());
    for (const Field* key : keys(*section))
      out += fmt::format("{} = {}\n", key->name(),
                         to_toml_value(get_key(job, *key)));
  }
  return out;
}

std::string description_text(const google::protobuf::Message& file) {
  std::string out;
  for (const Field* section : sections(*file.GetDescriptor())) {
    out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", section->name());
    for (const Field* key : keys(*section))
      if (has_key(file, *key))
        out += fmt::format("{} = {}\n", key->name(),
                           to_toml_value(get_key(file, *key)));
  }
  return out;
}

std::vector<std::pair<std::string, std::string>> settings(const pb::Job& job) {
  std::vector<std::pair<std::string, std::string>> out;
  for (const Field* section : sections())
    for (const Field* key : keys(*section))
      out.emplace_back(full_name(*key), to_toml_value(get_key(job, *key)));
  return out;
}

std::vector<Difference> differences(const pb::Job& first,
                                    const pb::Job& second) {
  const auto before = settings(first), after = settings(second);
  std::vector<Difference> out;
  for (size_t i = 0; i < before.size(); ++i)
    if (before[i].second != after[i].second)
      out.push_back({before[i].first, before[i].second, after[i].second});
  return out;
}

std::string changes_text(const pb::Job& first, const pb::Job& second) {
  std::vector<std::string> out;
  for (const Difference& d : differences(first, second))
    out.push_back(fmt::format("{} {} -> {}", d.key, d.first, d.second));
  return join(out);
}

std::string commented_example() {
  std::string out =
      "# Every key of a job file, with its default.\n"
      "#\n"
      "# A key that is left out, or commented out as here, has its default; "
      "only\n"
      "# data.path is required. Paths are relative to this file's folder (the\n"
      "# default of job.dump_folder to the current one).\n"
      "# Any key can be set on the command line:\n"
      "#   remesh run JOB.toml --set train.steps=200\n"
      "# (Generated from proto/job.proto by `remesh job defaults`.)\n";
  for (const Field* section : sections()) {
    out += fmt::format("\n[{}]\n", section->name());
    for (const Field* key : keys(*section)) {
      out += '\n';
      out += comment(key->options().GetExtension(pb::help));
      const bool required = key->options().GetExtension(pb::required);
      out += comment(capitalized(allowed_text(*key)) +
                     (required ? "; required." : "."));
      out += required ? fmt::format("{} = \"data\"\n", key->name())
                      : fmt::format("# {} = {}\n", key->name(),
                                    to_toml_value(default_value(*key)));
    }
  }
  return out;
}

}  // namespace remesh::jobfile
