#include "proto/wire/key_choice.h"

#include <fmt/format.h>

#include "proto/rundir/paths.h"

namespace remesh::wire {

Result<std::optional<ClientKeys>> choose_keys(const KeyChoice& c) {
  if (c.no_auth) return std::optional<ClientKeys>();
  const std::string run = c.run.empty() ? "RUN" : c.run;
  const std::string make = fmt::format(
      "on the coordinator's host, `remesh key new {} NAME {}` makes one; "
      "without keys on both sides: --no-auth",
      c.member, run);
  const std::string path =
      c.key.empty() && !c.run.empty() ? rundir::key_path(run, c.member) : c.key;
  if (path.empty())
    return invalid_argument("no key: give its file with --key; " + make);
  const auto file = read_key_file(path);
  if (!file.ok())
    return Status(file.status().code() == Code::kNotFound
                      ? Code::kInvalidArgument
                      : file.status().code(),
                  file.status().message() + "; " + make);
  ClientKeys out{.own = file->pair, .server = file->server};
  if (!c.server.empty()) {
    ASSIGN_OR_RETURN(out.server, public_key_of(c.server));
  } else if (!c.run.empty() && check_keys_folder(rundir::keys_path(run)).ok()) {
    const auto here = read_public_key(rundir::server_key_path(run));
    if (here.ok()) out.server = *here;
  }
  if (out.server.empty())
    return invalid_argument(
        path +
        ": does not name the coordinator's public key; give it with "
        "--server-key (RUN/keys/coordinator.pub)");
  if (file->role == "join") {
    if (c.own.public_key.empty())
      return invalid_argument(path +
                              ": a job secret (role join) is for workers");
    out.enrolment = {file->pair, c.worker, c.job};
    out.own = c.own;
  }
  return std::optional<ClientKeys>(std::move(out));
}

}  // namespace remesh::wire
