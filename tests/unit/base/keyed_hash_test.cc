#include "proto/base/keyed_hash.h"

#include <gtest/gtest.h>

namespace remesh {
namespace {

// As hashlib.blake2b(text, digest_size=16, key=secret) of Python says.
TEST(KeyedHash, IsBlake2b) {
  EXPECT_EQ(keyed_hash("secret", "7 3"), 0x388294f2cfb059dfU);
  EXPECT_EQ(keyed_hash("", "7 3"), 0x3934b51c2ee30e67U);
}

TEST(KeyedHash, SecretsDiffer) {
  const std::string a = new_secret();
  EXPECT_EQ(a.size(), kSecretBytes);
  EXPECT_NE(a, new_secret());
  EXPECT_NE(keyed_hash(a, "x"), keyed_hash(new_secret(), "x"));
}

}  // namespace
}  // namespace remesh
