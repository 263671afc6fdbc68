#include "worker/data/mix.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>

#include "proto/base/number.h"
#include "worker/data/out_dir.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::data {
namespace {

namespace files = std::filesystem;

Result<MemberEntry> parse_member(const std::string& argument) {
  const auto wrong = [&] {
    return invalid_argument(fmt::format(
        "{}: must be FOLDER=WEIGHT, with a weight above 0 or, for validation "
        "only, 0",
        argument));
  };
  const size_t at = argument.rfind('=');
  if (at == std::string::npos || at == 0) return wrong();
  MemberEntry m;
  m.weight = parse_number<double>(argument.substr(at + 1)).value_or(-1);
  if (!(m.weight >= 0 && m.weight <= 1e9)) return wrong();
  const files::path dir = files::absolute(argument.substr(0, at));
  m.dir = dir.lexically_normal().string();
  while (m.dir.ends_with('/')) m.dir.pop_back();
  m.name = files::path(m.dir).filename().string();
  if (tokenizer::valid_prefix(m.dir) < m.dir.size())
    return invalid_argument(argument +
                            ": the name of the folder must be UTF-8, as the "
                            "index of the mixture is");
  return m;
}

Status add_member(MemberEntry member, Index* index) {
  ASSIGN_OR_RETURN(const Index of, read_index(member.dir));
  if (!of.members.empty())
    return invalid_argument(member.dir + ": is a mixture itself");
  if (index->members.empty()) {
    index->tokenizer = of.tokenizer;
    index->vocab_size = of.vocab_size;
    index->end_of_text = of.end_of_text;
  } else if (of.tokenizer != index->tokenizer) {
    return invalid_argument(fmt::format(
        "{}: has tokenizer '{}', but {} has '{}'", member.dir, of.tokenizer,
        index->members.front().dir, index->tokenizer));
  }
  index->largest_token = std::max(index->largest_token, of.token_limit() - 1);
  member.data_id = of.data_id;
  member.train_tokens = of.train_tokens();
  member.val_tokens = of.val_tokens();
  if (member.weight > 0 && member.train_tokens == 0)
    return invalid_argument(
        member.dir +
        ": has no training text; give it weight 0, for validation only");
  if (member.weight == 0 && member.val_tokens == 0)
    return invalid_argument(
        member.dir +
        ": has no validation text, and with weight 0 it would not be used; "
        "prepare it with --val-fraction 1");
  index->documents += of.documents;
  index->text_bytes += of.text_bytes;
  index->members.push_back(std::move(member));
  return ok_status();
}

// Whether the folder has this mixture already. AlreadyExists if it has
// something that may not be replaced.
Result<bool> has_mixture(const OutDir& out, const Index& index,
                         bool overwrite) {
  std::vector<std::string> own, foreign;
  RETURN_IF_ERROR(out.list(own, foreign));
  if (out.has_index()) {
    auto old = read_index(out.path());
    // An older version did not note it.
    if (old.ok() && old->largest_token < 0 && !overwrite)
      old->largest_token = index.largest_token;
    if (old.ok() && *old == index) return true;
  }
  if (!overwrite && (out.has_index() || !foreign.empty()))
    return already_exists(fmt::format(
        "{}: has {} already: choose another folder, or use --overwrite",
        out.path(), out.has_index() ? "a data set" : foreign[0]));
  return false;
}

}  // namespace

Result<Index> mix(const MixOptions& o, FileSystem& fs) {
  if (o.members.size() > kMostMembers)
    return invalid_argument(fmt::format("{} members: at most {} are allowed",
                                        o.members.size(), kMostMembers));
  Index index;
  std::set<std::string> names;
  for (const std::string& argument : o.members) {
    ASSIGN_OR_RETURN(MemberEntry member, parse_member(argument));
    if (!names.insert(member.name).second)
      return invalid_argument(fmt::format(
          "two members are named {}, after their folders: give one of them by "
          "a symbolic link with another name",
          member.name));
    std::error_code error;
    if (std::filesystem::equivalent(member.dir, o.out_dir, error))
      return invalid_argument(fmt::format(
          "--out {}: is the member {}, whose data would be removed; give "
          "another folder",
          o.out_dir, member.name));
    RETURN_IF_ERROR(add_member(std::move(member), &index));
  }
  if (std::ranges::none_of(index.members,
                           [](const auto& m) { return m.weight > 0; }))
    return invalid_argument(
        "no member has a weight above 0, so there is nothing to train on");
  index.data_id = index.source_id = data_id_of(index);
  ASSIGN_OR_RETURN(const std::unique_ptr<OutDir> out,
                   OutDir::open(fs, o.out_dir));
  ASSIGN_OR_RETURN(const bool has, has_mixture(*out, index, o.overwrite));
  if (!has) RETURN_IF_ERROR(out->commit(index, {}));
  return index;
}

}  // namespace remesh::data
