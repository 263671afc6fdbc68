#include "worker/data/text_reader.h"

#include <fmt/format.h>
#include <lzma.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/text.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::data {
namespace {

constexpr unsigned char kXzMagic[6] = {0xFD, '7', 'z', 'X', 'Z', 0};
constexpr size_t kInputBytes = size_t{1} << 18;
constexpr size_t kPortion = size_t{1} << 20;
constexpr uint64_t kXzMemory = uint64_t{1} << 30;

Status xz_error(const std::string& path, lzma_ret ret) {
  switch (ret) {
    case LZMA_MEMLIMIT_ERROR:
      return exhausted(
          fmt::format("{}: decompression needs more than {} of memory", path,
                      format_bytes(kXzMemory)));
    case LZMA_MEM_ERROR:
      return exhausted(path + ": not enough memory to decompress");
    case LZMA_BUF_ERROR:
      return corrupt(path + ": truncated .xz file");
    case LZMA_OPTIONS_ERROR:
      return corrupt(path +
                     ": .xz file with options that liblzma does not support");
    default:
      return corrupt(fmt::format("{}: corrupt .xz file (liblzma error {})",
                                 path, static_cast<int>(ret)));
  }
}

// Formats that people try, by their first bytes or the end of their names.
struct OtherFormat {
  std::string_view first_bytes;
  std::string_view suffix;
  std::string_view advice;
};
constexpr OtherFormat kOtherFormats[] = {
    {"\x1f\x8b", ".gz", "gzip: decompress it first (gunzip -k FILE)"},
    {"\x28\xb5\x2f\xfd", ".zst",
     "Zstandard: decompress it first (zstd -d FILE)"},
    {"BZh", ".bz2", "bzip2: decompress it first (bunzip2 -k FILE)"},
    {"PK\x03\x04", ".zip", "a zip archive: unpack it first"},
    {"PAR1", ".parquet", "Parquet: extract its text column first"},
    {"", ".jsonl",
     "JSON lines: extract the text first (jq -r '.text, \"<|endoftext|>\"' "
     "FILE)"},
    {"", ".json", "JSON: extract the text first (jq -r .text FILE)"},
};

Status check_is_text(const std::string& path, std::string_view first_bytes) {
  for (const OtherFormat& f : kOtherFormats) {
    const bool by_content =
        !f.first_bytes.empty() && first_bytes.starts_with(f.first_bytes);
    if (by_content || path.ends_with(f.suffix))
      return invalid_argument(fmt::format(
          "{}: looks like {}; plain text and .xz are read, and --raw-bytes "
          "takes any file as it is",
          path, f.advice));
  }
  return ok_status();
}

}  // namespace

struct TextReader::Impl {
  explicit Impl(InputFile f) : file(std::move(f)) {}
  ~Impl() { lzma_end(&stream); }
  Result<size_t> read_raw(void* out, size_t bytes) {
    ASSIGN_OR_RETURN(const size_t got, file.read(out, bytes));
    hash.add(out, got);
    done += got;
    return got;
  }

  InputFile file;
  uint64_t size = 0;
  uint64_t done = 0;
  Xxh3Stream hash;
  std::vector<uint8_t> input;  // read ahead; consumed up to `position`
  size_t position = 0;
  bool compressed = false;
  bool ended = false;
  lzma_stream stream = LZMA_STREAM_INIT;
};

TextReader::TextReader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TextReader::TextReader(TextReader&&) noexcept = default;
TextReader& TextReader::operator=(TextReader&&) noexcept = default;
TextReader::~TextReader() = default;
bool TextReader::compressed() const { return impl_->compressed; }
const std::string& TextReader::path() const { return impl_->file.path(); }
uint64_t TextReader::file_bytes() const { return impl_->size; }
uint64_t TextReader::bytes_done() const { return impl_->done; }
std::string TextReader::file_hash() const {
  return hex(impl_->hash.digest_128());
}

Result<TextReader> TextReader::open(const std::string& path, bool any_format) {
  ASSIGN_OR_RETURN(InputFile file, InputFile::open(path));
  auto impl = std::make_unique<Impl>(std::move(file));
  ASSIGN_OR_RETURN(impl->size, impl->file.size());
  impl->input.resize(kInputBytes);
  ASSIGN_OR_RETURN(const size_t got,
                   impl->read_raw(impl->input.data(), sizeof(kXzMagic)));
  impl->input.resize(got);
  impl->compressed = got == sizeof(kXzMagic) &&
                     std::memcmp(impl->input.data(), kXzMagic, got) == 0;
  if (!impl->compressed && path.ends_with(".xz") && got > 0)
    return corrupt(path + ": named .xz, but not in that format");
  if (!any_format && !impl->compressed)
    RETURN_IF_ERROR(check_is_text(
        path, {reinterpret_cast<const char*>(impl->input.data()), got}));
  if (impl->compressed) {
    const lzma_ret ret =
        lzma_stream_decoder(&impl->stream, kXzMemory, LZMA_CONCATENATED);
    if (ret != LZMA_OK) return xz_error(path, ret);
  }
  return TextReader(std::move(impl));
}

