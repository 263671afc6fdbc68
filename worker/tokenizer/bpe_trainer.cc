#include "worker/tokenizer/bpe_trainer.h"

#include <fmt/format.h>

#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "worker/tokenizer/pipeline.h"
#include "worker/tokenizer/tokenizer_json.h"

namespace remesh::tokenizer {
namespace {

constexpr int64_t kBytes = 256;
constexpr int64_t kMaxVocab = int64_t{1} << 20;
// A longer piece is not a word, and would be merged into itself.
constexpr size_t kMaxPiece = 64;

using Pair = uint64_t;
Pair pair_of(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 |
         static_cast<uint32_t>(right);
}

struct Word {
  std::vector<int32_t> ids;
  int64_t count = 0;
};

// Words, and the pairs of adjacent tokens in them.
class Corpus {
 public:
  explicit Corpus(std::vector<Word> words) : words_(std::move(words)) {
    for (uint32_t w = 0; w < words_.size(); ++w) count(w, +1);
    apply_changes();
  }

  // The most frequent pair, if one occurs twice.
  bool next(Pair& pair) const {
    if (by_count_.empty() || by_count_.begin()->first > -2) return false;
    pair = by_count_.begin()->second;
    return true;
  }

  // Replaces the pair by the token everywhere.
  void merge(Pair pair, int32_t token) {
    const std::set<uint32_t> words = std::move(pairs_[pair].words);
    for (const uint32_t w : words) {
      count(w, -1);
      std::vector<int32_t>& ids = words_[w].ids;
      size_t to = 0;
      for (size_t i = 0; i < ids.size(); ++i) {
        const bool here =
            i + 1 < ids.size() && pair_of(ids[i], ids[i + 1]) == pair;
        ids[to++] = here ? token : ids[i];
        if (here) ++i;
      }
      ids.resize(to);
      count(w, +1);
    }
    apply_changes();
  }

 private:
  struct Use {
    int64_t count = 0;
    std::set<uint32_t> words;  // that have had the pair
  };

  void count(uint32_t w, int sign) {
    const std::vector<int32_t>& ids = words_[w].ids;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const Pair pair = pair_of(ids[i], ids[i + 1]);
      changes_[pair] += sign * words_[w].count;
      if (sign > 0) pairs_[pair].words.insert(w);
    }
  }

  void apply_changes() {
    for (const auto& [pair, by] : changes_) {
      if (by == 0) continue;
      int64_t& count = pairs_[pair].count;
      by_count_.erase({-count, pair});
      count += by;
      if (count > 0) by_count_.insert({-count, pair});
    }
    changes_.clear();
  }

  std::vector<Word> words_;
  std::unordered_map<Pair, Use> pairs_;
  std::set<std::pair<int64_t, Pair>> by_count_;  // the most frequent first
  std::unordered_map<Pair, int64_t> changes_;    // not applied yet
};

}  // namespace

Result<BpeTrainer> BpeTrainer::make(int64_t vocab_size) {
  if (vocab_size <= kBytes || vocab_size > kMaxVocab)
    return invalid_argument(
        fmt::format("vocabulary of {}: must be from {} to {}", vocab_size,
                    kBytes + 1, kMaxVocab));
  ASSIGN_OR_RETURN(Regex pattern, Regex::compile(kLlama3Pattern));
  return BpeTrainer(vocab_size, std::move(pattern));
}

Status BpeTrainer::add(std::string_view text) {
  Matcher matcher;
  // Every character is part of a match.
  return pattern_.for_each_match(text, matcher, [&](size_t begin, size_t end) {
    if (end - begin <= kMaxPiece)
      ++counts_[std::string(text.substr(begin, end - begin))];
    return ok_status();
  });
}

Result<std::string> BpeTrainer::finish(const Tick& tick) const {
  std::vector<Word> words;
  for (const auto& [piece, count] : counts_) {
    Word word{.count = count};
    for (const char c : piece)
      word.ids.push_back(static_cast<unsigned char>(c));
    words.push_back(std::move(word));
  }
  Corpus corpus(std::move(words));
  std::vector<std::string> tokens;
  for (int b = 0; b < kBytes; ++b) tokens.emplace_back(1, static_cast<char>(b));
  std::unordered_map<std::string, int32_t> ids;
  std::vector<BpeModel::Merge> merges;
  while (static_cast<int64_t>(tokens.size()) + 1 < vocab_size_) {
    Pair pair = 0;
    if (!corpus.next(pair))
      return invalid_argument(fmt::format(
          "too little text for a vocabulary of {}: it has enough for {}",
          vocab_size_, tokens.size() + 1));
    const auto left = static_cast<int32_t>(pair >> 32);
    const auto right = static_cast<int32_t>(static_cast<uint32_t>(pair));
    std::string text =
        tokens[static_cast<size_t>(left)] + tokens[static_cast<size_t>(right)];
    // Other pairs may have made the same bytes.
    const auto [known, is_new] =
        ids.emplace(text, static_cast<int32_t>(tokens.size()));
    const int32_t token = known->second;
    if (is_new) tokens.push_back(std::move(text));
    merges.push_back(
        {left, right, token, static_cast<uint32_t>(merges.size())});
    corpus.merge(pair, token);
    if (tick) tick(tokens.size() + 1, static_cast<uint64_t>(vocab_size_));
  }
  return to_tokenizer_json(tokens, merges, kLlama3Pattern);
}

}  // namespace remesh::tokenizer
