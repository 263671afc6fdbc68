// Safetensors files, the format of Hugging Face's weights
// (github.com/huggingface/safetensors): a little-endian length, a JSON header
// of that length which names the tensors, and their elements, row-major and
// little-endian, without holes or overlaps.
//
// A file is read where it lies in memory (MappedFile) and written from front to
// back. Everything here is a pure function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "proto/base/status.h"

namespace remesh::huggingface {

// The types of weights. Tensors of other types are described, not read.
enum class Dtype { kFp32, kBf16, kFp16, kOther };

size_t dtype_size(Dtype d);  // REQUIRES: not kOther
// "F32", "BF16", "F16" in a header; "float32", "bfloat16", "float16" in
// config.json; "fp32", "bf16", "fp16" for people.
const char* header_name(Dtype d);
const char* config_name(Dtype d);
Result<Dtype> parse_dtype(const std::string& name);  // for people

struct Tensor {
  Dtype dtype = Dtype::kFp32;
  std::string dtype_name;  // as in the header
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
  int64_t numel() const;
};
using Tensors = std::map<std::string, Tensor>;

// The tensors of a file whose bytes are `file`, which must outlive them. Fails
// with Corrupt, naming `name` and the tensor: the header is cut short, longer
// than the format's 100 MB, not JSON or not of this form; a name appears twice;
// sizes overflow or differ from the range of bytes; ranges overlap, leave holes
// or do not end where the file ends.
Result<Tensors> parse_safetensors(std::span<const std::byte> file,
                                  const std::string& name);

// Elements [begin, begin + out.size()) of a tensor as fp32, which every type
// converts to exactly. REQUIRES: dtype is not kOther; the range is inside.
void read_elements(const Tensor& tensor, int64_t begin, std::span<float> out);
// `values` as elements of a file, rounded to nearest even.
// REQUIRES: dtype is not kOther; out.size() is values.size() elements.
void write_elements(Dtype dtype, std::span<const float> values,
                    std::span<std::byte> out);

// InvalidArgument, naming the tensor, if one of the values is finite and would
// become infinite in the file: fp16 has nothing beyond 65504.
Status check_range(Dtype dtype, std::span<const float> values,
                   const std::string& tensor);

// A tensor to write.
struct TensorShape {
  std::string name;
  std::vector<int64_t> shape;
};
// What precedes the elements of these tensors, which follow in this order.
std::string safetensors_header(std::span<const TensorShape> tensors,
                               Dtype dtype);

// For messages: in quotes, without control characters, cut to 100 bytes.
std::string printable(const std::string& name);

}  // namespace remesh::huggingface