Result<size_t> TextReader::read(std::span<char> out) {
  Impl& m = *impl_;
  if (m.ended || out.empty()) return size_t{0};
  if (!m.compressed) {
    const size_t ahead = std::min(out.size(), m.input.size() - m.position);
    if (ahead > 0) std::memcpy(out.data(), &m.input[m.position], ahead);
    m.position += ahead;
    ASSIGN_OR_RETURN(const size_t got,
                     m.read_raw(out.data() + ahead, out.size() - ahead));
    return ahead + got;
  }
  m.stream.next_out = reinterpret_cast<uint8_t*>(out.data());
  m.stream.avail_out = out.size();
  while (m.stream.avail_out > 0 && !m.ended) {
    if (m.position == m.input.size()) {
      m.input.resize(kInputBytes);
      ASSIGN_OR_RETURN(const size_t got,
                       m.read_raw(m.input.data(), kInputBytes));
      m.input.resize(got);
      m.position = 0;
    }
    const size_t have = m.input.size() - m.position;
    m.stream.next_in = m.input.data() + m.position;
    m.stream.avail_in = have;
    const lzma_ret ret =
        lzma_code(&m.stream, have == 0 ? LZMA_FINISH : LZMA_RUN);
    m.position += have - m.stream.avail_in;
    if (ret == LZMA_STREAM_END)
      m.ended = true;
    else if (ret != LZMA_OK)
      return xz_error(path(), ret);
  }
  return out.size() - m.stream.avail_out;
}

bool Utf8Check::feed(std::string_view bytes) {
  for (const char c : bytes) {
    const auto b = static_cast<unsigned char>(c);
    if (missing_ == 0) {
      char_offset_ = offset_;
      low_ = 0x80;
      high_ = 0xBF;
      if (b < 0x80) {
        ++offset_;
        continue;
      }
      if (b < 0xC2 || b > 0xF4) return false;
      missing_ = b < 0xE0 ? 1 : b < 0xF0 ? 2 : 3;
      if (b == 0xE0) low_ = 0xA0;   // overlong
      if (b == 0xED) high_ = 0x9F;  // surrogates
      if (b == 0xF0) low_ = 0x90;   // overlong
      if (b == 0xF4) high_ = 0x8F;  // above U+10FFFF
    } else {
      if (b < low_ || b > high_) return false;
      low_ = 0x80;
      high_ = 0xBF;
      --missing_;
    }
    ++offset_;
  }
  return true;
}

bool Utf8Check::finish() { return missing_ == 0; }

BlockSplitter::BlockSplitter(size_t block_bytes, Sink sink)
    : block_bytes_(block_bytes), sink_(std::move(sink)) {
  CHECK(block_bytes >= 64);  // longer than a separator line
}

Status BlockSplitter::feed(std::string_view text) {
  while (!text.empty()) {
    const size_t newline = text.find('\n');
    const bool whole = newline != std::string_view::npos;
    const size_t wanted = whole ? newline + 1 : text.size();
    const size_t room = 2 * block_bytes_ - block_.text.size();
    const size_t n = std::min(wanted, room);
    block_.text.append(text.substr(0, n));
    text.remove_prefix(n);
    if (whole && n == wanted)
      RETURN_IF_ERROR(end_line());
    else if (n == room)
      RETURN_IF_ERROR(split_long_line());
  }
  return ok_status();
}

Status BlockSplitter::end_line() {
  std::string_view line = std::string_view(block_.text).substr(line_begin_);
  if (line.ends_with('\n')) line.remove_suffix(1);
  if (line.ends_with('\r')) line.remove_suffix(1);
  const bool separator = !line_split_ && line == kDocumentSeparator;
  line_split_ = false;
  if (separator) {
    block_.text.resize(line_begin_);
    return end_document();
  }
  document_open_ = true;
  line_begin_ = block_.text.size();
  return block_.text.size() >= block_bytes_ ? emit() : ok_status();
}

Status BlockSplitter::end_document() {
  if (!document_open_) return ok_status();  // skip empty documents
  document_open_ = false;
  ++documents_;
  block_.ends.push_back(block_.text.size());
  return block_.text.size() >= block_bytes_ / 2 ? emit() : ok_status();
}

// The block is full and has no line end in its second half, so the line is too
// long to be a separator. Splits it between words, or else between characters.
Status BlockSplitter::split_long_line() {
  const size_t space = block_.text.find(' ', block_bytes_);
  const size_t cut = space == std::string::npos
                         ? tokenizer::complete_prefix(block_.text)
                         : space + 1;
  std::string rest = block_.text.substr(cut);
  block_.text.resize(cut);
  RETURN_IF_ERROR(emit());
  document_open_ = true;
  line_split_ = true;
  block_.text = std::move(rest);
  return ok_status();
}

Status BlockSplitter::emit() {
  if (block_.text.empty() && block_.ends.empty()) return ok_status();
  Status status = sink_(block_);
  block_.text.clear();
  block_.ends.clear();
  line_begin_ = 0;
  return status;
}

Status BlockSplitter::end_file() {
  if (line_split_ || block_.text.size() > line_begin_)
    RETURN_IF_ERROR(end_line());
  return end_document();
}

Status BlockSplitter::finish() { return emit(); }

Result<uint64_t> split_text(TextReader& reader, bool raw_bytes,
                            BlockSplitter& splitter,
                            const std::function<void(uint64_t)>& progress) {
  std::vector<char> portion(kPortion);
  Utf8Check utf8;
  const auto not_utf8 = [&] {
    return invalid_argument(fmt::format(
        "{}: not UTF-8 at byte {} of the text (--raw-bytes accepts it)",
        reader.path(), utf8.bad_offset()));
  };
  uint64_t reported = 0;
  uint64_t bytes = 0;
  for (;;) {
    ASSIGN_OR_RETURN(const size_t got, reader.read(portion));
    progress(reader.bytes_done() - reported);
    reported = reader.bytes_done();
    if (got == 0) break;
    const std::string_view text(portion.data(), got);
    if (!raw_bytes && !utf8.feed(text)) return not_utf8();
    RETURN_IF_ERROR(splitter.feed(text));
    bytes += got;
  }
  if (!raw_bytes && !utf8.finish()) return not_utf8();
  RETURN_IF_ERROR(splitter.end_file());
  return bytes;
}

}  // namespace remesh::data
