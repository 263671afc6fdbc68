// TextStep: one change of a text before it is divided into pieces, as a
// normalizer of tokenizer.json makes it.
//
// A step is immutable and may be used by any number of threads, each with a
// Matcher of its own. It fails if the text becomes much longer or has 2^31
// bytes, or if a pattern takes more steps than is reasonable.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "proto/base/status.h"
#include "worker/tokenizer/regex.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::tokenizer {

// What stands for a space in SentencePiece's vocabularies.
inline constexpr char kSpaceMark[] = "\u2581";

// Whether the text is whole, or continues another one and is continued.
struct TextEdges {
  bool begins = true;
  bool ends = true;
};

using TextStep = std::function<Status(TextEdges, Matcher&, std::string& text)>;

// Applies the steps to *text, which then refers to `held`, if there are any.
Status apply_steps(const std::vector<TextStep>& steps, TextEdges edges,
                   Matcher& matcher, std::string_view* text, std::string* held);

TextStep to_normal_form(NormalForm form);
TextStep to_lowercase();
// Removes the white space at the beginning and the end, where these are edges.
TextStep strip(bool left, bool right);
// Replaces every match. REQUIRES: it matches no empty text.
TextStep replace(std::string from, std::string to);
TextStep replace(Regex from, std::string to);
// Puts `prefix` where a text begins that is not empty and, with `once`, does
// not begin with it already.
TextStep prepend(std::string prefix, bool once = false);

}  // namespace remesh::tokenizer
