#include "worker/data/text_reader.h"

#include <archive.h>
#include <archive_entry.h>
#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "proto/base/check.h"
#include "proto/base/file_system.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::data {
namespace {

constexpr size_t kInputBytes = size_t{1} << 18;
constexpr size_t kPortion = size_t{1} << 20;
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

// Formats that people try, by their first bytes or the end of their names.
struct OtherFormat {
  std::string_view first_bytes;
  std::string_view suffix;
  std::string_view advice;
};
constexpr OtherFormat kOtherFormats[] = {
    {"PK\x03\x04", ".zip", "a zip archive: unpack it first"},
    {"", ".tar", "a tar archive: unpack it first"},
    {"", ".tgz", "a tar archive: unpack it first"},
    {"PAR1", ".parquet", "Parquet: extract its text column first"},
};

Status check_is_text(const std::string& path, std::string_view bytes) {
  const std::string name = without_compression(path);
  for (const OtherFormat& f : kOtherFormats)
    if ((!f.first_bytes.empty() && bytes.starts_with(f.first_bytes)) ||
        name.ends_with(f.suffix))
      return invalid_argument(fmt::format(
          "{}: looks like {}; text and JSON lines are read, plain or "
          "compressed, and `remesh data prepare --raw-bytes` takes any file",
          path, f.advice));
  return ok_status();
}

// Decompresses gzip files of one or more members, and checks the length and the
// CRC of each, which libarchive does not.
class Gunzip {
 public:
  // At most as many bytes as there may be at once.
  using Input = std::function<Result<std::span<char>>()>;
  Gunzip() { ready_ = inflateInit2(&z_, 16 + MAX_WBITS) == Z_OK; }
  ~Gunzip() {
    if (ready_) inflateEnd(&z_);
  }
  Gunzip(const Gunzip&) = delete;
  Gunzip& operator=(const Gunzip&) = delete;

  // Corrupt, with the reason.
  Result<size_t> read(std::span<char> out, const Input& next) {
    if (!ready_) return exhausted("no memory to decompress");
    z_.next_out = reinterpret_cast<Bytef*>(out.data());
    z_.avail_out = static_cast<uInt>(std::min(out.size(), kPortion));
    const uInt room = z_.avail_out;
    while (z_.avail_out == room) {
      if (z_.avail_in == 0) {
        ASSIGN_OR_RETURN(const std::span<char> more, next());
        if (more.empty() && inside_) return corrupt("it is cut off");
        if (more.empty()) return size_t{0};
        z_.next_in = reinterpret_cast<Bytef*>(more.data());
        z_.avail_in = static_cast<uInt>(more.size());
      }
      if (!inside_) {
        skip_padding();
        if (z_.avail_in == 0) continue;
        if (padded_) return corrupt("something follows its end");
        inside_ = inflateReset(&z_) == Z_OK;
      }
      const int rc = inflate(&z_, Z_NO_FLUSH);
      if (rc == Z_STREAM_END)
        inside_ = false;
      else if (rc == Z_MEM_ERROR)
        return exhausted("no memory to decompress");
      else if (rc != Z_OK && rc != Z_BUF_ERROR)
        return corrupt(z_.msg != nullptr ? z_.msg : "damaged");
    }
    return size_t{room - z_.avail_out};
  }

 private:
  // Zeros to the end of a block, as tar and tapes leave them.
  void skip_padding() {
    while (z_.avail_in > 0 && *z_.next_in == 0) {
      padded_ = true;
      ++z_.next_in;
      --z_.avail_in;
    }
  }

  z_stream z_{};
  bool ready_ = false;
  bool inside_ = false;  // a member
  bool padded_ = false;
};

}  // namespace

std::string without_compression(const std::string& path) {
  for (const std::string_view suffix : {".gz", ".xz", ".zst", ".bz2"})
    if (path.ends_with(suffix))
      return path.substr(0, path.size() - suffix.size());
  return path;
}

