#include "checkpoint/huggingface/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>

#include "checkpoint/huggingface/json.h"
#include "proto/base/check.h"
#include "proto/base/float16.h"

namespace remesh::huggingface {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeader = 100'000'000;
constexpr char kMetadata[] = "__metadata__";
// An element count beyond any model's, so that sizes in bits do not overflow.
constexpr int64_t kMaxElements = int64_t{1} << 56;

constexpr struct {
  Dtype dtype;
  const char *header, *config, *short_name;
} kDtypes[] = {{Dtype::kFp32, "F32", "float32", "fp32"},
               {Dtype::kBf16, "BF16", "bfloat16", "bf16"},
               {Dtype::kFp16, "F16", "float16", "fp16"}};

constexpr struct {
  const char* name;
  uint64_t bytes;
} kSizes[] = {{"BOOL", 1}, {"U8", 1},  {"I8", 1},   {"F8_E4M3", 1}, {"I16", 2},
              {"U16", 2},  {"F16", 2}, {"BF16", 2}, {"I32", 4},     {"U32", 4},
              {"F32", 4},  {"F64", 8}, {"I64", 8},  {"F8_E5M2", 1}, {"U64", 8}};

const auto& row_of(Dtype d) {
  const auto* const row =
      std::find_if(std::begin(kDtypes), std::end(kDtypes),
                   [&](const auto& r) { return r.dtype == d; });
  CHECK(row != std::end(kDtypes));
  return *row;
}

bool is_size(const Json& value) { return value.is_number_unsigned(); }

// What is wrong with the entry of a tensor, or "".
std::string parse_entry(const Json& entry, uint64_t data_bytes, Tensor& out,
                        uint64_t& begin) {
  if (!entry.is_object()) return "must be an object";
  const auto dtype = entry.find("dtype");
  const auto shape = entry.find("shape");
  const auto offsets = entry.find("data_offsets");
  if (dtype == entry.end() || !dtype->is_string()) return "has no dtype";
  if (shape == entry.end() || !shape->is_array() ||
      !std::all_of(shape->begin(), shape->end(), is_size))
    return "has no shape of non-negative integers";
  if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2 ||
      !is_size((*offsets)[0]) || !is_size((*offsets)[1]))
    return "has no data_offsets of two non-negative integers";
  out.dtype_name = dtype->get<std::string>();
  const auto* const size =
      std::find_if(std::begin(kSizes), std::end(kSizes),
                   [&](const auto& s) { return out.dtype_name == s.name; });
  if (size == std::end(kSizes))
    return fmt::format("dtype {}: unknown", printable(out.dtype_name));
  out.dtype = Dtype::kOther;
  for (const auto& row : kDtypes)
    if (out.dtype_name == row.header) out.dtype = row.dtype;
  int64_t numel = 1;
  for (const Json& dim : *shape) {
    const auto n = dim.get<uint64_t>();
    if (n > kMaxElements ||
        (n > 0 && numel > kMaxElements / static_cast<int64_t>(n)))
      return fmt::format("shape {}: too large", shape->dump());
    numel *= static_cast<int64_t>(n);
    out.shape.push_back(static_cast<int64_t>(n));
  }
  begin = (*offsets)[0].get<uint64_t>();
  const auto end = (*offsets)[1].get<uint64_t>();
  if (begin > end || end > data_bytes)
    return fmt::format("data_offsets {}: the file has {} bytes of data",
                       offsets->dump(), data_bytes);
  if (end - begin != static_cast<uint64_t>(numel) * size->bytes)
    return fmt::format("data_offsets {}: {} elements of {} need {} bytes",
                       offsets->dump(), numel, size->name,
                       static_cast<uint64_t>(numel) * size->bytes);
  return "";
}

template <typename T>
void widen(const std::byte* from, std::span<float> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, from + i * sizeof(T), sizeof(T));
    out[i] = to_float(value);
  }
}

template <typename F>
void narrow(std::span<const float> values, std::byte* to, const F& round) {
  for (const float value : values) {
    const auto element = round(value);
    std::memcpy(to, &element, sizeof(element));
    to += sizeof(element);
  }
}

// Ok if the tensors cover the data without holes and overlaps.
Status check_cover(const Tensors& tensors, std::span<const std::byte> data,
                   const std::string& name) {
  std::vector<const Tensors::value_type*> order;
  for (const auto& t : tensors) order.push_back(&t);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    const auto &x = a->second.bytes, &y = b->second.bytes;
    return x.data() != y.data() ? x.data() < y.data() : x.size() < y.size();
  });
  const std::byte* at = data.data();
  for (const auto* t : order) {
    const std::span<const std::byte> bytes = t->second.bytes;
    if (bytes.data() != at)
      return corrupt(fmt::format(
          "{}: tensor {}: {} before it, at byte {} of the data", name,
          printable(t->first), bytes.data() < at ? "an overlap" : "a hole",
          bytes.data() - data.data()));
    at += bytes.size();
  }
  if (at != data.data() + data.size())
    return corrupt(fmt::format("{}: {} bytes follow the last tensor", name,
                               data.data() + data.size() - at));
  return ok_status();
}

}  // namespace

