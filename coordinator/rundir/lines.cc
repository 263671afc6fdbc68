#include "coordinator/rundir/lines.h"

#include <fmt/format.h>

#include <charconv>
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

// A digest is written as 16 hexadecimal digits: readers of JSON keep 53 bits of
// a number.
std::string digest_text(uint64_t digest) {
  return fmt::format("{:016x}", digest);
}

template <typename Set>
bool digest_field(const Json& j, Set set) {
  bool good = true;
  return field<std::string>(j, "digest",
                            [&](const std::string& text) {
                              uint64_t v = 0;
                              const char* end = text.data() + text.size();
                              const auto r =
                                  std::from_chars(text.data(), end, v, 16);
                              good = r.ec == std::errc() && r.ptr == end;
                              if (good) set(v);
                            }) &&
         good;
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
  // Redundant, for the convenience of readers.
  add("gemm_efficiency", m.gemm_flops_per_s() > 0,
      m.flops_per_s() / m.gemm_flops_per_s());
  add("mfu", m.has_mfu(), m.mfu());
  add("exposed_comm", m.has_exposed_comm(), m.exposed_comm());
  add("bubble", m.has_bubble(), m.bubble());
  if (m.has_digest())
    out += fmt::format(R"(,"digest":"{}")", digest_text(m.digest()));
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
       field<D>(j, "mfu", [&](D v) { m.set_mfu(v); }) &&
       field<D>(j, "exposed_comm", [&](D v) { m.set_exposed_comm(v); }) &&
       field<D>(j, "bubble", [&](D v) { m.set_bubble(v); }) &&
       digest_field(j, [&](uint64_t v) { m.set_digest(v); });
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
  if (e.has_host()) j["host"] = e.host();
  if (e.has_signal()) j["signal"] = e.signal();
  if (e.has_exit_code()) j["exit_code"] = e.exit_code();
  if (e.has_doing()) j["doing"] = e.doing();
  if (e.last_log_size() > 0) {
    j["last_log"] = Json::array();
    for (const std::string& line : e.last_log()) j["last_log"].push_back(line);
  }
  if (e.has_flight_record()) j["flight_record"] = e.flight_record();
  if (e.has_digest()) j["digest"] = digest_text(e.digest());
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
       field<S>(j, "detail", [&](const S& v) { e.set_detail(v); }) &&
       field<S>(j, "host", [&](const S& v) { e.set_host(v); }) &&
       field<I>(j, "signal", [&](I v) { e.set_signal(v); }) &&
       field<I>(j, "exit_code", [&](I v) { e.set_exit_code(v); }) &&
       field<S>(j, "doing", [&](const S& v) { e.set_doing(v); }) &&
       field<S>(j, "flight_record",
                [&](const S& v) { e.set_flight_record(v); }) &&
       digest_field(j, [&](uint64_t v) { e.set_digest(v); });
  if (const auto log = j.find("last_log"); ok && log != j.end()) {
    ok = log->is_array();
    for (size_t i = 0; ok && i < log->size(); ++i) {
      ok = (*log)[i].is_string();
      if (ok) e.add_last_log((*log)[i].get<std::string>());
    }
  }
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
