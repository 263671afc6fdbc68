#include "bench/planner/rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>

#include "proto/base/number.h"
#include "proto/base/text.h"

namespace remesh::bench {
namespace {

using planner::Precision;

// Columns that must be there; a value may be empty unless it is in kRequired.
constexpr const char* kColumns[] = {"source",      "where_in_source",
                                    "model",       "params_b",
                                    "layers",      "hidden",
                                    "heads",       "kv_heads",
                                    "ffn_hidden",  "vocab",
                                    "seq",         "gpu",
                                    "n_gpus",      "tp",
                                    "pp",          "dp",
                                    "cp",          "zero_stage",
                                    "micro_batch", "global_batch",
                                    "recompute",   "dtype",
                                    "verified",    "tokens_per_s_per_gpu"};

constexpr int64_t kMostRanks = 1 << 20;
constexpr size_t kMostText = 256;  // of a field that is matched or shown

// Lines up to one at whose end no quote is open.
struct Record {
  int line = 0;  // the first one
  std::string text;
};

// Reads the next record that is not empty; 0 is its line if there is none.
// *lines: how many were read.
Status next_record(std::istream& in, const std::string& name, int* lines,
                   Record* out) {
  *out = {};
  bool open = false;
  for (std::string line; std::getline(in, line);) {
    ++*lines;
    if (!open && (line.empty() || line == "\r")) continue;
    if (out->line == 0) out->line = *lines;
    out->text += line + '\n';
    if (std::count(line.begin(), line.end(), '"') % 2 == 1) open = !open;
    if (!open) return ok_status();
  }
  if (!open) return ok_status();
  return invalid_argument(
      fmt::format("{}:{}: a quote is not closed", name, out->line));
}

// Fields of a record, with quotes as in RFC 4180, without blanks at their ends.
std::vector<std::string> split(const std::string& record) {
  std::vector<std::string> out(1);
  bool quoted = false;
  for (size_t i = 0; i < record.size(); ++i) {
    const char c = record[i];
    if (c == '"' && quoted && i + 1 < record.size() && record[i + 1] == '"')
      out.back() += record[++i];
    else if (c == '"')
      quoted = !quoted;
    else if (c == ',' && !quoted)
      out.emplace_back();
    else
      out.back() += c;
  }
  constexpr const char* kBlank = " \t\r\n";
  for (std::string& field : out) {
    field.erase(field.find_last_not_of(kBlank) + 1);
    field.erase(0, field.find_first_not_of(kBlank));
  }
  return out;
}

// One line, by column name; remembers the first problem.
class Fields {
 public:
  Fields(const std::map<std::string, size_t>& columns,
         std::vector<std::string> values, std::string where)
      : columns_(columns),
        values_(std::move(values)),
        where_(std::move(where)) {}

  std::string text(const std::string& column) const {
    return values_[columns_.at(column)];
  }
  std::string lower(const std::string& column) const {
    std::string out = text(column);
    for (char& c : out)
      c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return out;
  }
  // `missing` where the field is empty; an error if that is not allowed (< 0).
  double number(const std::string& column, double missing, double least,
                double most) {
    const std::string value = text(column);
    if (value.empty() && missing >= 0) return missing;
    const auto x = parse_number<double>(value);
    if (x && *x >= least && *x <= most) return *x;
    fail(column, fmt::format("a number from {} to {}", least, most));
    return least;
  }
  int64_t integer(const std::string& column, int64_t missing, int64_t least,
                  int64_t most = 1'000'000'000) {
    const double x =
        number(column, static_cast<double>(missing), static_cast<double>(least),
               static_cast<double>(most));
    if (x != std::floor(x)) fail(column, "an integer");
    return static_cast<int64_t>(x);
  }
  // A degree of parallelism or a number of devices.
  int degree(const std::string& column, int64_t missing) {
    return static_cast<int>(integer(column, missing, 1, kMostRanks));
  }
  void fail(const std::string& column, const std::string& allowed) {
    check(invalid_argument(fmt::format("{} = '{}': must be {}", column,
                                       text(column).substr(0, kMostText),
                                       allowed)));
  }
  void check(const Status& s) {
    if (problem_.ok() && !s.ok()) problem_ = s.with_context(where_);
  }
  const Status& problem() const { return problem_; }

