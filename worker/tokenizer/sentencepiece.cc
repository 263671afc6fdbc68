#include "worker/tokenizer/sentencepiece.h"

#include <fmt/format.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <utility>
#include <vector>

#include "proto/base/file_system.h"
#include "proto/sentencepiece.pb.h"
#include "worker/tokenizer/pipeline.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::tokenizer {
namespace {

using Model = pb::SentencePieceModel;
using Piece = pb::SentencePieceModel::Piece;

constexpr int kMaxPieces = 1 << 20;

// The pieces of a file that may not be a model; 0 if it is none. They are
// counted before it is parsed, because one of two bytes takes far more memory.
int count_pieces(std::string_view file) {
  google::protobuf::io::CodedInputStream in(
      reinterpret_cast<const uint8_t*>(file.data()),
      static_cast<int>(file.size()));
  int count = 0;
  while (const uint32_t tag = in.ReadTag()) {
    if (!google::protobuf::internal::WireFormatLite::SkipField(&in, tag))
      return 0;
    if (tag >> 3 == Model::kPiecesFieldNumber) ++count;
  }
  return count;
}

Status unsupported(const std::string& what) {
  return invalid_argument(fmt::format(
      "{} is not supported: expected BPE with byte_fallback and the "
      "normalization rule identity, as Llama 2, Mistral, Gemma and Phi-3 have "
      "it",
      what));
}

Status check_kind(const Model& m) {
  const auto& trainer = m.trainer_spec();
  const auto& normalizer = m.normalizer_spec();
  if (trainer.model_type() != Model::Trainer::BPE)
    return unsupported("model_type = " +
                       Model::Trainer::ModelType_Name(trainer.model_type()));
  if (!trainer.byte_fallback()) return unsupported("byte_fallback = false");
  if (trainer.treat_whitespace_as_suffix())
    return unsupported("treat_whitespace_as_suffix = true");
  if (!normalizer.escape_whitespaces())
    return unsupported("escape_whitespaces = false");
  if (!normalizer.precompiled_charsmap().empty() ||
      !m.denormalizer_spec().precompiled_charsmap().empty())
    return unsupported("a precompiled_charsmap");
  return ok_status();
}

// The pieces that text becomes, by their text.
using Ids = std::unordered_map<std::string_view, int32_t>;

Result<Ids> ids_of(const Model& m) {
  Ids ids;
  int bytes = 0;
  for (int i = 0; i < m.pieces_size(); ++i) {
    const Piece& p = m.pieces(i);
    if (p.piece().empty() || p.piece().size() > kMaxTokenBytes ||
        valid_prefix(p.piece()) < p.piece().size() || !std::isfinite(p.score()))
      return invalid_argument(fmt::format(
          "piece {}: must have 1 to {} bytes of UTF-8 and a finite score", i,
          kMaxTokenBytes));
    const bool is_byte = p.type() == Piece::BYTE;
    if (is_byte != byte_of(p.piece()).has_value())
      return unsupported(fmt::format("piece {}, {} like a byte,", i,
                                     is_byte ? "not named" : "named"));
    bytes += is_byte ? 1 : 0;
    if (p.type() != Piece::NORMAL && p.type() != Piece::UNUSED) continue;
    if (!ids.emplace(p.piece(), i).second)
      return invalid_argument(fmt::format("piece {} occurs twice", i));
  }
  if (bytes != 256)
    return invalid_argument(
        fmt::format("has {} pieces for bytes: must have 256", bytes));
  return ids;
}

// The bytes that a piece stands for.
std::string decoded(const Piece& p) {
  if (p.type() == Piece::BYTE) return std::string(1, *byte_of(p.piece()));
  return p.type() == Piece::CONTROL ? p.piece() : unmark_spaces(p.piece());
}

// All pairs of pieces that together are a piece, that of the highest score
// first.
Result<std::vector<BpeModel::Merge>> merges_of(const Model& m, const Ids& ids,
                                               const AddedTokens& symbols) {
  std::vector<float> scores;
  for (const auto& [text, id] : ids) scores.push_back(-m.pieces(id).score());
  std::sort(scores.begin(), scores.end());
  std::vector<BpeModel::Merge> merges;
  for (int32_t i = 0; i < m.pieces_size(); ++i) {
    const Piece& piece = m.pieces(i);
    if (piece.type() != Piece::NORMAL && piece.type() != Piece::UNUSED)
      continue;
    const std::string_view text = piece.piece();
    const auto rank = static_cast<uint32_t>(
        std::lower_bound(scores.begin(), scores.end(), -piece.score()) -
        scores.begin());
    for (size_t at = 0, cut; at < text.size(); at = cut) {
      cut = at + first_char(text.substr(at)).length;
      const std::string_view character = text.substr(at, cut - at);
      // Without a piece of its own a character is bytes, which do not merge;
      // a user's symbol does not merge either.
      if (!ids.contains(character) && !symbols.contains(character))
        return unsupported(
            fmt::format("piece {}, with a character that is no piece,", i));
      const auto left = ids.find(text.substr(0, cut));
      const auto right = ids.find(text.substr(cut));
      const bool merged = left != ids.end() && right != ids.end();
      if (piece.type() == Piece::UNUSED && (merged || character == text))
        return unsupported(
            fmt::format("piece {}, unused although text becomes it,", i));
      if (merged) merges.push_back({left->second, right->second, i, rank});
    }
  }
  return merges;
}

// Leaves one of several spaces, and none at the ends of a text. A mark that is
// written out at its end is a space, too.
Status remove_spaces(TextEdges edges, Matcher&, std::string& text) {
  const std::string_view mark = kSpaceMark;
  std::string out;
  bool after_space = edges.begins;
  for (const char c : text) {
    if (c != ' ' || !after_space) out += c;
    after_space = c == ' ';
  }
  while (edges.ends && (out.ends_with(' ') || out.ends_with(mark)))
    out.resize(out.size() - (out.ends_with(' ') ? 1 : mark.size()));
  text = std::move(out);
  return ok_status();
}

Pipeline pipeline_of(const Model& m, std::string id) {
  Pipeline p{.id = std::move(id), .end_of_text = -1};
  const auto& normalizer = m.normalizer_spec();
  if (normalizer.remove_extra_whitespaces()) {
    p.normalizer.emplace_back(remove_spaces);
    p.changes = "remove_extra_whitespaces";
  }
  p.normalizer.push_back(replace(" ", kSpaceMark));
  p.adds_space = normalizer.add_dummy_prefix();
  if (p.adds_space) p.normalizer.push_back(prepend(kSpaceMark));
  // Texts of symbols have marks. They may begin with the one that is added
  // before a document.
  for (int i = 0; i < m.pieces_size(); ++i) {
    const Piece& piece = m.pieces(i);
    if (piece.type() == Piece::CONTROL)
      p.added.add(piece.piece(), {.id = i, .special = true});
    else if (piece.type() == Piece::USER_DEFINED)
      p.normalized_added.add(piece.piece(), {.id = i});
  }
  return p;
}

Result<std::unique_ptr<Tokenizer>> build(const Model& m, std::string id) {
  RETURN_IF_ERROR(check_kind(m));
  ASSIGN_OR_RETURN(const Ids ids, ids_of(m));
  Pipeline p = pipeline_of(m, std::move(id));
  BpeModel bpe;
  for (int i = 0; i < m.pieces_size(); ++i) {
    const Piece& piece = m.pieces(i);
    const bool in_text =
        piece.type() == Piece::NORMAL || piece.type() == Piece::BYTE;
    bpe.tokens.push_back(in_text ? piece.piece() : "");
    p.decoded.push_back(decoded(piece));
    if (piece.type() == Piece::CONTROL &&
        piece.piece() == m.trainer_spec().eos_piece())
      p.end_of_text = i;
  }
  if (p.end_of_text < 0)
    return invalid_argument("no control piece ends a document (eos_piece)");
  ASSIGN_OR_RETURN(bpe.merges, merges_of(m, ids, p.normalized_added));
  RETURN_IF_ERROR(divide_before_marks(bpe, &p));
  ASSIGN_OR_RETURN(p.bpe, Bpe::make(std::move(bpe)));
  return make_tokenizer(std::move(p));
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> parse_sentencepiece(
    std::string_view file, const std::string& name) {
  Model model;
  const int pieces = count_pieces(file);
  if (pieces > kMaxPieces)
    return invalid_argument(
        fmt::format("{}: has over {} pieces", name, kMaxPieces));
  if (pieces <= 0 ||
      !model.ParseFromArray(file.data(), static_cast<int>(file.size())))
    return invalid_argument(name + ": not a SentencePiece model");
  return build(model, "sentencepiece:" + xxh128_text(file)).with_context(name);
}

}  // namespace remesh::tokenizer
