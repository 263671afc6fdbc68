#include "parallel/planner/description.h"

namespace remesh::planner {

Machine machine_of(const pb::Cluster& c) {
  constexpr double kTera = 1e12, kGiga = 1e9, kMicro = 1e-6;
  const pb::Device& d = c.device();
  const pb::Efficiency& e = c.efficiency();
  const int64_t switch_devices =
      c.network().switch_nodes() * c.node().devices();
  const double fp32 =
      d.peak_fp32_tflops() > 0 ? d.peak_fp32_tflops() : d.peak_tflops() / 2;
  return {
      .flops = d.peak_tflops() * kTera * e.gemm(),
      .fp32_flops = fp32 * kTera * e.gemm(),
      .fp8_flops = d.peak_fp8_tflops() * kTera * e.gemm_fp8(),
      .attention_flops = d.peak_tflops() * kTera * e.attention(),
      .fp32_attention_flops =
          fp32 * kTera *
          (e.fp32_attention() > 0 ? e.fp32_attention() : e.attention()),
      .tuned_attention_flops = d.peak_tflops() * kTera * e.tuned_attention(),
      .memory_bytes_per_s = d.memory_gb_per_s() * kGiga * e.memory(),
      .memory_bytes = d.memory_gb() * kGiga,
      .peak_flops = d.peak_tflops() * kTera,
      .peak_fp8_flops = d.peak_fp8_tflops() * kTera,
      .cores = d.cores(),
      .launch_s = e.launch_us() * kMicro,
      .gemm_gap_s = e.gap_us() * kMicro,
      .gemm_ramp = e.gemm_ramp(),
      .contention = e.contention(),
      .straggle = e.straggle(),
      .node_devices = static_cast<int>(c.node().devices()),
      .node_bytes_per_s = c.node().gb_per_s() * kGiga * e.node(),
      .network_bytes_per_s = c.network().gb_per_s() * kGiga * e.network(),
      .switch_devices =
          switch_devices > 0 ? switch_devices : Machine{}.switch_devices,
      .oversubscription = c.network().oversubscription(),
      .in_switch = c.node().in_switch(),
      .collective_base_s = c.node().base_us() * kMicro,
      .node_hop_s = c.node().hop_us() * kMicro,
      .network_hop_s = c.network().hop_us() * kMicro,
  };
}

Result<geometry::ModelConfig> model_of(const pb::ModelFile& file) {
  const pb::ModelShape& m = file.model();
  geometry::ModelConfig c{
      .dim = m.dim(),
      .n_layers = m.n_layers(),
      .n_heads = m.n_heads(),
      .n_kv_heads = m.n_kv_heads() == -1 ? m.n_heads() : m.n_kv_heads(),
      .hidden_dim = m.hidden_dim(),
      .vocab_size = m.vocab_size(),
      .tie_embeddings = m.tie_embeddings()};
  if (m.head_dim() > 0) c.set_head_dim(m.head_dim());
  RETURN_IF_ERROR(c.validate());
  c.arch = m.arch();
  return c;
}

geometry::ModelConfig model_of_engine(geometry::ModelConfig model) {
  if (model.arch == "gpt") model.arch = "llama";
  return model;
}

}  // namespace remesh::planner
