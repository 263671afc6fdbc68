#include "tests/testing/sentences.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <set>
#include <vector>

#include "proto/base/check.h"

namespace remesh {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

const std::set<std::string> kSentences = {
    "cause",    "what",     "subject",        "reason",           "error",
    "detail",   "doing",    "source",         "checkpoint_error", "damaged",
    "last_log", "log_tail", "hardware_error", "cordoned",         "prediction",
    "text"};

}  // namespace

bool is_sentence(const std::string& field) {
  return kSentences.contains(field);
}

void for_each_sentence(
    Message* m, const std::function<std::string(const std::string&)>& f) {
  const Reflection* r = m->GetReflection();
  std::vector<const FieldDescriptor*> set;
  r->ListFields(*m, &set);
  for (const FieldDescriptor* field : set) {
    const int size = field->is_repeated() ? r->FieldSize(*m, field) : 1;
    for (int i = 0; i < size; ++i) {
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        for_each_sentence(field->is_repeated()
                              ? r->MutableRepeatedMessage(m, field, i)
                              : r->MutableMessage(m, field),
                          f);
      } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_STRING &&
                 is_sentence(field->name())) {
        if (field->is_repeated())
          r->SetRepeatedString(m, field, i,
                               f(r->GetRepeatedString(*m, field, i)));
        else
          r->SetString(m, field, f(r->GetString(*m, field)));
      }
    }
  }
}

std::string bytes_of(const google::protobuf::Message& message) {
  std::string out;
  google::protobuf::io::StringOutputStream stream(&out);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  CHECK(message.SerializeToCodedStream(&coded));
  coded.Trim();
  return out;
}

std::string reworded(const std::string& sentence) {
  if (sentence.empty() || sentence[0] == '~') return sentence;
  return "~" + std::string(sentence.rbegin(), sentence.rend());
}

std::string original(const std::string& sentence) {
  if (sentence.empty() || sentence[0] != '~') return sentence;
  return {sentence.rbegin(), sentence.rend() - 1};
}

}  // namespace remesh
