// Usage: pmix_intruder UID, with the environment of a rank. As user UID it
// connects to the PMIx server as that rank does, and claims to be the user that
// started it. Exit code 0: it was let in.
#include <grp.h>
#include <pmix.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace {
uid_t g_claimed = 0;
}  // namespace

// PMIx puts these into its credentials.
extern "C" uid_t geteuid() noexcept { return g_claimed; }
extern "C" gid_t getegid() noexcept { return g_claimed; }

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  g_claimed = getuid();
  const auto uid = static_cast<uid_t>(std::atoi(argv[1]));
  if (setgroups(0, nullptr) != 0 || setresgid(uid, uid, uid) != 0 ||
      setresuid(uid, uid, uid) != 0)
    return 2;
  pmix_proc_t self;
  const pmix_status_t rc = PMIx_Init(&self, nullptr, 0);
  std::printf("%s\n", PMIx_Error_string(rc));
  std::fflush(stdout);
  _exit(rc == PMIX_SUCCESS ? 0 : 1);
}
