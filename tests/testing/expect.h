// Checks of a Status, of a Result and of a text, which print it if they fail.
//
// Each argument is evaluated once. What begins with ASSERT leaves the function,
// which must return void. `<<` adds to the message, except after ASSERT_OK_AND.
#pragma once

#include <gtest/gtest.h>

#include <string_view>
#include <utility>

#include "proto/base/status.h"

namespace remesh::expect {

inline ::testing::AssertionResult ok(const Status& status) {
  return ::testing::AssertionResult(status.ok()) << status.to_string();
}
template <typename T>
::testing::AssertionResult ok(const Result<T>& result) {
  return ok(result.status());
}

inline ::testing::AssertionResult has(std::string_view text,
                                      std::string_view part) {
  const bool found = text.find(part) != std::string_view::npos;
  return ::testing::AssertionResult(found)
         << '"' << part << (found ? "\" is in: " : "\" is not in: ") << text;
}
inline ::testing::AssertionResult says(const Status& status,
                                       std::string_view part) {
  const bool found = status.message().find(part) != std::string::npos;
  return ::testing::AssertionResult(found)
         << '"' << part << "\" is not in: " << status.to_string();
}
template <typename T>
::testing::AssertionResult says(const Result<T>& result,
                                std::string_view part) {
  return says(result.status(), part);
}

}  // namespace remesh::expect

#define ASSERT_OK(...) ASSERT_TRUE(::remesh::expect::ok(__VA_ARGS__))
#define EXPECT_OK(...) EXPECT_TRUE(::remesh::expect::ok(__VA_ARGS__))

// ASSERT_OK_AND(auto x, f()): x is the value of the Result that f() returns.
#define ASSERT_OK_AND(lhs, ...) \
  ASSERT_OK_AND_(REMESH_CONCAT(remesh_result_, __LINE__), lhs, __VA_ARGS__)
// NOLINTBEGIN(bugprone-macro-parentheses): tmp is a name, lhs may declare one.
#define ASSERT_OK_AND_(tmp, lhs, ...) \
  auto tmp = (__VA_ARGS__);           \
  ASSERT_OK(tmp) << " " #__VA_ARGS__; \
  lhs = std::move(tmp).value()
// NOLINTEND(bugprone-macro-parentheses)

// Whether the text has that part.
#define ASSERT_HAS(text, ...) \
  ASSERT_TRUE(::remesh::expect::has(text, __VA_ARGS__))
#define EXPECT_HAS(text, ...) \
  EXPECT_TRUE(::remesh::expect::has(text, __VA_ARGS__))
#define EXPECT_LACKS(text, ...) \
  EXPECT_FALSE(::remesh::expect::has(text, __VA_ARGS__))

// Whether the message of a failed Status or Result has that part.
#define ASSERT_SAYS(result, ...) \
  ASSERT_TRUE(::remesh::expect::says(result, __VA_ARGS__))
#define EXPECT_SAYS(result, ...) \
  EXPECT_TRUE(::remesh::expect::says(result, __VA_ARGS__))
