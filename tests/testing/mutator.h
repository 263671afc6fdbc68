// Random changes of an input: flipped bits, truncation, pieces taken out,
// repeated, spliced in or copied over others, runs of one byte, numbers at
// limits, random bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string>

namespace remesh {

// A number in the environment, such as that of rounds.
inline uint64_t from_env(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : rng_(seed) {}

  // One to four changes of `text`; pieces may come from `other`.
  std::string operator()(std::string text, const std::string& other) {
    for (uint64_t n = 1 + below(4); n > 0; --n) change(text, other);
    return text;
  }
  uint64_t below(uint64_t n) { return n == 0 ? 0 : rng_() % n; }

 private:
  void change(std::string& text, const std::string& other) {
    const size_t at = below(text.size() + 1);
    const size_t n = std::min(below(16) + 1, text.size() - at);
    const size_t more = std::min(below(64) + 1, text.size() - at);
    switch (below(10)) {
      case 0:  // flip a bit
        if (at < text.size())
          text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
        break;
      case 1:  // cut off
        text.resize(at);
        break;
      case 2:  // take out
        text.erase(at, n);
        break;
      case 3:  // repeat
        text.insert(at, text.substr(at, n));
        break;
      case 4: {  // splice in
        const size_t from = below(other.size() + 1);
        text.insert(at, other.substr(from, below(32)));
        break;
      }
      case 5: {  // an interesting number, as bytes or as text
        static const char* const kNumbers[] = {"-1",
                                               "0",
                                               "9223372036854775808",
                                               "1e999",
                                               "\xff\xff\xff\xff",
                                               "\"",
                                               "[",
                                               "{",
                                               "nan",
                                               "\n",
                                               "="};
        text.insert(at, kNumbers[below(std::size(kNumbers))]);
        break;
      }
      case 6:  // overwrite with another piece, as a misplaced sector
        text.replace(at, more, text.substr(below(text.size() + 1), more));
        break;
      case 7:  // overwrite with zeros, as a lost sector
        text.replace(at, more, more, '\0');
        break;
      case 8:  // insert a run of one byte
        text.insert(at, below(64) + 1, static_cast<char>(below(256)));
        break;
      default:  // overwrite with random bytes
        for (size_t i = at; i < at + n; ++i)
          text[i] = static_cast<char>(below(256));
    }
  }
  std::mt19937_64 rng_;
};

}  // namespace remesh
