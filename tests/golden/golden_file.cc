#include "tests/golden/golden_file.h"

#include <fmt/format.h>
#include <hdf5.h>

#include <numeric>

namespace remesh::golden {
namespace {

// An HDF5 handle that closes itself.
class Handle {
 public:
  Handle(hid_t id, herr_t (*close)(hid_t)) : id_(id), close_(close) {}
  ~Handle() {
    if (id_ >= 0) close_(id_);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  bool ok() const { return id_ >= 0; }
  operator hid_t() const { return id_; }  // NOLINT: used as the id

 private:
  hid_t id_;
  herr_t (*close_)(hid_t);
};

class Reader {
 public:
  Reader(hid_t file, std::string path) : file_(file), path_(std::move(path)) {}

  bool has_attribute(const std::string& name) const {
    return H5Aexists(file_, name.c_str()) > 0;
  }
  bool has_group(const std::string& name) const {
    return H5Lexists(file_, name.c_str(), H5P_DEFAULT) > 0;
  }
  // A reader whose names are relative to the group.
  template <typename F>
  Status in_group(const std::string& name, const F& f) const {
    const Handle group(H5Gopen2(file_, name.c_str(), H5P_DEFAULT), H5Gclose);
    if (!group.ok()) return bad(name + " is not a group");
    return f(Reader(group, path_ + ": " + name));
  }
  // Numbers and enums of numbers, converted by HDF5.
  Status attribute(const std::string& name, double& out) const {
    if (!has_attribute(name)) return bad("attribute " + name + " is missing");
    const Handle a(H5Aopen(file_, name.c_str(), H5P_DEFAULT), H5Aclose);
    const Handle stored(H5Aget_type(a), H5Tclose);
    const Handle space(H5Aget_space(a), H5Sclose);
    if (H5Sget_simple_extent_npoints(space) != 1)
      return bad("attribute " + name + " is not one number");
    if (H5Tget_class(stored) == H5T_ENUM && H5Tget_size(stored) == 1) {
      int8_t v = 0;
      if (H5Aread(a, stored, &v) < 0) return bad("attribute " + name);
      out = v;
      return ok_status();
    }
    const H5T_class_t kind = H5Tget_class(stored);
    if ((kind != H5T_INTEGER && kind != H5T_FLOAT) ||
        H5Aread(a, H5T_NATIVE_DOUBLE, &out) < 0)
      return bad("attribute " + name + " is not a number");
    return ok_status();
  }
  Status attribute(const std::string& name, int64_t& out) const {
    double v = 0;
    RETURN_IF_ERROR(attribute(name, v));
    out = static_cast<int64_t>(v);
    return ok_status();
  }
  Status attribute(const std::string& name, bool& out) const {
    double v = 0;
    RETURN_IF_ERROR(attribute(name, v));
    out = v != 0;
    return ok_status();
  }
  // A string of any length, as h5py writes it.
  Status attribute(const std::string& name, std::string& out) const {
    const Handle a(H5Aopen(file_, name.c_str(), H5P_DEFAULT), H5Aclose);
    const Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
    char* text = nullptr;
    if (!a.ok() || H5Tset_size(type, H5T_VARIABLE) < 0 ||
        H5Tset_cset(type, H5T_CSET_UTF8) < 0 || H5Aread(a, type, &text) < 0 ||
        text == nullptr)
      return bad("attribute " + name + " is not a string");
    out = text;
    H5free_memory(text);
    return ok_status();
  }

