#include "proto/data/index.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>

#include "proto/base/file_system.h"
#include "proto/base/json_reader.h"
#include "proto/base/xxh3.h"

namespace remesh::data {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kFormat[] = "remesh-dataset";
constexpr int64_t kVersion = 1;
// Keeps sums of tokens from overflowing.
constexpr int64_t kMaxCount = int64_t{1} << 53;

// Reads in well under a second from a local disk.
constexpr uint64_t kMaxHashedBytes = uint64_t{256} << 20;

int64_t total_tokens(const std::vector<ShardEntry>& shards) {
  return std::accumulate(
      shards.begin(), shards.end(), int64_t{0},
      [](int64_t sum, const ShardEntry& s) { return sum + s.tokens; });
}

Result<std::string> checksum_of_tokens(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  in.seekg(kShardHeaderBytes);
  Xxh3Stream hash;
  std::vector<char> portion(size_t{1} << 20);
  while (in) {
    in.read(portion.data(), static_cast<std::streamsize>(portion.size()));
    hash.add(portion.data(), static_cast<size_t>(in.gcount()));
  }
  if (!in.eof()) return io_error(path + ": cannot be read");
  return hex(hash.digest_128());
}

int64_t count(JsonReader& f, const char* key, int64_t most = kMaxCount) {
  return f.integer(key, -1, 0, most);
}

std::string hash(JsonReader& f, const char* key) {
  std::string value = f.text(key, nullptr);
  if (!is_hex_hash(value)) f.refuse(key, "32 hex digits");
  return value;
}

Result<std::vector<ShardEntry>> parse_shards(const nlohmann::json& array,
                                             const std::string& name) {
  std::vector<ShardEntry> shards;
  for (const nlohmann::json& item : array) {
    JsonReader f(item, fmt::format("{}[{}]", name, shards.size()),
                 Code::kCorrupt);
    ShardEntry s;
    s.file = f.text("file", nullptr);
    s.tokens = count(f, "tokens");
    s.checksum = hash(f, "checksum");
    if (s.file.empty() || s.file[0] == '.' ||
        s.file.find_first_of(std::string_view("/\0", 2)) != std::string::npos)
      f.refuse("file", "a file name in the folder of the data set");
    RETURN_IF_ERROR(f.problem());
    shards.push_back(std::move(s));
    if (total_tokens(shards) > kMaxCount)
      return corrupt(name + ": more than 2^53 tokens");
  }
  return shards;
}

Result<std::vector<MemberEntry>> parse_members(const nlohmann::json& array,
                                               const std::string& name) {
  std::vector<MemberEntry> members;
  for (const nlohmann::json& item : array) {
    JsonReader f(item, fmt::format("{}[{}]", name, members.size()),
                 Code::kCorrupt);
    MemberEntry m{
        .name = f.text("name", nullptr),
        .dir = f.text("dir", nullptr),
        .weight = f.number("weight", 0),  // must be there
        .data_id = hash(f, "data_id"),
        .train_tokens = count(f, "train_tokens", kMaxCount / kMostMembers),
        .val_tokens = count(f, "val_tokens", kMaxCount / kMostMembers)};
    if (!(m.weight >= 0 && m.weight <= 1e9))
      f.refuse("weight", "at least 0 and at most 1e9");
    if (m.dir.empty()) f.refuse("dir", "a folder");
    RETURN_IF_ERROR(f.problem());
    members.push_back(std::move(m));
  }
  if (members.size() > kMostMembers)
    return corrupt(fmt::format("{}: more than {}", name, kMostMembers));
  return members;
}

Json shards_to_json(const std::vector<ShardEntry>& shards) {
  Json array = Json::array();
  for (const ShardEntry& s : shards)
    array.push_back(
        {{"file", s.file}, {"tokens", s.tokens}, {"checksum", s.checksum}});
  return array;
}

}  // namespace

int64_t Index::train_tokens() const {
  int64_t sum = total_tokens(train);
  for (const MemberEntry& m : members) sum += m.train_tokens;
  return sum;
}
int64_t Index::val_tokens() const {
  int64_t sum = total_tokens(val);
  for (const MemberEntry& m : members) sum += m.val_tokens;
  return sum;
}

std::string data_id_of(const Index& index) {
  std::string text =
      fmt::format("{} {} {}{}\n", index.tokenizer, index.vocab_size,
                  index.end_of_text, index.marked ? " marked" : "");
  for (const ShardEntry& s : index.train)
    text += fmt::format("train {} {}\n", s.tokens, s.checksum);
  for (const ShardEntry& s : index.val)
    text += fmt::format("val {} {}\n", s.tokens, s.checksum);
  for (const MemberEntry& m : index.members)
    text += fmt::format("member {} {}\n", m.weight, m.data_id);
  return xxh128_text(text);
}

