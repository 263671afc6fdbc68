#include "checkpoint/huggingface/safetensors.h"

#include <vector>

#include "tests/testing/expect.h"
#include "tests/unit/huggingface/files.h"

namespace remesh::huggingface {
namespace {

Status parse(const std::string& file) {
  return parse_safetensors(as_bytes(file), "m.safetensors").status();
}

// The header with `from` replaced; the data has `bytes`.
Status parse_changed(const std::string& from, const std::string& to,
                     size_t bytes = kSmallBytes) {
  std::string header = kSmallHeader;
  if (!from.empty()) header.replace(header.find(from), from.size(), to);
  return parse(safetensors(header, bytes));
}

TEST(Safetensors, FindsTensorsWhateverTheirOrder) {
  const std::string file = safetensors(kSmallHeader, kSmallBytes);
  ASSERT_OK_AND(const auto tensors,
                parse_safetensors(as_bytes(file), "m.safetensors"));
  ASSERT_EQ(tensors.size(), 4U);
  const Tensor& a = tensors.at("a");
  EXPECT_EQ(a.dtype, Dtype::kFp32);
  EXPECT_EQ(a.shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(a.bytes.size(), 16U);
  const Tensor& b = tensors.at("b");
  EXPECT_EQ(b.dtype, Dtype::kFp16);
  EXPECT_EQ(static_cast<int>(b.bytes[0]), 16);
  EXPECT_EQ(tensors.at("c").dtype, Dtype::kOther);
  EXPECT_EQ(tensors.at("c").numel(), 1);
  EXPECT_EQ(tensors.at("e").numel(), 0);
}

TEST(Safetensors, RefusesEveryDamageByName) {
  const struct {
    std::string from, to, message;
    size_t bytes = kSmallBytes;
  } cases[] = {
      {"[16,22]", "[17,23]", R"(tensor "b": a hole before it)"},
      {"[16,22]", "[15,21]", R"(tensor "b": an overlap before it)"},
      {"[22,30]", "[22,31]", R"("c": data_offsets)"},
      {"[22,30]", "[24,32]", R"(tensor "c": a hole before it)", 32},
      {"[22,30]", "[30,22]", "data_offsets [30,22]"},
      {"[22,30]", "[22]", "data_offsets of two"},
      {"[22,30]", "[-22,30]", "data_offsets of two"},
      {"[22,30]", "[22,18446744073709551615]", "the file has 30 bytes"},
      {"\"I64\"", "\"I63\"", R"(dtype "I63": unknown)"},
      {"\"I64\"", "64", "has no dtype"},
      {"[2,2]", "[2,3]", "6 elements of F32 need 24 bytes"},
      {"[2,2]", "[4294967296,4294967296]", "too large"},
      {"[2,2]", "[-2,-2]", "has no shape"},
      {"[2,2]", "[2.0,2]", "has no shape"},
      {"\"b\"", "\"a\"", R"("a" appears twice)"},
      {"\"shape\"", "\"dtype\"", R"("dtype" appears twice)"},
      {"{\"__", "[\"__", "must begin with '{'"},
      {"}} ", "}", "header: "},
      {"", "", "truncated", 0},
      {"", "", "1 bytes follow the last tensor", 31},
      {"\"b\":{", "\"b\":[{", "header: "}};
  for (const auto& c : cases) {
    const Status s = c.message == "truncated"
                         ? parse(safetensors(kSmallHeader, 0).substr(0, 50))
                         : parse_changed(c.from, c.to, c.bytes);
    EXPECT_EQ(s.code(), Code::kCorrupt) << c.to;
    EXPECT_SAYS(s, c.message);
    EXPECT_TRUE(s.message().starts_with("m.safetensors: ")) << s.message();
  }
}

TEST(Safetensors, HostileHeadersCostNothing) {
  EXPECT_SAYS(parse("short"), "truncated");
  std::string huge = safetensors(kSmallHeader, kSmallBytes);
  huge[7] = '\x7f';
  EXPECT_SAYS(parse(huge), "at most 100000000");
  // Deep nesting is refused before it is parsed; brackets in names are none.
  const std::string deep = "{\"a\":" + std::string(1 << 20, '[');
  EXPECT_EQ(parse(safetensors(deep, 0)).code(), Code::kCorrupt);
  const std::string closed = deep + std::string(1 << 20, ']') + "}";
  EXPECT_SAYS(parse(safetensors(closed, 0)), "64 deep");
  const std::string brackets =
      R"({"__metadata__":{"\\\"":")" + std::string(100, '[') + "\"}}";
  EXPECT_OK(parse(safetensors(brackets, 0)));
  // Names do not reach a terminal as they are.
  const Status s =
      parse_changed(R"("a":{"dtype":"F32")", R"("\u001b[2J":{"dtype":"F33")");
  EXPECT_SAYS(s, "[2J");
  EXPECT_LACKS(s.message(), "\x1b");
}

TEST(Safetensors, ReadsWhatItWrites) {
  const std::vector<TensorShape> shapes = {
      {"w", {2, 3}}, {"norm", {3}}, {"empty", {0}}};
  const std::vector<float> values = {1, -2.5F, 0.1F, 1e-30F, 3e38F, 0, 7, 8, 9};
  for (const Dtype d : {Dtype::kFp32, Dtype::kBf16, Dtype::kFp16}) {
    std::string file = safetensors_header(shapes, d);
    EXPECT_EQ(file.size() % 8, 0U);
    std::string data(values.size() * dtype_size(d), '\0');
    write_elements(d, values,
                   std::as_writable_bytes(std::span(data.data(), data.size())));
    file += data;
    ASSERT_OK_AND(const auto tensors, parse_safetensors(as_bytes(file), "m"));
    EXPECT_EQ(tensors.at("w").dtype_name, header_name(d));
    std::vector<float> read(values.size());
    read_elements(tensors.at("w"), 0, std::span(read).first(6));
    read_elements(tensors.at("norm"), 0, std::span(read).last(3));
    // Written again, they are the same bits.
    std::string again(data.size(), '\0');
    write_elements(
        d, read, std::as_writable_bytes(std::span(again.data(), again.size())));
    EXPECT_EQ(again, data);
    if (d == Dtype::kFp32) {
      EXPECT_EQ(read, values);
    }
    std::vector<float> part(2);
    read_elements(tensors.at("norm"), 1, part);
    EXPECT_EQ(part, (std::vector<float>{8, 9}));
  }
}

}  // namespace
}  // namespace remesh::huggingface