struct TextReader::Impl {
  Impl(std::unique_ptr<File> f, std::string p)
      : file(std::move(f)), path(std::move(p)), input(kInputBytes) {}
  ~Impl() { archive_read_free(stream); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Result<size_t> read_raw(std::span<char> out) {
    out = out.first(std::min<uint64_t>(out.size(), size - done));
    RETURN_IF_ERROR(file->read_at(done, std::as_writable_bytes(out)));
    hash.add(out.data(), out.size());
    done += out.size();
    return out.size();
  }
  // For libarchive.
  static la_ssize_t next_input(archive*, void* impl, const void** out) {
    auto& m = *static_cast<Impl*>(impl);
    const auto got = m.read_raw(m.input);
    m.failed = got.status();
    *out = m.input.data();
    return got.ok() ? static_cast<la_ssize_t>(*got) : -1;
  }
  Status error() const {
    if (!failed.ok()) return failed;
    const char* why = archive_error_string(stream);
    const std::string text = fmt::format("{}: cannot be decompressed: {}", path,
                                         why ? why : "damaged");
    return archive_errno(stream) == ENOMEM ? exhausted(text) : corrupt(text);
  }
  Result<size_t> gunzip_to(std::span<char> out) {
    auto got = gunzip->read(out, [this]() -> Result<std::span<char>> {
      ASSIGN_OR_RETURN(const size_t n, read_raw(input));
      return std::span(input).first(n);
    });
    const Code code = got.status().code();
    if (got.ok() || (code != Code::kCorrupt && code != Code::kExhausted))
      return got;
    return Status(code, fmt::format("{}: cannot be decompressed: {}", path,
                                    got.status().message()));
  }
  // libarchive takes what follows the end of a stream, and is no other one, as
  // the end.
  Status check_end() const {
    const auto used = static_cast<uint64_t>(archive_filter_bytes(stream, -1));
    if (!compressed || used == size) return ok_status();
    return corrupt(fmt::format(
        "{}: cannot be decompressed: {} bytes after byte {} are no part of it",
        path, size - used, used));
  }
  Status start() {
    stream = archive_read_new();
    if (stream == nullptr) return exhausted("no memory to read a file");
    archive_read_support_filter_xz(stream);
    archive_read_support_filter_zstd(stream);
    archive_read_support_filter_bzip2(stream);
    archive_read_support_format_raw(stream);
    archive_read_support_format_empty(stream);
    archive_entry* entry = nullptr;
    if (archive_read_open(stream, this, nullptr, next_input, nullptr) !=
        ARCHIVE_OK)
      return error();
    const int header = archive_read_next_header(stream, &entry);
    if (header != ARCHIVE_OK && header != ARCHIVE_EOF) return error();
    empty = header == ARCHIVE_EOF;
    compressed = archive_filter_code(stream, 0) != ARCHIVE_FILTER_NONE;
    return ok_status();
  }

  Result<size_t> read(std::span<char> out) {
    if (gunzip) return gunzip_to(out);
    if (stream == nullptr) return read_raw(out);
    if (out.empty() || empty) return size_t{0};
    const la_ssize_t got = archive_read_data(stream, out.data(), out.size());
    if (got < 0) return error();
    if (got == 0) RETURN_IF_ERROR(check_end());
    return static_cast<size_t>(got);
  }
  Status read_first() {
    for (char c; first.size() < kByteOrderMark.size(); first += c) {
      ASSIGN_OR_RETURN(const size_t got, read({&c, 1}));
      if (got == 0) break;
    }
    if (first == kByteOrderMark) first.clear();
    return ok_status();
  }

  const std::unique_ptr<File> file;
  const std::string path;
  uint64_t size = 0;
  uint64_t done = 0;
  Xxh3Stream hash;
  std::vector<char> input;
  archive* stream = nullptr;  // nullptr: the file as it is
  std::optional<Gunzip> gunzip;
  bool compressed = false;
  bool empty = false;  // when decompressed
  bool begun = false;  // nothing is to be done at its beginning any more
  std::string first;   // read there, and not returned yet
  Status failed;       // reading
};

TextReader::TextReader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TextReader::TextReader(TextReader&&) noexcept = default;
TextReader& TextReader::operator=(TextReader&&) noexcept = default;
TextReader::~TextReader() = default;
bool TextReader::compressed() const { return impl_->compressed; }
const std::string& TextReader::path() const { return impl_->path; }
uint64_t TextReader::file_bytes() const { return impl_->size; }
uint64_t TextReader::bytes_done() const { return impl_->done; }
std::string TextReader::file_hash() const {
  return hex(impl_->hash.digest_128());
}

Result<TextReader> TextReader::open(const std::string& path, bool raw) {
  ASSIGN_OR_RETURN(auto file, posix_file_system()->open(path));
  auto impl = std::make_unique<Impl>(std::move(file), path);
  ASSIGN_OR_RETURN(impl->size, impl->file->size());
  impl->begun = raw;
  if (raw || impl->size == 0) return TextReader(std::move(impl));
  std::string first(std::min<uint64_t>(impl->size, 4), '\0');
  RETURN_IF_ERROR(
      impl->file->read_at(0, std::as_writable_bytes(std::span(first))));
  RETURN_IF_ERROR(check_is_text(path, first));
  if (first.starts_with("\x1f\x8b")) {
    impl->gunzip.emplace();
    impl->compressed = true;
    return TextReader(std::move(impl));
  }
  RETURN_IF_ERROR(impl->start());
  if (!impl->compressed && without_compression(path) != path)
    return corrupt(fmt::format("{}: named {}, but not in that format", path,
                               path.substr(without_compression(path).size())));
  return TextReader(std::move(impl));
}

Result<size_t> TextReader::read(std::span<char> out) {
  Impl& m = *impl_;
  if (!std::exchange(m.begun, true)) RETURN_IF_ERROR(m.read_first());
  if (m.first.empty()) return m.read(out);
  const size_t n = m.first.copy(out.data(), out.size());
  m.first.erase(0, n);
  return n;
}

BlockSplitter::BlockSplitter(size_t block_bytes, Sink sink)
    : block_bytes_(block_bytes), sink_(std::move(sink)) {
  CHECK(block_bytes >= 64);  // longer than a separator line
}

Status BlockSplitter::feed(std::string_view text, bool separators) {
  separators_ = separators;
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
  const bool separator =
      separators_ && !line_split_ && line == kDocumentSeparator;
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

Result<uint64_t> split_text(TextReader& reader, bool raw_bytes,
                            BlockSplitter& splitter,
                            const std::function<void(uint64_t)>& progress) {
  std::vector<char> portion(kPortion);
  size_t kept = 0;  // bytes of a character that the next portion completes
  uint64_t reported = 0;
  uint64_t bytes = 0;
  for (size_t got = 1; got > 0;) {
    ASSIGN_OR_RETURN(got, reader.read(std::span(portion).subspan(kept)));
    progress(reader.bytes_done() - reported);
    reported = reader.bytes_done();
    std::string_view text(portion.data(), kept + got);
    if (!raw_bytes && got > 0)
      text = text.substr(0, tokenizer::complete_prefix(text));
    if (const size_t valid =
            raw_bytes ? text.size() : tokenizer::valid_prefix(text);
        valid < text.size())
      return invalid_argument(fmt::format(
          "{}: not UTF-8 at byte {} of the text (`remesh data prepare "
          "--raw-bytes` takes it)",
          reader.path(), bytes + valid));
    RETURN_IF_ERROR(splitter.feed(text));
    bytes += text.size();
    kept += got - text.size();
    std::memmove(portion.data(), portion.data() + text.size(), kept);
  }
  RETURN_IF_ERROR(splitter.end_file());
  return bytes;
}

}  // namespace remesh::data