  Result<std::vector<int64_t>> shape(const std::string& name) const {
    const Handle d(H5Dopen2(file_, name.c_str(), H5P_DEFAULT), H5Dclose);
    if (!d.ok()) return bad(name + " is missing");
    const Handle space(H5Dget_space(d), H5Sclose);
    const int rank = H5Sget_simple_extent_ndims(space);
    if (rank < 0 || rank > 8) return bad(name + " has no simple shape");
    std::vector<hsize_t> dims(static_cast<size_t>(rank));
    H5Sget_simple_extent_dims(space, dims.data(), nullptr);
    return std::vector<int64_t>(dims.begin(), dims.end());
  }
  // Reads a data set of exactly this shape into `out`.
  Status read(const std::string& name, const std::vector<int64_t>& want,
              hid_t type, void* out) const {
    ASSIGN_OR_RETURN(const std::vector<int64_t> found, shape(name));
    if (found != want)
      return bad(fmt::format("{} has shape ({}), expected ({})", name,
                             fmt::join(found, ", "), fmt::join(want, ", ")));
    const Handle d(H5Dopen2(file_, name.c_str(), H5P_DEFAULT), H5Dclose);
    if (H5Dread(d, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, out) < 0)
      return bad(name + " does not read");
    return ok_status();
  }
  Status read(const std::string& name, const std::vector<int64_t>& want,
              std::vector<float>& out) const {
    out.resize(count(want));
    return read(name, want, H5T_NATIVE_FLOAT, out.data());
  }
  Status read(const std::string& name, const std::vector<int64_t>& want,
              std::vector<double>& out) const {
    out.resize(count(want));
    return read(name, want, H5T_NATIVE_DOUBLE, out.data());
  }
  Status read_parameters(const std::string& group,
                         const geometry::ParamTable& table,
                         std::vector<float>& flat) const {
    flat.resize(static_cast<size_t>(table.num_elements()));
    for (size_t i = 0; i < table.size(); ++i)
      RETURN_IF_ERROR(read(group + "/" + table[i].name, table[i].shape,
                           H5T_NATIVE_FLOAT, flat.data() + table.offset(i)));
    return ok_status();
  }
  Status bad(const std::string& what) const {
    return corrupt(path_ + ": " + what);
  }

