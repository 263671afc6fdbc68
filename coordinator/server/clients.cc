#include "coordinator/server/clients.h"

#include <fmt/format.h>

#include "proto/base/status.h"
#include "proto/base/text.h"

namespace remesh::server {

void Clients::answer(uint64_t token, pb::Reply reply, wire::Server* server) {
  const auto client = clients_.extract(token);
  if (!client.empty())
    send(client.mapped().peer, client.mapped().id, std::move(reply), server);
}

void Clients::answer_at_end(pb::JobStatus status, wire::Server* server) const {
  pb::Reply reply;
  reply.set_ok(true);
  *reply.mutable_status() = std::move(status);
  for (const auto& [peer, id] : await_end_) send(peer, id, reply, server);
}

void Clients::send(const wire::PeerId& peer, uint64_t id, pb::Reply reply,
                   wire::Server* server) const {
  pb::Envelope out;
  out.set_job(job_);
  reply.set_id(id);
  *out.mutable_reply() = std::move(reply);
  server->send(peer, out);
}

pb::Reply not_now(const pb::JobStatus::Problem& problem,
                  const std::string& consequence) {
  pb::Reply reply;
  reply.set_code(code_name(Code::kExhausted));
  reply.set_error(fmt::format("{}, for {}; {}", problem.text(),
                              format_duration(problem.seconds()), consequence));
  return reply;
}

}  // namespace remesh::server
