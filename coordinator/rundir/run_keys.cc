#include "coordinator/rundir/run_keys.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <ctime>
#include <set>

#include "coordinator/rundir/run_dir.h"
#include "proto/base/text.h"

namespace remesh::rundir {
namespace {

constexpr const char* kCoordinator = "coordinator";
constexpr const char* kTimeForm = "%Y-%m-%dT%H:%M:%SZ";

Result<int64_t> parse_time(const std::string& text) {
  tm parts{};
  const char* end = strptime(text.c_str(), kTimeForm, &parts);
  if (end == nullptr || *end != '\0')
    return invalid_argument(fmt::format(
        "expires \"{}\": expected a time like 2026-12-31T00:00:00Z", text));
  return timegm(&parts);
}

Result<AllowedKey> allowed_from(wire::Section s) {
  AllowedKey k{.public_key = s["public"],
               .role = s["role"],
               .name = s["name"],
               .replaces = s["replaces"]};
  if (!s["workers"].empty()) k.workers = s["workers"];
  if (!wire::valid_key(k.public_key))
    return invalid_argument(
        fmt::format("public \"{}\": not a key of 40 characters", k.public_key));
  static const std::set<std::string> kRoles = {"worker", "operator", "viewer",
                                               "join"};
  if (kRoles.count(k.role) == 0)
    return invalid_argument(fmt::format(
        "role \"{}\": must be worker, operator, viewer or join", k.role));
  if (!s["expires"].empty()) {
    ASSIGN_OR_RETURN(k.expires, parse_time(s["expires"]));
  }
  return k;
}

}  // namespace

Result<std::vector<AllowedKey>> parse_allowed(const std::string& text) {
  ASSIGN_OR_RETURN(const auto sections, wire::parse_sections(text));
  std::vector<AllowedKey> out;
  std::set<std::string> keys;
  for (const wire::Section& s : sections) {
    ASSIGN_OR_RETURN(AllowedKey key, allowed_from(s));
    if (!keys.insert(key.public_key).second)
      return invalid_argument("key " + key.public_key + " is listed twice");
    out.push_back(std::move(key));
  }
  return out;
}

std::string allowed_text(const std::vector<AllowedKey>& keys) {
  std::string out =
      "# Who may talk to the coordinator of this run; it reads this file "
      "again\n# when it changes. See remesh key --help.\n";
  for (const AllowedKey& k : keys)
    out +=
        "\n" + wire::section_text(
                   {{"public", k.public_key},
                    {"role", k.role},
                    {"name", k.name},
                    {"workers", k.workers},
                    {"replaces", k.replaces},
                    {"expires", k.expires == 0
                                    ? ""
                                    : time_text(static_cast<double>(k.expires),
                                                kTimeForm, /*utc=*/true)}});
  return out;
}

Result<std::vector<AllowedKey>> read_allowed(const std::string& run) {
  RETURN_IF_ERROR(wire::check_keys_folder(keys_path(run)));
  const std::string path = allowed_path(run);
  ASSIGN_OR_RETURN(const std::string text, read_file(path));
  return parse_allowed(text).with_context(path);
}

Status write_allowed(FileSystem& fs, const std::string& run,
                     const std::vector<AllowedKey>& keys) {
  return write_file_atomically(fs, allowed_path(run), allowed_text(keys));
}

Result<bool> has_keys(FileSystem& fs, const std::string& run) {
  const Status there = fs.look_up(key_path(run, kCoordinator));
  if (there.code() == Code::kNotFound) return false;
  RETURN_IF_ERROR(there);
  return true;
}

// coordinator.key is last: without it there are no keys yet.
Status make_keys(FileSystem& fs, const std::string& run) {
  ASSIGN_OR_RETURN(const bool made, has_keys(fs, run));
  if (made) return ok_status();
  RETURN_IF_ERROR(create(run));
  const std::string folder = keys_path(run);
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST)
    return errno_error(folder, errno);
  RETURN_IF_ERROR(wire::check_keys_folder(folder));
  const std::string next = next_key_path(run);
  for (const std::string& left :
       {next, key_path(run, "worker"), key_path(run, "operator")})
    (void)fs.remove(left).ok();
  RETURN_IF_ERROR(make_next_key(run));
  ASSIGN_OR_RETURN(const std::string server, wire::read_public_key(next));
  RETURN_IF_ERROR(
      write_file_atomically(fs, server_key_path(run), server + "\n"));
  RETURN_IF_ERROR(write_allowed(fs, run, {}));
  for (const char* role : {"worker", "operator"})
    RETURN_IF_ERROR(
        make_member(fs, run, {.role = role, .name = role}, "").status());
  return promote_next_key(fs, run);
}

Result<std::string> make_member(FileSystem& fs, const std::string& run,
                                AllowedKey key, std::string out,
                                int64_t old_until) {
  if (key.name == kCoordinator)
    return invalid_argument(
        "the coordinator's own key has this name; choose another one");
  ASSIGN_OR_RETURN(const std::string server,
                   wire::read_public_key(server_key_path(run)));
  ASSIGN_OR_RETURN(std::vector<AllowedKey> all, read_allowed(run));
  for (const AllowedKey& k : all)
    if (k.name == key.name && k.public_key != key.replaces)
      return already_exists(fmt::format(
          "{}: there is a key named {} already (role {}); choose another name",
          allowed_path(run), k.name, k.role));
  const wire::KeyPair pair = wire::new_key_pair();
  key.public_key = pair.public_key;
  if (out.empty()) out = key_path(run, key.name);
  RETURN_IF_ERROR(wire::create_key_file(
      out,
      {.role = key.role, .name = key.name, .pair = pair, .server = server}));
  // The one before the one that is replaced ends now.
  std::string before;
  for (AllowedKey& k : all) {
    if (key.replaces.empty() || k.public_key != key.replaces) continue;
    before = k.replaces;
    k.name += "-old";
    k.expires = k.expires == 0 ? old_until : std::min(k.expires, old_until);
  }
  std::erase_if(all, [&](const AllowedKey& k) {
    return !before.empty() && k.public_key == before;
  });
  all.push_back(std::move(key));
  const Status allowed = write_allowed(fs, run, all);
  if (allowed.ok()) return out;
  // Nobody would be let in with it, unless only the last sync has failed.
  const auto now = read_allowed(run);
  if (now.ok() &&
      std::ranges::count(*now, pair.public_key, &AllowedKey::public_key) == 0)
    (void)fs.remove(out).ok();
  return allowed;
}

Status make_next_key(const std::string& run) {
  return wire::create_key_file(next_key_path(run),
                               {.role = kCoordinator,
                                .name = kCoordinator,
                                .pair = wire::new_key_pair()});
}

Status promote_next_key(FileSystem& fs, const std::string& run) {
  const std::string next = next_key_path(run);
  const Status there = fs.look_up(next);
  if (there.code() == Code::kNotFound) return ok_status();
  RETURN_IF_ERROR(there);
  ASSIGN_OR_RETURN(const wire::KeyFile file, wire::read_key_file(next));
  RETURN_IF_ERROR(write_file_atomically(fs, server_key_path(run),
                                        file.pair.public_key + "\n"));
  RETURN_IF_ERROR(fs.rename(next, key_path(run, kCoordinator)));
  return fs.sync_dir(keys_path(run));
}

}  // namespace remesh::rundir
