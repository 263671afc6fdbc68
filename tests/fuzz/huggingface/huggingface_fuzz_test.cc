// Fuzzes (tests/testing/fuzz.h) the files of Hugging Face models.

#include <string>
#include <vector>

#include "checkpoint/huggingface/config.h"
#include "checkpoint/huggingface/other_formats.h"
#include "checkpoint/huggingface/safetensors.h"
#include "tests/testing/expect.h"
#include "tests/testing/fuzz.h"
#include "tests/unit/huggingface/files.h"

namespace remesh::huggingface {
namespace {

// Reads every element of what is accepted.
TEST(HuggingFaceFuzz, Safetensors) {
  const std::string written =
      safetensors_header(std::vector<TensorShape>{{"model.norm.weight", {5}},
                                                  {"lm_head.weight", {3, 5}}},
                         Dtype::kBf16) +
      std::string(40, '\x3f');
  fuzz({safetensors(kSmallHeader, kSmallBytes), written}, 10000,
       [](const std::string& file) -> Status {
         ASSIGN_OR_RETURN(const Tensors tensors,
                          parse_safetensors(as_bytes(file), "m"));
         size_t bytes = 0;
         for (const auto& [name, t] : tensors) {
           bytes += t.bytes.size();
           EXPECT_LE(t.bytes.size(), file.size());
           if (t.dtype == Dtype::kOther) continue;
           std::vector<float> values(static_cast<size_t>(t.numel()));
           read_elements(t, 0, values);
         }
         EXPECT_LE(bytes + 8, file.size());
         return ok_status();
       });
}

TEST(HuggingFaceFuzz, Llama2c) {
  // dim 4, hidden 3, one layer, 2 heads, 1 for keys, 5 tokens, a context of 2.
  const std::vector<int32_t> sizes = {4, 3, 1, 2, 1, 5, 2};
  const size_t elements = 20 + 4 + 16 + 8 + 8 + 16 + 4 + 36 + 4 + 4;
  std::string file(reinterpret_cast<const char*>(sizes.data()), 28);
  file += std::string(4 * elements, '\x3f');
  fuzz({file}, 10000, [](const std::string& mutant) -> Status {
    ASSIGN_OR_RETURN(const NamedTensors m,
                     parse_llama2c(as_bytes(mutant), "m"));
    for (const auto& [name, t] : m.tensors) {
      std::vector<float> values(static_cast<size_t>(t.numel()));
      read_elements(t, 0, values);
    }
    return ok_status();
  });
}

TEST(HuggingFaceFuzz, Config) {
  fuzz({kOldConfig, kNewConfig}, 10000, [](const std::string& text) -> Status {
    ASSIGN_OR_RETURN(const Config c, parse_config(text, "config.json"));
    EXPECT_OK(c.model.validate());
    const auto again = parse_config(config_json(c, Dtype::kFp16), "written");
    EXPECT_OK(again);
    if (again.ok()) {
      EXPECT_EQ(again->model, c.model);
    }
    return ok_status();
  });
}

}  // namespace
}  // namespace remesh::huggingface
