#include "coordinator/rundir/lines.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace remesh::rundir {
namespace {

using Json = nlohmann::ordered_json;

std::string number(double v) {
  return std::isfinite(v) ? fmt::format("{:.17g}", v) : "null";
}

Json parse_object(std::string_view line) {
  return Json::parse(line, nullptr, /*allow_exceptions=*/false);
}

// The typed getters: false when the key is there with another type.
bool get(const Json& j, const char* key, bool* has, double* out) {
  const auto it = j.find(key);
  *has = it != j.end();
  if (!*has) return true;
  if (it->is_null()) {
    *out = std::numeric_limits<double>::quiet_NaN();
    return true;
  }
  if (!it->is_number()) return false;
  *out = it->get<double>();
  return true;
}

bool get(const Json& j, const char* key, bool* has, int64_t* out) {
  const auto it = j.find(key);
  *has = it != j.end();
  if (!*has) return true;
  if (!it->is_number_integer()) return false;
  *out = it->get<int64_t>();
  return true;
}

bool get(const Json& j, const char* key, bool* has, std::string* out) {
  const auto it = j.find(key);
  *has = it != j.end();
  if (!*has) return true;
  if (!it->is_string()) return false;
  *out = it->get<std::string>();
  return true;
}

// Sets a field by `set` when the key is there; false on a wrong type.
template <typename T, typename Set>
bool field(const Json& j, const char* key, Set set) {
  bool has = false;
  T value{};
  if (!get(j, key, &has, &value)) return false;
  if (has) set(value);
  return true;
}

bool mesh_field(const Json& j, pb::Mesh* mesh) {
  if (!j.is_object()) return false;
  return field<int64_t>(j, "dp", [&](int64_t v) { mesh->set_dp(v); }) &&
         field<int64_t>(j, "pp", [&](int64_t v) { mesh->set_pp(v); }) &&
         field<int64_t>(j, "tp", [&](int64_t v) { mesh->set_tp(v); }) &&
         field<int64_t>(j, "cp", [&](int64_t v) { mesh->set_cp(v); });
}

Json mesh_json(const pb::Mesh& m) {
  Json j{{"dp", m.dp()}, {"pp", m.pp()}, {"tp", m.tp()}};
  if (m.cp() != 1) j["cp"] = m.cp();
  return j;
}

std::string shown(std::string_view line) {
  return std::string(line.substr(0, 60));
}

}  // namespace

std::string metrics_line(const pb::StepMetrics& m) {
  std::string out = fmt::format(
      R"({{"step":{},"loss":{},"grad_norm":{},"lr":{},"tokens":{},)"
      R"("tokens_per_s":{},"step_s":{},"generation":{},"mesh":{},"time":{})",
      m.step(), number(m.loss()), number(m.grad_norm()), number(m.lr()),
      m.tokens(), number(m.tokens_per_s()), number(m.step_s()), m.generation(),
      mesh_json(m.mesh()).dump(), number(m.time()));
  if (m.has_val_loss()) {
    out += fmt::format(R"(,"val_loss":{})", number(m.val_loss()));
  }
  const auto add = [&](const char* key, bool has, double value) {
    if (has) out += fmt::format(R"(,"{}":{})", key, number(value));
  };
  add("flops_per_s", m.has_flops_per_s(), m.flops_per_s());
  add("gemm_flops_per_s", m.has_gemm_flops_per_s(), m.gemm_flops_per_s());
  // For readers; the two above say it.
  add("mfu", m.gemm_flops_per_s() > 0, m.flops_per_s() / m.gemm_flops_per_s());
  add("exposed_comm", m.has_exposed_comm(), m.exposed_comm());
  add("bubble", m.has_bubble(), m.bubble());
  return out + "}";
}

