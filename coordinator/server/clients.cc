#include "coordinator/server/clients.h"

#include <fmt/format.h>

#include "proto/base/status.h"
#include "proto/base/text.h"

namespace remesh::server {

pb::Reply not_now(const pb::JobStatus::Problem& problem,
                  const std::string& consequence) {
  pb::Reply reply;
  reply.set_code(code_name(Code::kExhausted));
  reply.set_error(fmt::format("{}, for {}; {}", problem.text(),
                              format_duration(problem.seconds()), consequence));
  return reply;
}

}  // namespace remesh::server
