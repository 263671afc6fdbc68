#include "proto/wire/keys.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include <array>
#include <cerrno>
#include <sstream>

#include "proto/base/check.h"
#include "proto/base/file_system.h"
#include "proto/base/number.h"
#include "proto/base/sharing.h"

namespace remesh::wire {
namespace {

constexpr size_t kKeyChars = 40;
constexpr size_t kKeyBytes = 32;
constexpr uint64_t kMaxFileBytes = 1 << 20;
constexpr const char* kSectionHead = "[[key]]";

std::string value_of(const Section& s, const std::string& name) {
  const auto it = s.find(name);
  return it == s.end() ? "" : it->second;
}

Status check_private(const std::string& path, const struct stat& st) {
  const bool own = st.st_uid == geteuid();
  if (!S_ISREG(st.st_mode)) return invalid_argument(path + ": not a file");
  if (!own && st.st_uid != 0)
    return invalid_argument(fmt::format(
        "{}: belongs to another user (uid {}); a key must be your own file",
        path, st.st_uid));
  // A service manager passes secrets on as files of root with an access list,
  // which shows as a permission of the group.
  const mode_t loose = st.st_mode & (own && st.st_uid != 0 ? 077 : 037);
  if (loose != 0)
    return invalid_argument(
        fmt::format("{}: others may use this key (mode {:04o}); type: chmod "
                    "600 {}",
                    path, st.st_mode & 07777, path));
  return ok_status();
}

Result<KeyFile> parse_key_file(const std::string& text) {
  ASSIGN_OR_RETURN(const auto sections, parse_sections(text));
  if (sections.size() != 1)
    return corrupt("expected one key; remesh key new makes such a file");
  KeyFile out;
  out.role = value_of(sections[0], "role");
  out.name = value_of(sections[0], "name");
  out.server = value_of(sections[0], "server");
  out.pair.secret_key = value_of(sections[0], "secret");
  if (!valid_key(out.pair.secret_key))
    return corrupt("no secret key; remesh key new makes such a file");
  if (!out.server.empty() && !valid_key(out.server))
    return corrupt("server is not a public key of 40 characters");
  std::array<char, kKeyChars + 1> z85{};
  CHECK(zmq_curve_public(z85.data(), out.pair.secret_key.c_str()) == 0);
  out.pair.public_key = z85.data();
  return out;
}

}  // namespace

KeyPair new_key_pair() {
  std::array<char, kKeyChars + 1> pub{};
  std::array<char, kKeyChars + 1> secret{};
  do
    CHECK_MSG(zmq_curve_keypair(pub.data(), secret.data()) == 0,
              "libzmq has no CURVE");
  while (pub[0] == '-');
  return {pub.data(), secret.data()};
}

bool valid_key(const std::string& z85) {
  std::array<uint8_t, kKeyBytes> raw{};
  return z85.size() == kKeyChars && z85.find('\0') == std::string::npos &&
         zmq_z85_decode(raw.data(), z85.c_str()) != nullptr;
}

std::array<uint8_t, kKeyBytes> key_bytes(const std::string& z85) {
  CHECK_MSG(valid_key(z85), "not a key");
  std::array<uint8_t, kKeyBytes> raw{};
  zmq_z85_decode(raw.data(), z85.c_str());
  return raw;
}

Result<std::vector<Section>> parse_sections(const std::string& text) {
  std::vector<Section> out;
  std::istringstream in(text);
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    const size_t begin = line.find_first_not_of(" \t\r");
    if (begin == std::string::npos || line[begin] == '#') continue;
    line = line.substr(begin, line.find_last_not_of(" \t\r") + 1 - begin);
    if (line == kSectionHead) {
      out.emplace_back();
      continue;
    }
    const size_t name_end = line.find_first_of(" =");
    const size_t quote = line.find('"');
    const bool good =
        !out.empty() && name_end != std::string::npos &&
        quote != std::string::npos && quote + 1 < line.size() &&
        line.find('"', quote + 1) == line.size() - 1 &&
        line.find('\\') == std::string::npos &&
        line.substr(name_end, quote - name_end).find_first_not_of(" =") ==
            std::string::npos;
    if (!good)
      return corrupt(
          fmt::format("line {}: expected {} or NAME = \"VALUE\" below it",
                      number, kSectionHead));
    out.back()[line.substr(0, name_end)] =
        line.substr(quote + 1, line.size() - quote - 2);
  }
  return out;
}