std::string index_to_json(const Index& index) {
  Json inputs = Json::array();
  const size_t listed = std::min(index.inputs.size(), kMostInputs);
  for (const InputEntry& i : std::span(index.inputs).first(listed))
    inputs.push_back(
        {{"file", i.file}, {"bytes", i.bytes}, {"xxh128", i.xxh128}});
  Json members = Json::array();
  for (const MemberEntry& m : index.members)
    members.push_back({{"name", m.name},
                       {"dir", m.dir},
                       {"weight", m.weight},
                       {"data_id", m.data_id},
                       {"train_tokens", m.train_tokens},
                       {"val_tokens", m.val_tokens}});
  const Json json = {{"format", kFormat},
                     {"version", kVersion},
                     {"data_id", index.data_id},
                     {"source_id", index.source_id},
                     {"tokenizer", index.tokenizer},
                     {"vocab_size", index.vocab_size},
                     {"end_of_text", index.end_of_text},
                     {"largest_token", index.largest_token},
                     {"marked", index.marked},
                     {"documents", index.documents},
                     {"text_bytes", index.text_bytes},
                     {"train", shards_to_json(index.train)},
                     {"val", shards_to_json(index.val)},
                     {"inputs", inputs},
                     {"members", members}};
  // File names need not be UTF-8; JSON must be.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

Result<Index> parse_index(std::string_view text, const std::string& name) {
  const auto json =
      nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return corrupt(name + ": not JSON (truncated?)");
  JsonReader f(json, name, Code::kCorrupt);
  if (f.text("format", nullptr) != kFormat)
    f.refuse("format", fmt::format("\"{}\"", kFormat));
  if (count(f, "version") != kVersion)
    f.refuse("version", std::to_string(kVersion));
  Index index;
  index.data_id = hash(f, "data_id");
  index.source_id = hash(f, "source_id");
  index.tokenizer = f.text("tokenizer", nullptr);
  index.vocab_size = count(f, "vocab_size", int64_t{1} << 31);
  index.end_of_text = static_cast<int32_t>(
      count(f, "end_of_text", std::numeric_limits<int32_t>::max()));
  if (index.end_of_text >= index.vocab_size)
    f.refuse("end_of_text", "below vocab_size");
  index.largest_token = f.integer("largest_token", -1, -1,
                                  std::max<int64_t>(0, index.vocab_size - 1));
  index.marked = f.flag("marked", false);
  index.documents = count(f, "documents");
  index.text_bytes = static_cast<uint64_t>(count(f, "text_bytes"));
  const nlohmann::json& train = f.array("train");
  const nlohmann::json& val = f.array("val");
  for (const nlohmann::json& item : f.array("inputs")) {
    JsonReader g(item, name + ": inputs", Code::kCorrupt);
    index.inputs.push_back({g.text("file", nullptr),
                            static_cast<uint64_t>(count(g, "bytes")),
                            hash(g, "xxh128")});
    RETURN_IF_ERROR(g.problem());
  }
  RETURN_IF_ERROR(f.problem());
  if (json.contains("members")) {
    ASSIGN_OR_RETURN(index.members,
                     parse_members(f.array("members"), name + ": members"));
  }
  ASSIGN_OR_RETURN(index.train, parse_shards(train, name + ": train"));
  ASSIGN_OR_RETURN(index.val, parse_shards(val, name + ": val"));
  if (index.data_id != data_id_of(index))
    return corrupt(name + ": data_id does not match the shards");
  return index;
}

uint32_t token_width(int64_t vocab_size) {
  return vocab_size <= int64_t{1} << 16 ? 2 : 4;
}

std::string member_dir(const std::string& dir, const MemberEntry& member) {
  return (std::filesystem::path(dir) / member.dir).lexically_normal().string();
}

Result<Index> read_index(const std::string& dir, const MemberEntry* member) {
  const std::string path = dir + "/" + kIndexName;
  ASSIGN_OR_RETURN(const std::string text,
                   read_file(*posix_file_system(), path, kMaxIndexBytes));
  ASSIGN_OR_RETURN(Index index, parse_index(text, path));
  if (member != nullptr && !index.members.empty())
    return corrupt(path + ": a mixture of mixtures is not supported");
  if (member != nullptr && index.data_id != member->data_id)
    return corrupt(fmt::format(
        "{}: has data {}, but the mixture was made with {}; make it again with "
        "`remesh data mix --overwrite`",
        path, index.data_id, member->data_id));
  return index;
}

Status check_shard_files(const std::string& dir, const Index& index) {
  for (const MemberEntry& member : index.members) {
    const std::string folder = member_dir(dir, member);
    ASSIGN_OR_RETURN(const Index of, read_index(folder, &member));
    RETURN_IF_ERROR(check_shard_files(folder, of));
  }
  const auto bytes_of = [&](const ShardEntry& shard) {
    return kShardHeaderBytes +
           static_cast<uint64_t>(shard.tokens) * token_width(index.vocab_size) +
           (index.marked ? mark_bytes(shard.tokens) : 0);
  };
  std::vector<ShardEntry> shards = index.train;
  shards.insert(shards.end(), index.val.begin(), index.val.end());
  uint64_t total = 0;
  for (const ShardEntry& shard : shards) {
    const std::string path = dir + "/" + shard.file;
    std::error_code error;
    const uint64_t bytes = std::filesystem::file_size(path, error);
    if (error == std::errc::no_such_file_or_directory)
      return corrupt(path + ": " + error.message());
    if (error) return errno_error(path, error.value());
    if (bytes != bytes_of(shard))
      return corrupt(fmt::format("{}: {} bytes, but the index says {}", path,
                                 bytes, bytes_of(shard)));
    total += bytes;
  }
  if (total > kMaxHashedBytes) return ok_status();
  for (const ShardEntry& shard : shards) {
    const std::string path = dir + "/" + shard.file;
    ASSIGN_OR_RETURN(const std::string checksum, checksum_of_tokens(path));
    if (checksum != shard.checksum)
      return corrupt(
          fmt::format("{}: the tokens have checksum {}, but the index says {}",
                      path, checksum, shard.checksum));
  }
  return ok_status();
}

}  // namespace remesh::data