std::string printable(const std::string& name) {
  return Json(name.substr(0, 100))
      .dump(-1, ' ', true, Json::error_handler_t::replace);
}

size_t dtype_size(Dtype d) {
  CHECK(d != Dtype::kOther);
  return d == Dtype::kFp32 ? 4 : 2;
}

const char* header_name(Dtype d) { return row_of(d).header; }
const char* config_name(Dtype d) { return row_of(d).config; }

Result<Dtype> parse_dtype(const std::string& name) {
  for (const auto& row : kDtypes)
    if (name == row.short_name) return row.dtype;
  return invalid_argument(
      fmt::format("dtype '{}': must be one of fp32, bf16, fp16", name));
}

int64_t Tensor::numel() const {
  int64_t n = 1;
  for (const int64_t dim : shape) n *= dim;
  return n;
}

Result<Tensors> parse_safetensors(std::span<const std::byte> file,
                                  const std::string& name) {
  uint64_t length = 0;
  if (file.size() < kLengthBytes)
    return corrupt(fmt::format(
        "{}: truncated: {} bytes, a safetensors file begins with a length of 8",
        name, file.size()));
  std::memcpy(&length, file.data(), kLengthBytes);
  file = file.subspan(kLengthBytes);
  if (length > kMaxHeader)
    return corrupt(fmt::format(
        "{}: a header of {} bytes; at most {} are allowed: not a safetensors "
        "file?",
        name, length, kMaxHeader));
  if (length > file.size())
    return corrupt(
        fmt::format("{}: truncated: a header of {} bytes, but only {} follow",
                    name, length, file.size()));
  const std::string_view text(reinterpret_cast<const char*>(file.data()),
                              length);
  const std::span<const std::byte> data = file.subspan(length);
  if (!text.starts_with('{'))
    return corrupt(name + ": the header must begin with '{'");
  ASSIGN_OR_RETURN(const Json header, parse_json(text, name + ": header"));
  Tensors tensors;
  for (const auto& [key, entry] : header.items()) {
    if (key == kMetadata) continue;
    Tensor tensor;
    uint64_t begin = 0;
    const std::string problem = parse_entry(entry, data.size(), tensor, begin);
    if (!problem.empty())
      return corrupt(
          fmt::format("{}: tensor {}: {}", name, printable(key), problem));
    const auto& offsets = entry["data_offsets"];
    tensor.bytes = data.subspan(begin, offsets[1].get<uint64_t>() - begin);
    tensors.emplace(key, std::move(tensor));
  }
  RETURN_IF_ERROR(check_cover(tensors, data, name));
  return tensors;
}

void read_elements(const Tensor& tensor, int64_t begin, std::span<float> out) {
  CHECK(begin >= 0 && begin <= tensor.numel() &&
        static_cast<int64_t>(out.size()) <= tensor.numel() - begin);
  const std::byte* const from =
      tensor.bytes.data() +
      static_cast<size_t>(begin) * dtype_size(tensor.dtype);
  if (tensor.dtype == Dtype::kFp32)
    std::memcpy(out.data(), from, out.size_bytes());
  else if (tensor.dtype == Dtype::kBf16)
    widen<Bf16>(from, out);
  else
    widen<Fp16>(from, out);
}

void write_elements(Dtype dtype, std::span<const float> values,
                    std::span<std::byte> out) {
  CHECK(out.size() == values.size() * dtype_size(dtype));
  if (dtype == Dtype::kFp32)
    std::memcpy(out.data(), values.data(), out.size());
  else if (dtype == Dtype::kBf16)
    narrow(values, out.data(), to_bf16);
  else
    narrow(values, out.data(), to_fp16);
}

Status check_range(Dtype dtype, std::span<const float> values,
                   const std::string& tensor) {
  if (dtype == Dtype::kFp32) return ok_status();
  // The smallest that is rounded to infinity.
  const float limit = dtype == Dtype::kFp16 ? 65520.0F : 0x1.ffp127F;
  const auto beyond =
      std::find_if(values.begin(), values.end(), [&](float value) {
        return std::abs(value) >= limit && std::isfinite(value);
      });
  if (beyond == values.end()) return ok_status();
  return invalid_argument(
      fmt::format("tensor {} has the value {}, which is too large for {}",
                  printable(tensor), *beyond, row_of(dtype).short_name));
}

std::string safetensors_header(std::span<const TensorShape> tensors,
                               Dtype dtype) {
  // Without this entry, transformers refuses the file.
  nlohmann::ordered_json header = {{kMetadata, {{"format", "pt"}}}};
  uint64_t at = 0;
  for (const TensorShape& t : tensors) {
    uint64_t bytes = dtype_size(dtype);
    for (const int64_t dim : t.shape) bytes *= static_cast<uint64_t>(dim);
    header[t.name] = {{"dtype", header_name(dtype)},
                      {"shape", t.shape},
                      {"data_offsets", {at, at + bytes}}};
    at += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::string out(kLengthBytes, '\0');
  std::memcpy(out.data(), &length, kLengthBytes);
  return out + text;
}

}  // namespace remesh::huggingface