Result<pb::StepMetrics> parse_metrics_line(std::string_view line) {
  const Json j = parse_object(line);
  pb::StepMetrics m;
  bool ok = j.is_object() && j.contains("step") && j.contains("loss");
  using D = double;
  using I = int64_t;
  ok = ok && field<I>(j, "step", [&](I v) { m.set_step(v); }) &&
       field<D>(j, "loss", [&](D v) { m.set_loss(v); }) &&
       field<D>(j, "grad_norm", [&](D v) { m.set_grad_norm(v); }) &&
       field<D>(j, "lr", [&](D v) { m.set_lr(v); }) &&
       field<I>(j, "tokens", [&](I v) { m.set_tokens(v); }) &&
       field<D>(j, "tokens_per_s", [&](D v) { m.set_tokens_per_s(v); }) &&
       field<D>(j, "step_s", [&](D v) { m.set_step_s(v); }) &&
       field<I>(j, "generation", [&](I v) { m.set_generation(v); }) &&
       field<D>(j, "time", [&](D v) { m.set_time(v); }) &&
       field<D>(j, "val_loss", [&](D v) { m.set_val_loss(v); }) &&
       field<D>(j, "flops_per_s", [&](D v) { m.set_flops_per_s(v); }) &&
       field<D>(j, "gemm_flops_per_s",
                [&](D v) { m.set_gemm_flops_per_s(v); }) &&
       field<D>(j, "exposed_comm", [&](D v) { m.set_exposed_comm(v); }) &&
       field<D>(j, "bubble", [&](D v) { m.set_bubble(v); });
  if (ok && j.contains("mesh")) ok = mesh_field(j["mesh"], m.mutable_mesh());
  if (!ok || m.step() < 1) {
    return corrupt("not a line of metrics: \"" + shown(line) + "\"");
  }
  return m;
}

std::string event_line(const pb::EventRecord& e) {
  Json j;
  j["time"] = std::round(e.time() * 1e6) / 1e6;
  if (e.has_generation()) j["generation"] = e.generation();
  j["event"] = e.event();
  if (e.has_worker()) j["worker"] = e.worker();
  if (e.has_rank()) j["rank"] = e.rank();
  if (e.has_step()) j["step"] = e.step();
  if (e.has_mesh()) j["mesh"] = mesh_json(e.mesh());
  if (e.has_from()) j["from"] = mesh_json(e.from());
  if (e.has_cause()) j["cause"] = e.cause();
  if (e.has_source()) j["source"] = e.source();
  if (e.has_lost_steps()) j["lost_steps"] = e.lost_steps();
  if (e.has_seconds()) j["seconds"] = e.seconds();
  if (e.has_detail()) j["detail"] = e.detail();
  return j.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<pb::EventRecord> parse_event_line(std::string_view line) {
  const Json j = parse_object(line);
  pb::EventRecord e;
  using D = double;
  using I = int64_t;
  using S = std::string;
  bool ok = j.is_object() && j.contains("event");
  ok = ok && field<D>(j, "time", [&](D v) { e.set_time(v); }) &&
       field<I>(j, "generation", [&](I v) { e.set_generation(v); }) &&
       field<S>(j, "event", [&](const S& v) { e.set_event(v); }) &&
       field<S>(j, "worker", [&](const S& v) { e.set_worker(v); }) &&
       field<I>(j, "rank", [&](I v) { e.set_rank(v); }) &&
       field<I>(j, "step", [&](I v) { e.set_step(v); }) &&
       field<S>(j, "cause", [&](const S& v) { e.set_cause(v); }) &&
       field<S>(j, "source", [&](const S& v) { e.set_source(v); }) &&
       field<I>(j, "lost_steps", [&](I v) { e.set_lost_steps(v); }) &&
       field<D>(j, "seconds", [&](D v) { e.set_seconds(v); }) &&
       field<S>(j, "detail", [&](const S& v) { e.set_detail(v); });
  if (ok && j.contains("mesh")) ok = mesh_field(j["mesh"], e.mutable_mesh());
  if (ok && j.contains("from")) ok = mesh_field(j["from"], e.mutable_from());
  if (!ok) return corrupt("not an event line: \"" + shown(line) + "\"");
  return e;
}

std::string mesh_text(const pb::Mesh& mesh) {
  std::string out = fmt::format("dp{}", mesh.dp());
  if (mesh.pp() > 1) out += fmt::format(" pp{}", mesh.pp());
  if (mesh.tp() > 1) out += fmt::format(" tp{}", mesh.tp());
  if (mesh.cp() > 1) out += fmt::format(" cp{}", mesh.cp());
  return out;
}

}  // namespace remesh::rundir
