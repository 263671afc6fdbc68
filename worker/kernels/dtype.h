// Dtype: the element types that kernels compute in.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/base/float16.h"

namespace remesh::kernels {

enum class Dtype { kFp32, kBf16 };

constexpr size_t dtype_size(Dtype d) { return d == Dtype::kFp32 ? 4 : 2; }
constexpr const char* dtype_name(Dtype d) {
  return d == Dtype::kFp32 ? "fp32" : "bf16";
}

// Element i of an array of that type.
inline void* element(void* p, Dtype d, int64_t i) {
  return static_cast<char*>(p) + i * static_cast<int64_t>(dtype_size(d));
}

using remesh::Bf16;
using remesh::to_bf16;
using remesh::to_float;

}  // namespace remesh::kernels
