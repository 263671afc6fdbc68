// Small tokenizer files that exercise every kind of component.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>

#include "proto/sentencepiece.pb.h"
#include "worker/tokenizer/pipeline.h"
#include "worker/tokenizer/unicode.h"

namespace remesh::tokenizer {

using Json = nlohmann::json;

// As Llama 2: characters, byte fallback, U+2581 for spaces, merges of "hello"
// and of two spaces. Ids: <unk> 0, <s> 1, </s> 2, bytes from 3, then
// characters.
inline Json sentencepiece_like() {
  Json vocab;
  int id = 0;
  for (const char* token : {"<unk>", "<s>", "</s>"}) vocab[token] = id++;
  for (int b = 0; b < 256; ++b) vocab[fmt::format("<0x{:02X}>", b)] = id++;
  for (const char* token : {"\u2581", "h", "e", "l", "o", "\u2581\u2581", "he",
                            "ll", "hell", "hello", "\u2581hello"})
    vocab[token] = id++;
  return {
      {"added_tokens",
       {{{"id", 2}, {"content", "</s>"}, {"special", true}},
        {{"id", id}, {"content", "<tool>"}, {"normalized", false}}}},
      {"normalizer",
       {{"type", "Sequence"},
        {"normalizers",
         {{{"type", "Prepend"}, {"prepend", "\u2581"}},
          {{"type", "Replace"},
           {"pattern", {{"String", " "}}},
           {"content", "\u2581"}}}}}},
      {"pre_tokenizer", nullptr},
      {"post_processor", {{"type", "TemplateProcessing"}}},
      {"decoder",
       {{"type", "Sequence"},
        {"decoders",
         {{{"type", "Replace"},
           {"pattern", {{"String", "\u2581"}}},
           {"content", " "}},
          {{"type", "ByteFallback"}},
          {{"type", "Fuse"}},
          {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}},
      {"model",
       {{"type", "BPE"},
        {"unk_token", "<unk>"},
        {"fuse_unk", true},
        {"byte_fallback", true},
        {"vocab", vocab},
        {"merges",
         {"\u2581 \u2581", "h e", "l l", "he ll", "hell o", "\u2581 hello"}}}}};
}

// The same as a SentencePiece model.
inline pb::SentencePieceModel small_sentencepiece() {
  using Piece = pb::SentencePieceModel::Piece;
  pb::SentencePieceModel m;
  float score = 0;
  const auto add = [&](const std::string& text, Piece::Type type) {
    Piece* p = m.add_pieces();
    p->set_piece(text);
    p->set_type(type);
    p->set_score(score);
    if (type == Piece::NORMAL) score -= 1;
  };
  add("<unk>", Piece::UNKNOWN);
  for (const char* token : {"<s>", "</s>"}) add(token, Piece::CONTROL);
  for (int b = 0; b < 256; ++b) add(fmt::format("<0x{:02X}>", b), Piece::BYTE);
  add("<tool>", Piece::USER_DEFINED);
  for (const char* token : {"\u2581\u2581", "he", "ll", "hell", "hello",
                            "\u2581hello", "\u2581", "h", "e", "l", "o"})
    add(token, Piece::NORMAL);
  m.mutable_trainer_spec()->set_model_type(
      pb::SentencePieceModel::Trainer::BPE);
  m.mutable_trainer_spec()->set_byte_fallback(true);
  m.mutable_normalizer_spec()->set_name("identity");
  return m;
}

// As GPT-2: bytes (ids 0 to 255 in byte order), "he" 256, "Ġhe" 257, and
// <|endoftext|> 258.
inline Json byte_level() {
  Json vocab;
  for (int b = 0; b < 256; ++b)
    vocab[to_alphabet(std::string(1, static_cast<char>(b)))] = b;
  vocab["he"] = 256;
  vocab["Ġhe"] = 257;
  return {
      {"added_tokens",
       {{{"id", 258}, {"content", "<|endoftext|>"}, {"special", true}}}},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
      {"post_processor", {{"type", "ByteLevel"}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model",
       {{"vocab", vocab},
        {"merges",
         Json::array({Json::array({"h", "e"}), Json::array({"Ġ", "he"})})}}}};
}

}  // namespace remesh::tokenizer
