// A library to be preloaded into remesh-worker: the name stuck.invalid is never
// resolved, as if no name server answered. When it is asked for, the file
// $REMESH_TEST_ASKED is created.
#include <dlfcn.h>
#include <netdb.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>

extern "C" int getaddrinfo(const char* host, const char* service,
                           const addrinfo* hints, addrinfo** found) {
  static const auto real =
      reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  if (host == nullptr || std::strcmp(host, "stuck.invalid") != 0)
    return real(host, service, hints, found);
  if (const char* asked = std::getenv("REMESH_TEST_ASKED"))
    std::ofstream(asked) << host;
  for (;;) pause();
}
