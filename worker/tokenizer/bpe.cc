#include "worker/tokenizer/bpe.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <utility>

#include "proto/base/xxh3.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::tokenizer {
namespace {

constexpr size_t kMaxCached = 64;        // bytes of a piece
constexpr size_t kMaxPlaces = 32 << 10;  // in the cache

uint64_t pair_of(uint32_t left, uint32_t right) {
  return uint64_t{left} << 32 | right;
}

uint64_t pair_of(int32_t left, int32_t right) {
  return pair_of(static_cast<uint32_t>(left), static_cast<uint32_t>(right));
}

}  // namespace

size_t Bpe::Hash::operator()(std::string_view text) const {
  return xxh3(text.data(), text.size());
}

Bpe::Scratch::Scratch(size_t text_bytes)
    : cache(std::min(kMaxPlaces, std::bit_ceil(text_bytes / 8 + 1))) {}

Result<Bpe> Bpe::make(BpeModel model) {
  Bpe bpe(std::move(model));
  RETURN_IF_ERROR(bpe.index_tokens());
  RETURN_IF_ERROR(bpe.index_merges());
  bpe.model_.merges = {};
  return bpe;
}

Status Bpe::index_tokens() {
  const auto& tokens = model_.tokens;
  vocabulary_.reserve(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i].empty()) continue;
    const auto id = static_cast<int32_t>(i);
    const auto [at, is_new] = vocabulary_.emplace(tokens[i], id);
    if (!is_new)
      return invalid_argument(
          fmt::format("tokens {} and {} are equal", at->second, id));
  }
  if (vocabulary_.empty()) return invalid_argument("the vocabulary is empty");
  for (size_t b = 0; b < bytes_.size(); ++b)
    bytes_[b] = model_.byte_level ? find(std::string(1, static_cast<char>(b)))
                : model_.byte_fallback ? find(fmt::format("<0x{:02X}>", b))
                                       : -1;
  return ok_status();
}

Status Bpe::index_merges() {
  const auto size = static_cast<int32_t>(model_.tokens.size());
  merges_.resize(std::bit_ceil(2 * model_.merges.size() + 2));
  for (const BpeModel::Merge& m : model_.merges) {
    for (const int32_t id : {m.left, m.right, m.result})
      if (id < 0 || id >= size)
        return invalid_argument(
            fmt::format("merge {}: token {}: the vocabulary has only {}",
                        m.rank, id, size));
    const uint64_t pair = pair_of(m.left, m.right);
    Slot& slot = merges_[slot_of(pair)];
    if (m.rank < slot.rank) slot = {pair, m.rank, m.result};
  }
  return ok_status();
}

int32_t Bpe::find(std::string_view token) const {
  const auto it = vocabulary_.find(token);
  return it == vocabulary_.end() ? -1 : it->second;
}

size_t Bpe::slot_of(uint64_t pair) const {
  size_t at = pair * 0x9E3779B97F4A7C15 >> 32;
  while (merges_[at &= merges_.size() - 1].pair != pair &&
         merges_[at].pair != UINT64_MAX)
    ++at;
  return at;
}

const Bpe::Slot& Bpe::merge_of(int32_t left, int32_t right) const {
  return merges_[slot_of(pair_of(left, right))];
}

Status Bpe::encode(std::string_view piece, Scratch& scratch,
                   std::vector<int32_t>& out) const {
  Scratch::Encoded* known = nullptr;
  if (piece.size() <= kMaxCached) {
    known = &scratch.cache[Hash()(piece) & (scratch.cache.size() - 1)];
    if (known->piece == piece && !piece.empty()) {
      out.insert(out.end(), known->ids.begin(), known->ids.end());
      return ok_status();
    }
  }
  scratch.ids.clear();
  const int32_t whole = model_.ignore_merges ? find(piece) : -1;
  if (whole >= 0) {
    scratch.ids.push_back(whole);
  } else {
    RETURN_IF_ERROR(start(piece, scratch.ids));
    if (merges_.size() > 2) merge(scratch);
  }
  out.insert(out.end(), scratch.ids.begin(), scratch.ids.end());
  if (known != nullptr) {
    known->piece = piece;
    known->ids = scratch.ids;
  }
  return ok_status();
}

Status Bpe::start(std::string_view piece, std::vector<int32_t>& ids) const {
  bool unknown = false;
  while (!piece.empty()) {
    const std::string_view character =
        piece.substr(0, model_.byte_level ? 1 : first_char(piece).length);
    piece.remove_prefix(character.size());
    const bool follows_unknown = std::exchange(unknown, false);
    const int32_t id = model_.byte_level ? -1 : find(character);
    if (id >= 0) {
      ids.push_back(id);
      continue;
    }
    const auto token_of = [&](char c) {
      return bytes_[static_cast<unsigned char>(c)];
    };
    const auto missing = std::find_if(character.begin(), character.end(),
                                      [&](char c) { return token_of(c) < 0; });
    if (missing == character.end()) {
      for (const char c : character) ids.push_back(token_of(c));
      continue;
    }
    if (model_.unknown < 0)
      return invalid_argument(
          fmt::format("the vocabulary has no token for the byte {}",
                      static_cast<unsigned char>(*missing)));
    unknown = true;
    if (!follows_unknown || !model_.fuse_unknown) ids.push_back(model_.unknown);
  }
  return ok_status();
}

// The symbols are a linked list. The heap has a rank and a position for each
// pair that has appeared; one that is no longer there is recognised by its
// rank, which tells the pair's result.
void Bpe::merge(Scratch& scratch) const {
  const auto n = static_cast<int32_t>(scratch.ids.size());
  scratch.previous.resize(scratch.ids.size());
  scratch.next.resize(scratch.ids.size());
  int32_t* const ids = scratch.ids.data();
  int32_t* const previous = scratch.previous.data();
  int32_t* const next = scratch.next.data();
  std::vector<uint64_t>& heap = scratch.heap;
  heap.clear();
  const auto add = [&](int32_t i) {
    const Slot& f = merge_of(ids[i], ids[next[i]]);
    if (f.result >= 0)
      heap.push_back(pair_of(f.rank, static_cast<uint32_t>(i)));
    return f.result >= 0;
  };
  const auto push = [&](int32_t i) {
    if (add(i)) std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  for (int32_t i = 0; i < n; ++i) {
    previous[i] = i - 1;
    next[i] = i + 1 < n ? i + 1 : -1;
    if (i + 1 < n) add(i);
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const uint64_t top = heap.back();
    heap.pop_back();
    const auto i = static_cast<int32_t>(static_cast<uint32_t>(top));
    const int32_t j = ids[i] < 0 ? -1 : next[i];
    if (j < 0) continue;
    const Slot& f = merge_of(ids[i], ids[j]);
    if (f.result < 0 || f.rank != top >> 32) continue;
    ids[i] = f.result;
    ids[j] = -1;  // no longer there
    next[i] = next[j];
    if (next[i] >= 0) {
      previous[next[i]] = i;
      push(i);
    }
    if (previous[i] >= 0) push(previous[i]);
  }
  std::erase(scratch.ids, -1);
}

}  // namespace remesh::tokenizer