 private:
  const std::map<std::string, size_t>& columns_;
  std::vector<std::string> values_;
  std::string where_;
  Status problem_;
};

bool is_known_type(const std::string& dtype) {
  const std::string_view kTypes[] = {"bf16", "fp16", "fp8", "fp32"};
  return std::any_of(std::begin(kTypes), std::end(kTypes),
                     [&](std::string_view t) { return dtype.starts_with(t); });
}

// The number after `name` in a note: "VP=12", "interleave=3"; 0 if none.
int note_number(const std::string& note, const std::string& name) {
  std::smatch m;
  const std::regex pattern(name + "=([0-9]{1,4})");
  return std::regex_search(note, m, pattern) ? std::stoi(m[1]) : 0;
}
bool note_has(const std::string& note, const std::string& pattern) {
  return std::regex_search(note, std::regex(pattern, std::regex::icase));
}
// "no compile"
bool note_denies(const std::string& note, const std::string& word) {
  return note_has(note, "(no|non|not|without|w/o)[- ](" + word + ")");
}
bool note_says(const std::string& note, const std::string& word) {
  return note_has(note, word) && !note_denies(note, word);
}

// The architecture whose number of parameters comes nearer: a feed-forward of
// two matrices or of three.
std::string architecture_of(const geometry::ModelConfig& c, double params_b) {
  const auto layers = static_cast<double>(c.n_layers);
  const auto attention = static_cast<double>(2 * c.dim * (c.dim + c.kv_dim()));
  const auto matrix = static_cast<double>(c.dim * c.hidden_dim);
  const auto table = static_cast<double>(c.dim * c.vocab_size);
  const auto error = [&](double matrices) {
    return std::fabs(layers * (attention + matrices * matrix) + 1.5 * table -
                     params_b * 1e9);
  };
  return params_b > 0 && error(3) < error(2) ? "llama" : "gpt";
}

// What the columns do not say:
//   fused attention  unless the note says "no flash", or the run may be older
//                    than FlashAttention (2022): fp16 on a V100 or A100, where
//                    the note does not say "flash"
//   tuned attention  with zero_stage 1, and where the note says "cuDNN"
//   fused kernels    of Megatron (zero_stage 0 and 1) unless the note says "no
//                    compile", and where it says "compile"
//   overlap of data  unless zero_stage is 0 (Megatron before the distributed
//                    optimizer) or the run is as old by dtype and device;
//                    gradients of 2 bytes then
//   overlap of tensor-parallel communication
//                    with zero_stage 1, and where the note says "async TP"
//   sequence parallel  where the note says so, or tensor-parallel communication
//                    has its form: zero_stage 1 to 3
//   chunks           "VP=n" or "interleave=n"; "interleaved" alone: 2
//   micro-batch      where none is given and the note speaks of a "local
//                    batch", TorchTitan's parameter, the one that makes as many
//                    microbatches as there are stages, its default
// Where neither a micro-batch nor, by the note, the schedule is given, both are
// chosen (candidates() in prediction.cc).
planner::Execution execution_of(const std::string& note, const Row& row,
                                const std::string& dtype) {
  planner::Execution x;
  const int zero = row.shape.zero_stage;
  const bool old = dtype.starts_with("fp16") &&
                   (row.device == "V100" || row.device == "A100");
  x.precision = dtype.starts_with("fp8")    ? Precision::kFp8
                : dtype.starts_with("fp32") ? Precision::k32
                                            : Precision::k16;
  x.fused_attention =
      old ? note_says(note, "flash|FA2") : !note_denies(note, "flash|FA2");
  x.tuned_attention = zero == 1 || note_says(note, "cuDNN");
  x.row_scaled = dtype == "fp8-rowwise";
  x.fused_kernels =
      zero <= 1 ? !note_denies(note, "compile") : note_says(note, "compile");
  x.overlap_data = zero >= 1 && !old;
  x.overlap_tensor = (zero == 1 && !note_says(note, "vanilla")) ||
                     note_says(note, "async ?TP");
  x.overlap_pipeline = zero >= 1;
  x.sequence_parallel = zero >= 1 || note_says(note, "sequence-parallel=yes");
  x.gradient_bytes = old ? 2 : 4;
  if (x.precision == Precision::k32) x.weight_bytes = x.message_bytes = 4;
  // Weights are read in fp32 and written in 16 bits (6), gradients converted
  // (6) and added (12). Megatron's products add to sums in fp32.
  if (note_says(note, "autocast")) x.accumulation_bytes = 24;
  return x;
}

void read_device(Fields* f, Row* row) {
  std::string gpu = f->text("gpu");
  for (char& c : gpu)
    c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  if (gpu.empty())
    return f->fail("gpu", "the name of a device, such as A100 or H100");
  // Longer runs of letters or digits overflow the stack of std::regex.
  if (gpu.size() > kMostText)
    return f->fail("gpu", fmt::format("at most {} characters", kMostText));
  std::smatch m;
  static const std::regex kCount("^[0-9]{1,7} ?X ?");  // "8xH100"
  static const std::regex kFamily("[A-Z]+[0-9]+[A-Z]*");
  static const std::regex kMemory("(^|[^0-9])([0-9]{1,6}) ?GB");
  gpu = std::regex_replace(gpu, kCount, "");
  row->device = std::regex_search(gpu, m, kFamily) ? m[0].str() : gpu;
  if (std::regex_search(gpu, m, kMemory)) row->memory_gb = std::stod(m[2]);
}

void read_model(Fields* f, Row* row) {
  geometry::ModelConfig& c = row->shape.model;
  c.n_layers = f->integer("layers", -1, 1);
  c.dim = f->integer("hidden", -1, 1);
  c.n_heads = f->integer("heads", -1, 1);
  c.n_kv_heads = f->integer("kv_heads", c.n_heads, 1);
  c.hidden_dim = f->integer("ffn_hidden", 4 * c.dim, 1);
  c.vocab_size = f->integer("vocab", -1, 1);
  row->shape.T = f->integer("seq", -1, 1);
  f->check(c.validate());
}

// The number of ranks, where a degree of 0 is not given; above kMostRanks if
// there are more, since the product may exceed 64 bits.
int64_t ranks_of(const geometry::Layout& l) {
  int64_t ranks = 1;
  for (const int degree : {l.tp, l.pp, l.cp, l.dp})
    ranks = std::min(ranks * std::max(1, degree), kMostRanks + 1);
  return ranks;
}

void read_layout(Fields* f, Row* row) {
  geometry::Layout& l = row->layout;
  l.tp = f->degree("tp", 0);
  l.pp = f->degree("pp", l.tp == 0 ? 0 : 1);
  l.cp = f->degree("cp", 1);
  l.dp = f->degree("dp", 0);
  // Without tp, and pp or dp, all three are searched.
  if (l.tp == 0 && (l.pp == 0 || l.dp == 0)) l.pp = l.dp = 0;
  const int64_t given = ranks_of(l);
  // The number that is missing follows from the others.
  row->world = f->degree("n_gpus", l.dp == 0 ? -1 : given);
  if (!f->problem().ok()) return;
  if (given > kMostRanks || row->world % given != 0 ||
      (l.tp > 0 && l.dp > 0 && row->world != given))
    return f->fail(
        "n_gpus", given > kMostRanks
                      ? fmt::format("tp x pp x dp x cp, at most {}", kMostRanks)
                      : fmt::format("{} = {}",
                                    l.tp > 0 && l.dp > 0
                                        ? "tp x pp x dp x cp"
                                        : "a multiple of the given degrees",
                                    given));
  int& missing = l.dp == 0 ? l.dp : l.tp;
  if (missing == 0) missing = static_cast<int>(row->world / given);
  if (l.tp > 0 && row->shape.model.n_heads % l.tp != 0)
    return f->fail("tp", "a divisor of heads");
  if (l.pp > row->shape.model.n_layers) return f->fail("pp", "at most layers");
  if (row->shape.T % l.cp != 0) return f->fail("cp", "a divisor of seq");
  row->global_batch = f->integer("global_batch", 0, 1);
  row->shape.B = f->integer("micro_batch", 0, 1);
  row->shape.zero_stage = static_cast<int>(f->integer("zero_stage", 0, 0));
  if (row->shape.zero_stage > 3) f->fail("zero_stage", "from 0 to 3");
  if (row->global_batch > 0 && row->shape.B > row->global_batch)
    f->fail("micro_batch", "at most global_batch");
}

Result<Row> read_row(Fields f, int line) {
  Row row{.line = line, .source = f.text("source"), .model = f.text("model")};
  read_device(&f, &row);
  read_model(&f, &row);
  if (f.problem().ok()) read_layout(&f, &row);
  const double params = f.number("params_b", 0, 0, 1e6);
  row.tokens_per_s = f.number("tokens_per_s_per_gpu", -1, 1e-9, 1e12);
  const std::string recompute = f.lower("recompute"), dtype = f.lower("dtype");
  if (!recompute.empty()) {
    const auto parsed = geometry::parse_recompute(recompute);
    if (!parsed.ok()) f.fail("recompute", "none, selective, full or empty");
    if (parsed.ok()) row.shape.recompute = *parsed;
  }
  RETURN_IF_ERROR(f.problem());
  const std::string note = f.text("where_in_source");
  row.shape.model.arch = architecture_of(row.shape.model, params);
  row.run = execution_of(note, row, dtype);
  row.shape.chunks =
      std::max({1, note_number(note, "VP"), note_number(note, "interleave"),
                note_says(note, "interleaved") ? 2 : 1});
  const auto per_rank =
      static_cast<int>(row.shape.model.n_layers) / std::max(1, row.layout.pp);
  row.shape.chunks = std::min(row.shape.chunks, per_rank);
  if (row.layout.pp <= 1) row.shape.chunks = 1;
  if (row.shape.chunks > 1)
    row.shape.schedule = geometry::ScheduleKind::kInterleaved1F1B;
  row.names_schedule = note_has(note, "1F1B|interleave|VP=|GPipe");
  row.splits_by_stages = note_says(note, "local batch");
  row.single_node_vtrain = row.source == "vTrain single node";
  row.multi_node_vtrain =
      !row.single_node_vtrain && row.source.find("vTrain") != std::string::npos;
  return row;
}

}  // namespace

Result<std::vector<Row>> parse_rows(const std::string& text,
                                    const std::string& name, Skipped* skipped) {
  std::istringstream in(text);
  int lines = 0;
  Record record;
  RETURN_IF_ERROR(next_record(in, name, &lines, &record));
  if (record.line == 0)
    return invalid_argument(name +
                            ": empty; expected a CSV file with a header");
  if (record.text.starts_with("\xEF\xBB\xBF")) record.text.erase(0, 3);
  std::map<std::string, size_t> columns;
  const std::vector<std::string> header = split(record.text);
  for (size_t i = 0; i < header.size(); ++i) columns.emplace(header[i], i);
  std::vector<std::string> missing, repeated;
  const auto need = [&](const char* column) {
    const auto n = std::count(header.begin(), header.end(), column);
    if (n == 0) missing.emplace_back(column);
    if (n > 1) repeated.emplace_back(column);
  };
  for (const char* c : kColumns) need(c);
  if (!missing.empty())
    return invalid_argument(
        fmt::format("{}: missing columns: {}", name, join(missing)));
  if (!repeated.empty())
    return invalid_argument(
        fmt::format("{}: columns that occur twice: {}", name, join(repeated)));
  std::vector<Row> rows;
  for (;;) {
    RETURN_IF_ERROR(next_record(in, name, &lines, &record));
    if (record.line == 0) break;
    const std::string where = fmt::format("{}:{}", name, record.line);
    std::vector<std::string> values = split(record.text);
    if (values.size() != header.size())
      return invalid_argument(fmt::format("{}: {} fields, the header has {}",
                                          where, values.size(), header.size()));
    Fields fields(columns, std::move(values), where);
    if (fields.lower("verified") == "memory" ||
        fields.text("tokens_per_s_per_gpu").empty())
      continue;
    if (const std::string dtype = fields.lower("dtype").substr(0, kMostText);
        !is_known_type(dtype)) {
      if (skipped != nullptr) ++(*skipped)["dtype " + dtype];
      continue;
    }
    ASSIGN_OR_RETURN(Row row, read_row(std::move(fields), record.line));
    rows.push_back(std::move(row));
  }
  if (rows.empty()) return invalid_argument(name + ": no row to compare with");
  return rows;
}

Result<std::vector<Row>> read_rows(const std::string& path, Skipped* skipped) {
  std::ifstream in(path);
  in.peek();  // A folder can be opened, but not read.
  if (!in.is_open() || in.bad()) return not_found(path + ": cannot be read");
  std::ostringstream text;
  text << in.rdbuf();
  return parse_rows(text.str(), path, skipped);
}

}  // namespace remesh::bench