std::string section_text(const Section& section) {
  std::string out = std::string(kSectionHead) + "\n";
  for (auto [name, value] : section) {
    for (char& c : value)
      if (c == '"' || c == '\\' || static_cast<unsigned char>(c) < ' ')
        c = '\'';
    if (!value.empty()) out += fmt::format("{} = \"{}\"\n", name, value);
  }
  return out;
}

Status check_keys_folder(const std::string& folder) {
  struct stat st {};
  if (lstat(folder.c_str(), &st) != 0) return errno_error(folder, errno);
  if (!S_ISDIR(st.st_mode))
    return invalid_argument(folder + ": must be a folder, not a link or file");
  if (st.st_uid != geteuid() && st.st_uid != 0)
    return invalid_argument(fmt::format(
        "{}: belongs to another user (uid {}); the keys of a run must be your "
        "own",
        folder, st.st_uid));
  if ((st.st_mode & (S_IWGRP | S_IWOTH)) == 0) return ok_status();
  return invalid_argument(
      fmt::format("{}: others may replace its keys (mode {:04o}); type: chmod "
                  "700 {}",
                  folder, st.st_mode & 07777, folder));
}

Result<KeyFile> read_key_file(const std::string& path) {
  struct stat st {};
  if (stat(path.c_str(), &st) != 0) return errno_error(path, errno);
  RETURN_IF_ERROR(check_private(path, st));
  ASSIGN_OR_RETURN(const std::string text,
                   read_file(*posix_file_system(), path, kMaxFileBytes));
  return parse_key_file(text).with_context(path);
}

Status create_key_file(const std::string& path, const KeyFile& key) {
  Status created = create_private_file(
      path, "# A secret of remesh: whoever has it is this member.\n" +
                section_text({{"role", key.role},
                              {"name", key.name},
                              {"public", key.pair.public_key},
                              {"secret", key.pair.secret_key},
                              {"server", key.server}}));
  if (created.code() == Code::kAlreadyExists)
    return already_exists(path + ": exists; remove it first, or give --out");
  return created;
}

Result<std::string> read_public_key(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string content,
                   read_file(*posix_file_system(), path, kMaxFileBytes));
  std::string key;
  std::istringstream in(content);
  std::getline(in, key);
  if (valid_key(key)) return key;
  const auto sections = parse_sections(content);
  if (sections.ok() && sections->size() == 1)
    key = value_of(sections->front(), "public");
  if (!valid_key(key))
    return corrupt(path +
                   ": neither a public key of 40 characters nor a file "
                   "that has one");
  return key;
}

Result<std::string> public_key_of(const std::string& text) {
  Result<std::string> read = read_public_key(text);
  if (read.status().code() == Code::kNotFound && valid_key(text)) return text;
  return read;
}

std::string ticket_text(const Ticket& t) {
  return section_text({{"public", t.public_key},
                       {"worker", t.worker},
                       {"job", t.job},
                       {"expires", fmt::format("{}", t.expires)}});
}

Result<Ticket> parse_ticket(const std::string& text) {
  ASSIGN_OR_RETURN(const auto sections, parse_sections(text));
  if (sections.size() != 1) return corrupt("not a ticket");
  Ticket t{.public_key = value_of(sections[0], "public"),
           .worker = value_of(sections[0], "worker"),
           .job = value_of(sections[0], "job")};
  const auto expires = parse_number<int64_t>(value_of(sections[0], "expires"));
  if (!valid_key(t.public_key) || !expires) return corrupt("not a ticket");
  t.expires = *expires;
  return t;
}

}  // namespace remesh::wire