 private:
  static size_t count(const std::vector<int64_t>& shape) {
    return static_cast<size_t>(std::accumulate(
        shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()));
  }
  hid_t file_;
  std::string path_;
};

Status read_config(const Reader& r, geometry::ModelConfig& c) {
  RETURN_IF_ERROR(r.attribute("config.hidden_size", c.dim));
  RETURN_IF_ERROR(r.attribute("config.num_hidden_layers", c.n_layers));
  RETURN_IF_ERROR(r.attribute("config.num_attention_heads", c.n_heads));
  RETURN_IF_ERROR(r.attribute("config.num_key_value_heads", c.n_kv_heads));
  RETURN_IF_ERROR(r.attribute("config.intermediate_size", c.hidden_dim));
  RETURN_IF_ERROR(r.attribute("config.vocab_size", c.vocab_size));
  RETURN_IF_ERROR(r.attribute("config.rms_norm_eps", c.norm_eps));
  RETURN_IF_ERROR(r.attribute("config.rope_theta", c.rope_theta));
  RETURN_IF_ERROR(r.attribute("config.tie_word_embeddings", c.tie_embeddings));
  if (r.has_attribute("config.model_type"))
    RETURN_IF_ERROR(r.attribute("config.model_type", c.arch));
  if (r.has_attribute("config.head_dim")) {
    int64_t size = 0;
    RETURN_IF_ERROR(r.attribute("config.head_dim", size));
    c.set_head_dim(size);
  }
  if (r.has_attribute("config.sliding_window"))
    RETURN_IF_ERROR(r.attribute("config.sliding_window", c.sliding_window));
  c.rope_scaled = r.has_attribute("config.rope_scaling.factor");
  if (c.rope_scaled) {
    const std::string p = "config.rope_scaling.";
    geometry::RopeScaling& s = c.rope_scaling;
    RETURN_IF_ERROR(r.attribute(p + "factor", s.factor));
    RETURN_IF_ERROR(r.attribute(p + "low_freq_factor", s.low_freq_factor));
    RETURN_IF_ERROR(r.attribute(p + "high_freq_factor", s.high_freq_factor));
    RETURN_IF_ERROR(r.attribute(p + "original_max_position_embeddings",
                                s.original_max_position));
  }
  const Status valid = c.validate();
  return valid.ok() ? valid : r.bad(valid.message());
}

Status read_optimizer(const Reader& r, Golden& g) {
  RETURN_IF_ERROR(r.attribute("optimizer.beta1", g.optimizer.beta1));
  RETURN_IF_ERROR(r.attribute("optimizer.beta2", g.optimizer.beta2));
  RETURN_IF_ERROR(r.attribute("optimizer.eps", g.optimizer.eps));
  RETURN_IF_ERROR(
      r.attribute("optimizer.weight_decay", g.optimizer.weight_decay));
  RETURN_IF_ERROR(r.attribute("optimizer.clip_norm", g.optimizer.max_norm));
  RETURN_IF_ERROR(r.attribute("optimizer.lr", g.schedule.lr));
  RETURN_IF_ERROR(
      r.attribute("optimizer.warmup_steps", g.schedule.warmup_steps));
  RETURN_IF_ERROR(r.attribute("optimizer.total_steps", g.schedule.total_steps));
  RETURN_IF_ERROR(
      r.attribute("optimizer.min_lr_ratio", g.schedule.min_lr_factor));
  g.schedule.decay = jobfile::Decay::kCosine;
  return ok_status();
}

Status read_tokens(const Reader& r, Golden& g) {
  ASSIGN_OR_RETURN(const std::vector<int64_t> shape, r.shape("tokens"));
  if (shape.size() != 3 || shape[0] < 1 || shape[1] < 1 || shape[2] < 2)
    return r.bad("tokens is not (steps, sequences, T + 1)");
  g.steps = shape[0];
  g.sequences = shape[1];
  g.seq_len = shape[2] - 1;
  g.tokens.resize(static_cast<size_t>(shape[0] * shape[1] * shape[2]));
  RETURN_IF_ERROR(r.read("tokens", shape, H5T_NATIVE_INT32, g.tokens.data()));
  for (const int32_t t : g.tokens)
    if (t < 0 || t >= g.config.vocab_size)
      return r.bad(
          fmt::format("token {}, allowed 0 .. {}", t, g.config.vocab_size - 1));
  return ok_status();
}

Status read_errors(const Reader& r, const geometry::ParamTable& table,
                   StepErrors& errors) {
  RETURN_IF_ERROR(r.attribute("loss", errors.loss));
  RETURN_IF_ERROR(r.attribute("logits_row0", errors.logits));
  for (size_t i = 0; i < table.size(); ++i) {
    std::vector<double> error;
    RETURN_IF_ERROR(r.read("grads/" + table[i].name, {}, error));
    errors.gradients.push_back(error[0]);
  }
  return ok_status();
}

}  // namespace

Result<Golden> read_golden(const std::string& path) {
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  const Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT),
                    H5Fclose);
  if (!file.ok())
    return corrupt(path + ": missing, not readable or not an HDF5 file");
  const Reader r(file, path);
  Golden g;
  RETURN_IF_ERROR(read_config(r, g.config));
  RETURN_IF_ERROR(read_optimizer(r, g));
  RETURN_IF_ERROR(read_tokens(r, g));
  const auto table = geometry::ParamTable::make(g.config);
  RETURN_IF_ERROR(r.read_parameters("weights", table, g.weights));
  RETURN_IF_ERROR(r.read_parameters("first/grads", table, g.first_grads));
  RETURN_IF_ERROR(
      r.read_parameters("train/weights_after", table, g.weights_after));
  std::vector<double> loss;
  RETURN_IF_ERROR(r.read("first/loss", {}, loss));
  g.first_loss = loss[0];
  RETURN_IF_ERROR(r.read("first/logits_row0", {g.seq_len, g.config.vocab_size},
                         g.first_logits));
  RETURN_IF_ERROR(r.read("train/loss", {g.steps}, g.loss));
  RETURN_IF_ERROR(r.read("train/grad_norm", {g.steps}, g.grad_norm));
  RETURN_IF_ERROR(r.read("train/lr", {g.steps}, g.lr));
  if (r.has_group("autocast_bf16"))
    RETURN_IF_ERROR(r.in_group("autocast_bf16", [&](const Reader& group) {
      return read_errors(group, table, g.autocast.emplace());
    }));
  return g;
}

}  // namespace remesh::golden
