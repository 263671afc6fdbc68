#include "tests/unit/model/golden_file.h"

#include <hdf5.h>

#include <functional>
#include <numeric>

#include "proto/base/check.h"

namespace remesh::model {
namespace {

template <typename T>
hid_t native_type();
template <>
hid_t native_type<float>() {
  return H5T_NATIVE_FLOAT;
}
template <>
hid_t native_type<double>() {
  return H5T_NATIVE_DOUBLE;
}
template <>
hid_t native_type<int32_t>() {
  return H5T_NATIVE_INT32;
}
template <>
hid_t native_type<int64_t>() {
  return H5T_NATIVE_INT64;
}

class File {
 public:
  explicit File(const std::string& path)
      : id_(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT)) {
    CHECK_MSG(id_ >= 0, path.c_str());
  }
  ~File() { H5Fclose(id_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  template <typename T>
  std::vector<T> read(const std::string& name,
                      std::vector<int64_t>* shape = nullptr) const {
    const hid_t set = H5Dopen2(id_, name.c_str(), H5P_DEFAULT);
    CHECK_MSG(set >= 0, name.c_str());
    const hid_t space = H5Dget_space(set);
    std::vector<hsize_t> dims(
        static_cast<size_t>(H5Sget_simple_extent_ndims(space)));
    H5Sget_simple_extent_dims(space, dims.data(), nullptr);
    const hsize_t count = std::accumulate(dims.begin(), dims.end(), hsize_t{1},
                                          std::multiplies<>());
    std::vector<T> values(count);
    CHECK(H5Dread(set, native_type<T>(), H5S_ALL, H5S_ALL, H5P_DEFAULT,
                  values.data()) >= 0);
    if (shape != nullptr) shape->assign(dims.begin(), dims.end());
    H5Sclose(space);
    H5Dclose(set);
    return values;
  }

  bool has_attribute(const char* name) const {
    return H5Aexists(id_, name) > 0;
  }
  template <typename T>
  T attribute(const char* name) const {
    const hid_t a = H5Aopen(id_, name, H5P_DEFAULT);
    CHECK_MSG(a >= 0, name);
    T value{};
    CHECK(H5Aread(a, native_type<T>(), &value) >= 0);
    H5Aclose(a);
    return value;
  }
  // h5py stores a bool as an 8-bit enum.
  bool flag(const char* name) const {
    const hid_t a = H5Aopen(id_, name, H5P_DEFAULT);
    CHECK_MSG(a >= 0, name);
    const hid_t type = H5Aget_type(a);
    int8_t value = 0;
    CHECK(H5Tget_size(type) == 1 && H5Aread(a, type, &value) >= 0);
    H5Tclose(type);
    H5Aclose(a);
    return value != 0;
  }

 private:
  hid_t id_;
};

geometry::ModelConfig read_config(const File& f) {
  geometry::ModelConfig c;
  c.dim = f.attribute<int64_t>("config.hidden_size");
  c.n_layers = f.attribute<int64_t>("config.num_hidden_layers");
  c.n_heads = f.attribute<int64_t>("config.num_attention_heads");
  c.n_kv_heads = f.attribute<int64_t>("config.num_key_value_heads");
  c.hidden_dim = f.attribute<int64_t>("config.intermediate_size");
  c.vocab_size = f.attribute<int64_t>("config.vocab_size");
  c.norm_eps = f.attribute<double>("config.rms_norm_eps");
  c.rope_theta = f.attribute<double>("config.rope_theta");
  c.tie_embeddings = f.flag("config.tie_word_embeddings");
  c.rope_scaled = f.has_attribute("config.rope_scaling.rope_type");
  if (c.rope_scaled) {
    const std::string p = "config.rope_scaling.";
    c.rope_scaling.factor = f.attribute<double>((p + "factor").c_str());
    c.rope_scaling.low_freq_factor =
        f.attribute<double>((p + "low_freq_factor").c_str());
    c.rope_scaling.high_freq_factor =
        f.attribute<double>((p + "high_freq_factor").c_str());
    c.rope_scaling.original_max_position =
        f.attribute<int64_t>((p + "original_max_position_embeddings").c_str());
  }
  return c;
}

}  // namespace

GoldenFile read_golden(const std::string& path) {
  const File f(path);
  GoldenFile g;
  g.config = read_config(f);
  std::vector<int64_t> shape;
  const std::vector<int32_t> tokens = f.read<int32_t>("/tokens", &shape);
  CHECK(shape.size() == 3);
  g.B = shape[1];
  g.T = shape[2] - 1;
  for (int64_t b = 0; b < g.B; ++b)
    for (int64_t t = 0; t < g.T; ++t) {
      g.tokens_BT.push_back(tokens[static_cast<size_t>(b * (g.T + 1) + t)]);
      g.targets_BT.push_back(
          tokens[static_cast<size_t>(b * (g.T + 1) + t + 1)]);
    }
  g.loss = f.read<double>("/first/loss").at(0);
  g.logits_row0 = f.read<float>("/first/logits_row0");
  const auto append = [](std::vector<float>& to,
                         const std::vector<float>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  const auto table = geometry::ParamTable::make(g.config);
  for (const geometry::ParamSpec& spec : table.specs()) {
    append(g.weights, f.read<float>("/weights/" + spec.name));
    append(g.grads, f.read<float>("/first/grads/" + spec.name));
  }
  return g;
}

}  // namespace remesh::model
