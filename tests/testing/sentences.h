// The sentences for people in the messages of the control plane, which must not
// decide anything.
#pragma once

#include <google/protobuf/message.h>

#include <functional>
#include <string>

namespace remesh {

// Whether a field of that name is a sentence.
bool is_sentence(const std::string& field);

// Replaces every sentence in the message, at any depth, by f of it.
void for_each_sentence(google::protobuf::Message* message,
                       const std::function<std::string(const std::string&)>& f);

// The bytes of a message, the same for equal ones: SerializeAsString() writes
// the entries of a map in any order.
std::string bytes_of(const google::protobuf::Message& message);
// A message's bytes without its sentences.
template <typename T>
std::string without_sentences(T message) {
  for_each_sentence(&message, [](const std::string&) { return ""; });
  return bytes_of(message);
}

// The same letters in another order; equal sentences stay equal.
std::string reworded(const std::string& sentence);
// As it was before, or the sentence itself.
std::string original(const std::string& sentence);

}  // namespace remesh
