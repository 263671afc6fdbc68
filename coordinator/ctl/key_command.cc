// `remesh key`: the keys of a run's control plane.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "coordinator/ctl/verbs.h"
#include "coordinator/rundir/run_dir.h"
#include "coordinator/rundir/run_keys.h"
#include "proto/base/clock.h"
#include "proto/base/file_system.h"
#include "proto/base/sharing.h"
#include "proto/base/text.h"
#include "proto/limits/plausible.h"

namespace remesh::ctl {
namespace {

// How long a key that was replaced remains good, for its holder to notice.
constexpr int64_t kOldKeyS = 3600;

struct KeyOptions {
  std::string role;
  std::string name;
  std::string public_key;
  std::string run;
  std::string workers = "*";
  std::string out;
  double days = 0;
  bool json = false;
};

// What a verb has done, as text and as JSON.
struct KeyDone {
  std::string text;
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
};

using rundir::AllowedKey;

AllowedKey described(const KeyOptions& o) {
  const double end = unix_seconds() + o.days * 86'400;
  return {.role = o.role,
          .name = o.name,
          .workers = o.workers,
          .expires = o.days > 0 ? static_cast<int64_t>(end) : 0};
}

// Commands at the same time would lose each other's keys. Until this process
// ends.
Status lock_keys(const std::string& run) {
  const std::string path = rundir::keys_path(run);
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0 || flock(fd, LOCK_EX) != 0) return errno_error(path, errno);
  return ok_status();
}

// The run of the command. It need not have started yet if it is given.
Result<std::string> run_with_keys(const KeyOptions& o) {
  std::string run = absolute_path(o.run);
  if (o.run.empty()) {
    ASSIGN_OR_RETURN(run, rundir::find_run(""));
  }
  ASSIGN_OR_RETURN(const bool has_keys,
                   rundir::has_keys(*posix_file_system(), run));
  if (has_keys) {
    RETURN_IF_ERROR(lock_keys(run));
    return run;
  }
  return not_found(fmt::format(
      "{}: has no keys; make them with: remesh key new coordinator head {}",
      run, rundir::typed_path(run)));
}

// A pair for a member whose secret key never leaves its host.
Result<KeyDone> make_alone(const KeyOptions& o) {
  const wire::KeyPair pair = wire::new_key_pair();
  RETURN_IF_ERROR(wire::create_key_file(
      o.out, {.role = o.role, .name = o.name, .pair = pair}));
  std::string options;
  if (o.workers != "*") options += " --workers " + shell_quoted(o.workers);
  if (o.days > 0) options += fmt::format(" --days {}", o.days);
  return KeyDone{
      fmt::format("made {}; where the run is, type:\nremesh key allow {} {} {} "
                  "RUN{}",
                  o.out, o.role, shell_quoted(o.name),
                  shell_quoted(pair.public_key), options),
      {{"path", o.out}, {"public", pair.public_key}}};
}

Result<KeyDone> make_key(const KeyOptions& o) {
  const auto fs = posix_file_system();
  if (o.role == "coordinator") {
    if (o.run.empty())
      return invalid_argument(
          "name the run directory: remesh key new "
          "coordinator NAME RUN");
    const std::string run = absolute_path(o.run);
    ASSIGN_OR_RETURN(const bool has_keys, rundir::has_keys(*fs, run));
    if (has_keys)
      return already_exists(rundir::keys_path(run) + ": has keys already");
    RETURN_IF_ERROR(rundir::make_keys(*fs, run));
    return KeyDone{fmt::format("made {}; programs that see this folder use its "
                               "keys.\nFor a worker "
                               "that does not: remesh key new worker NAME {}",
                               rundir::keys_path(run), rundir::typed_path(run)),
                   {{"path", rundir::keys_path(run)}}};
  }
  if (o.run.empty() && !o.out.empty()) return make_alone(o);
  ASSIGN_OR_RETURN(const std::string run, run_with_keys(o));
  ASSIGN_OR_RETURN(const std::string path,
                   rundir::make_member(*fs, run, described(o), o.out));
  return KeyDone{
      fmt::format("made {}; it is secret: copy it only to where it is used",
                  path),
      {{"path", path}}};
}

Result<KeyDone> allow_key(const KeyOptions& o) {
  ASSIGN_OR_RETURN(const std::string run, run_with_keys(o));
  ASSIGN_OR_RETURN(auto keys, rundir::read_allowed(run));
  AllowedKey key = described(o);
  ASSIGN_OR_RETURN(key.public_key, wire::public_key_of(o.public_key));
  std::erase_if(keys, [&](const AllowedKey& k) {
    return k.public_key == key.public_key;
  });
  // `revoke` takes names.
  if (key.name == "coordinator" ||
      std::ranges::count(keys, key.name, &AllowedKey::name) > 0)
    return already_exists(fmt::format(
        "there is a key '{}' already; choose another name", key.name));
  keys.push_back(std::move(key));
  RETURN_IF_ERROR(rundir::write_allowed(*posix_file_system(), run, keys));
  return KeyDone{"allowed"};
}

Result<KeyDone> list_keys(const KeyOptions& o) {
  ASSIGN_OR_RETURN(const std::string run, run_with_keys(o));
  ASSIGN_OR_RETURN(const auto keys, rundir::read_allowed(run));
  ASSIGN_OR_RETURN(const std::string server,
                   wire::read_public_key(rundir::server_key_path(run)));
  KeyDone out{fmt::format("{:<12} {:<16} {}", "coordinator", "", server),
              {{"coordinator", server}}};
  auto array = nlohmann::ordered_json::array();
  for (const AllowedKey& k : keys) {
    const bool good = k.good_at(unix_seconds());
    out.text += fmt::format(
        "\n{:<12} {:<16} {}  workers {}{}", k.role, k.name, k.public_key,
        k.workers,
        k.expires == 0 ? ""
        : good ? "  until " + rundir::date_text(static_cast<double>(k.expires))
               : "  expired");
    array.push_back({{"role", k.role},
                     {"name", k.name},
                     {"public", k.public_key},
                     {"workers", k.workers},
                     {"expires", or_null(k.expires != 0, k.expires)},
                     {"good", good}});
  }
  out.json["keys"] = std::move(array);
  return out;
}

// The entry of that name. The error lists the names.
Result<AllowedKey> named(const std::vector<AllowedKey>& keys,
                         const std::string& name) {
  std::vector<std::string> names;
  for (const AllowedKey& k : keys) {
    if (k.name == name || k.public_key == name) return k;
    names.push_back(k.name);
  }
  return not_found(
      fmt::format("no key '{}'; the keys are: {}", name, join(names)));
}

Result<KeyDone> revoke_key(const KeyOptions& o) {
  ASSIGN_OR_RETURN(const std::string run, run_with_keys(o));
  ASSIGN_OR_RETURN(auto keys, rundir::read_allowed(run));
  ASSIGN_OR_RETURN(const AllowedKey gone, named(keys, o.name));
  // Also the one that it replaces, which is the same member.
  std::erase_if(keys, [&](const AllowedKey& k) {
    return k.public_key == gone.public_key || k.name == gone.name ||
           k.public_key == gone.replaces;
  });
  const auto fs = posix_file_system();
  RETURN_IF_ERROR(rundir::write_allowed(*fs, run, keys));
  (void)fs->remove(rundir::key_path(run, gone.name)).ok();
  return KeyDone{"revoked; a running coordinator gives up its workers at once"};
}

Result<KeyDone> rotate_key(const KeyOptions& o) {
  ASSIGN_OR_RETURN(const std::string run, run_with_keys(o));
  const auto fs = posix_file_system();
  if (o.name == "coordinator") {
    RETURN_IF_ERROR(rundir::make_next_key(run));
    return KeyDone{
        "a running coordinator tells its members the new key now; it uses it "
        "when it is restarted, which does not interrupt training"};
  }
  ASSIGN_OR_RETURN(const auto keys, rundir::read_allowed(run));
  ASSIGN_OR_RETURN(const AllowedKey old, named(keys, o.name));
  AllowedKey key = old;
  key.replaces = old.public_key;
  const std::string path =
      o.out.empty() ? rundir::key_path(run, old.name) : o.out;
  (void)fs->remove(path + ".new").ok();
  ASSIGN_OR_RETURN(
      const std::string made,
      rundir::make_member(*fs, run, key, path + ".new",
                          static_cast<int64_t>(unix_seconds()) + kOldKeyS));
  RETURN_IF_ERROR(fs->rename(made, path));
  return KeyDone{
      fmt::format("made {}; programs that use this file notice. The old key is "
                  "good for one more hour",
                  path),
      {{"path", path}}};
}

struct KeyVerb {
  const char* name;
  const char* help;
  Result<KeyDone> (*run)(const KeyOptions&);
};

constexpr KeyVerb kKeyVerbs[] = {
    {"new", "Make a key, and allow it in a run", make_key},
    {"allow", "Allow a public key that was made elsewhere", allow_key},
    {"list", "Show who may talk to the coordinator", list_keys},
    {"revoke", "Take a key's rights; a running coordinator notices",
     revoke_key},
    {"rotate", "Replace a key; its holder stays connected", rotate_key},
};

void declare(const KeyVerb& verb, CLI::App* c, KeyOptions* o) {
  const bool makes = verb.run == make_key;
  const bool describes = makes || verb.run == allow_key;
  std::vector<std::string> roles = {"worker", "operator", "viewer", "join"};
  if (makes) roles.insert(roles.begin(), "coordinator");
  if (describes)
    c->add_option("ROLE", o->role,
                  makes ? "coordinator (all keys of a new run), worker, "
                          "operator (all commands), viewer (status), join "
                          "(admits workers: the secret of a batch job)"
                        : "worker, operator, viewer or join")
        ->required()
        ->check(CLI::IsMember(roles));
  if (verb.run != list_keys) {
    CLI::Option* name =
        c->add_option("NAME", o->name, "Name of the key")->required();
    // It is part of a file's name, and of a line.
    if (describes)
      name->check([](const std::string& text) {
        return std::string(limits::valid_name(text) ? "" : limits::kNameRule);
      });
  }
  if (verb.run == allow_key)
    c->add_option("PUBLIC", o->public_key, "Public key, or a file with it")
        ->required();
  add_run_option(c, &o->run, "RUN", "Run directory");
  if (describes) {
    c->add_option("--workers", o->workers,
                  "Pattern of the worker names that it may use")
        ->capture_default_str();
    c->add_option("--days", o->days, "Good for this many days; 0: no end")
        ->check(number_in(0, 36500));
  }
  if (makes || verb.run == rotate_key)
    c->add_option(
        "--out", o->out,
        std::string("File. Default: RUN/keys/NAME.key") +
            (makes ? "; with it and without RUN, only the file is made" : ""));
}

}  // namespace

void add_key_verbs(CLI::App* app, int* code) {
  CLI::App* key =
      app->add_subcommand("key", "Say who may talk to the coordinator");
  key->require_subcommand(1);
  key->footer(R"(
Examples:
  remesh key new coordinator head /shared/runs/a
  remesh key new viewer anna /shared/runs/a --out anna.key
  remesh key new join batch /shared/runs/a --days 2
  remesh key revoke anna /shared/runs/a
  remesh key rotate coordinator /shared/runs/a

`remesh run` makes the keys of its run, and programs that see the run directory
find them there. Others need --key FILE. SECURITY.md has the details.)");
  for (const KeyVerb& verb : kKeyVerbs) {
    auto o = std::make_shared<KeyOptions>();
    CLI::App* c = key->add_subcommand(verb.name, verb.help);
    declare(verb, c, o.get());
    add_json_option(c, &o->json);
    c->callback([o, code, run = verb.run] {
      const Status own = share_new_files(/*group=*/"");
      const Result<KeyDone> done = own.ok() ? run(*o) : own;
      *code = done.ok() ? print_done(o->json, done->json, done->text + "\n")
                        : exit_code(done.status());
    });
  }
}

}  // namespace remesh::ctl
