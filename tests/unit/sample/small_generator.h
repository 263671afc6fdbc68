// A small model with a vocabulary of bytes, opened from a Hugging Face folder.
#pragma once

#include <cstring>
#include <memory>

#include "tests/testing/expect.h"
#include "tests/unit/huggingface/small_folder.h"
#include "worker/sample/generator.h"

namespace remesh::sample {

struct SmallGenerator {
  explicit SmallGenerator(int64_t sliding_window = 0)
      : files(huggingface::Dtype::kFp32, model(sliding_window)),
        backend(kernels::make_reference_backend()) {
    // Small weights, so that no logit overflows.
    for (std::string& tensor : files.tensors)
      for (size_t i = 0; i + 4 <= tensor.size(); i += 4) {
        const float x =
            static_cast<float>((i * 2654435761U) % 1000) / 1000 - 0.5F;
        std::memcpy(&tensor[i], &x, sizeof x);
      }
    files.put_weights();
  }
  static geometry::ModelConfig model(int64_t sliding_window) {
    geometry::ModelConfig c = huggingface::small_model();
    c.vocab_size = 257;
    c.sliding_window = sliding_window;
    if (sliding_window > 0) c.arch = "mistral";
    return c;
  }
  std::unique_ptr<Generator> open(int64_t context,
                                  int64_t window = Generator::kWindow) const {
    const auto fs = posix_file_system();
    const auto weights = open_weights(*fs, {.weights = files.path()});
    EXPECT_OK(weights);
    auto made = Generator::load(*weights, kernels::Dtype::kFp32, context,
                                *backend, window);
    EXPECT_OK(made);
    return std::move(*made);
  }

  huggingface::SmallFolder files;
  std::unique_ptr<kernels::Backend> backend;
};

}  // namespace remesh::sample
