// A library to be preloaded into remesh-worker: makes its PMIx server lock
// itself up, once. When a namespace is deregistered and the file
// $REMESH_TEST_PMIX_STUCK exists, the file is removed and PMIx's only thread
// never returns from its next callback, so that neither this call nor a later
// one is answered. PMIx 4.2.2 does the same by itself now and then, when a rank
// is killed while it connects.
#include <dlfcn.h>
#include <pmix_server.h>
#include <unistd.h>

#include <cstdlib>

namespace {

void never_returns(pmix_status_t, void*) {
  for (;;) pause();
}

}  // namespace

extern "C" void PMIx_server_deregister_nspace(const pmix_nspace_t space,
                                              pmix_op_cbfunc_t callback,
                                              void* argument) {
  static const auto real =
      reinterpret_cast<decltype(&PMIx_server_deregister_nspace)>(
          dlsym(RTLD_NEXT, "PMIx_server_deregister_nspace"));
  const char* trigger = std::getenv("REMESH_TEST_PMIX_STUCK");
  const bool stick = trigger != nullptr && unlink(trigger) == 0;
  real(space, stick ? never_returns : callback, argument);
}
