#include "checkpoint/huggingface/adapters.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "checkpoint/huggingface/file_tensors.h"
#include "parallel/geometry/lora.h"

namespace remesh::huggingface {
namespace {

using geometry::ParamSpec;
using geometry::ParamTable;

std::string config_text(const geometry::Lora& lora,
                        const std::string& base_path) {
  return nlohmann::ordered_json{{"peft_type", "LORA"},
                                {"task_type", "CAUSAL_LM"},
                                {"base_model_name_or_path", base_path},
                                {"r", lora.rank},
                                {"lora_alpha", lora.alpha},
                                {"lora_dropout", 0.0},
                                {"target_modules", lora.targets},
                                {"bias", "none"},
                                {"fan_in_fan_out", false},
                                {"inference_mode", true},
                                {"use_rslora", false},
                                {"modules_to_save", nullptr}}
             .dump(2) +
         "\n";
}

}  // namespace

void add_adapters(const Adapters& adapters, const ParamTable& base,
                  std::span<const geometry::Piece> pieces,
                  std::span<float> weights) {
  const geometry::Lora& lora = adapters.table.config().lora;
  const auto scale = static_cast<float>(lora.scale());
  for (const geometry::Piece& p : pieces) {
    const ParamSpec& matrix = base[p.param];
    if (!has_adapter(matrix, lora)) continue;
    const int found = adapters.table.find(matrix.role, matrix.layer);
    CHECK(found >= 0);
    const auto i = static_cast<size_t>(found);
    const float* const a = adapters.values.data() + adapters.table.offset(i);
    const float* const b =
        adapters.values.data() + adapters.table.offset(i + 1);
    for (int64_t r = 0; r < p.rect.rows; ++r) {
      float* const out = weights.data() + p.at + r * p.row_stride;
      for (int64_t k = 0; k < lora.rank; ++k) {
        const float factor = scale * b[(p.rect.row + r) * lora.rank + k];
        const float* const row = a + k * matrix.shape[1] + p.rect.col;
        for (int64_t c = 0; c < p.rect.cols; ++c) out[c] += factor * row[c];
      }
    }
  }
}

Result<uint64_t> write_peft(FileSystem& fs, const Adapters& adapters,
                            const std::string& base_path, Dtype dtype,
                            const std::string& folder) {
  const ParamTable& table = adapters.table;
  const ParamTable base = ParamTable::make(table.config().base());
  if (file_tensors(base).size() != base.size())
    return invalid_argument(fmt::format(
        "files of {} have several matrices as one, so an adapter of one of "
        "them cannot be written; export the merged model",
        table.config().arch));
  std::vector<TensorShape> shapes;
  for (size_t i = 0; i < table.size(); ++i) {
    const ParamSpec& s = table[i];
    shapes.push_back({geometry::kPeftPrefix + s.name, s.shape});
    RETURN_IF_ERROR(
        check_range(dtype,
                    std::span(adapters.values)
                        .subspan(static_cast<size_t>(table.offset(i)),
                                 static_cast<size_t>(s.numel())),
                    s.name));
  }
  const std::string header = safetensors_header(shapes, dtype);
  std::string file = header;
  file.resize(header.size() + adapters.values.size() * dtype_size(dtype));
  write_elements(
      dtype, adapters.values,
      std::as_writable_bytes(std::span(file)).subspan(header.size()));
  RETURN_IF_ERROR(
      write_file(fs, path_join(folder, "adapter_model.safetensors"), file));
  RETURN_IF_ERROR(write_file(fs, path_join(folder, "adapter_config.json"),
                             config_text(table.config().lora, base_path)));
  return file.size() - header.size();
}

}  // namespace remesh::huggingface
