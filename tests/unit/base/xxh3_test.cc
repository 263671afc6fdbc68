// The same values as the library's, whatever the pieces.
#include "proto/base/xxh3.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "tests/testing/seed.h"

namespace remesh {
namespace {

TEST(Xxh3, IsTheLibrarys) {
  const uint32_t seed = test_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  std::vector<unsigned char> data(5000);
  for (auto& x : data) x = static_cast<unsigned char>(random());
  for (size_t n = 0; n <= data.size(); n += n < 600 ? 1 : 97) {
    ASSERT_EQ(xxh3(data.data(), n), XXH3_64bits(data.data(), n)) << n;
    ASSERT_EQ(xxh3(data.data(), n, n), XXH3_64bits_withSeed(data.data(), n, n));
    Xxh3Stream stream;
    stream.add(data.data(), n);
    stream.reset();
    for (size_t at = 0; at < n;) {
      const size_t piece = std::min<size_t>(n - at, random() % 900);
      stream.add(data.data() + at, piece);
      at += piece;
    }
    ASSERT_EQ(stream.digest(), XXH3_64bits(data.data(), n)) << n;
    XXH128_canonical_t wide;
    XXH128_canonicalFromHash(&wide, XXH3_128bits(data.data(), n));
    const Xxh128 once = xxh3_128(std::as_bytes(std::span(data.data(), n)));
    ASSERT_EQ(std::memcmp(once.data(), wide.digest, sizeof once), 0) << n;
    ASSERT_EQ(stream.digest_128(), once) << n;
  }
}

}  // namespace
}  // namespace remesh
