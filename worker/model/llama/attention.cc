#include "worker/model/llama/attention.h"

#include <algorithm>

namespace remesh::model {
namespace {

using kernels::Dtype;
using kernels::element;

constexpr int kKeysTag = 1, kGradientsTag = 2;

}  // namespace

kernels::AttentionSegment Attention::whole(const Rows& rows) const {
  return {.B = rows.B,
          .Tq = rows.T,
          .Tk = rows.T,
          .num_heads = sizes_.heads,
          .num_kv_heads = sizes_.kv_heads,
          .head_dim = sizes_.head_dim,
          .q_stride = sizes_.qkv_dim(),
          .kv_stride = sizes_.qkv_dim(),
          .q_batch = rows.T,
          .kv_batch = rows.T,
          .lse_T = rows.T,
          .window = window_,
          .documents = rows.documents};
}

void Attention::forward(const Rows& rows, const BlockParts& a,
                        const Scratch& scratch) {
  if (comm_ != nullptr) return ring_forward(rows, a, scratch);
  if (cache_.kv != nullptr) return extend(rows, a, scratch);
  const int64_t k0 = sizes_.q_dim();
  const int64_t v0 = k0 + sizes_.kv_dim();
  backend_.attention(d_, whole(rows), a[kQkv], element(a[kQkv], d_, k0),
                     element(a[kQkv], d_, v0), a[kO], a.f(kLse));
}

void Attention::backward(const Rows& rows, const BlockParts& a,
                         const Scratch& scratch) {
  if (comm_ != nullptr) return ring_backward(rows, a, scratch);
  const int64_t k0 = sizes_.q_dim();
  const int64_t v0 = k0 + sizes_.kv_dim();
  backend_.attention_backward(
      d_, whole(rows), a[kQkv], element(a[kQkv], d_, k0),
      element(a[kQkv], d_, v0), a[kO], a.f(kLse), scratch.dattention, a[kDqkv],
      element(a[kDqkv], d_, k0), element(a[kDqkv], d_, v0));
}

void Attention::extend(const Rows& rows, const BlockParts& a,
                       const Scratch& scratch) {
  const int64_t q = sizes_.q_dim();
  const int64_t columns = 2 * sizes_.kv_dim();
  const int64_t end = cache_.length + rows.T;
  // The first key that any of the queries sees.
  const int64_t first =
      window_ == 0 ? 0 : std::max<int64_t>(0, cache_.length + 1 - window_);
  float* const out = d_ == Dtype::kFp32 ? a.f(kO) : scratch.attention;
  backend_.convert_rows(
      rows.T, columns, d_, element(a[kQkv], d_, q), sizes_.qkv_dim(), d_,
      element(cache_.kv, d_, cache_.length * columns), columns);
  void* const k = element(cache_.kv, d_, first * columns);
  kernels::AttentionSegment s = whole(rows);
  s.Tk = s.kv_batch = end - first;
  s.kv_stride = columns;
  s.q0 = cache_.length;
  s.k0 = first;
  s.documents = {};
  backend_.attention_segment(d_, s, a[kQkv], k, element(k, d_, sizes_.kv_dim()),
                             /*first=*/true, out, a.f(kLse));
  if (d_ != Dtype::kFp32)
    backend_.convert(rows.T * q, Dtype::kFp32, out, d_, a[kO]);
}

// Queries see the block with their own keys first: that one has a key for each.
std::vector<Attention::Pair> Attention::pairs(const Rows& rows,
                                              int step) const {
  const int cp = sizes_.cp;
  const int from = (sizes_.cp_index + cp - step) % cp;  // whose keys
  const int64_t piece = rows.T / 2;
  const int mine[2] = {sizes_.cp_index, 2 * cp - 1 - sizes_.cp_index};
  const int theirs[2] = {from, 2 * cp - 1 - from};
  std::vector<Pair> out;
  for (const int i : {0, 1})
    for (const int j : {i, 1 - i}) {
      const int64_t q0 = mine[i] * piece;
      const int64_t k0 = theirs[j] * piece;
      if (k0 > q0) continue;  // all of it in the future
      if (window_ > 0 && q0 - (k0 + piece - 1) >= window_) continue;
      kernels::AttentionSegment s = whole(rows);
      s.Tq = s.Tk = piece;
      s.kv_stride = 2 * sizes_.kv_dim();
      s.q0 = q0;
      s.k0 = k0;
      s.documents = {};
      const Pair pair = {.segment = s,
                         .q_token = i * piece,
                         .k_token = j * piece,
                         .lse = i * piece,
                         .first = step == 0 && i == j};
      if (rows.documents.empty())
        out.push_back(pair);
      else
        add_documents(rows, pair, &out);
    }
  return out;
}

void Attention::add_documents(const Rows& rows, const Pair& pair,
                              std::vector<Pair>* out) const {
  const kernels::AttentionSegment& s = pair.segment;
  const int64_t T = rows.T * sizes_.cp;
  for (const kernels::Document& d : rows.documents) {
    const int64_t b = d.first / T;
    const int64_t begin = d.first % T;
    const int64_t end = begin + d.tokens;
    const int64_t q0 = std::max(begin, s.q0);
    const int64_t q1 = std::min(end, s.q0 + s.Tq);
    const int64_t k0 = std::max(begin, s.k0);
    const int64_t k1 = std::min(end, s.k0 + s.Tk);
    if (q0 >= q1 || k0 >= k1) continue;
    Pair p = pair;
    p.segment.B = 1;
    p.segment.Tq = q1 - q0;
    p.segment.Tk = k1 - k0;
    p.segment.q0 = q0;
    p.segment.k0 = k0;
    p.q_token += b * rows.T + q0 - s.q0;
    p.k_token += b * rows.T + k0 - s.k0;
    p.lse += b * sizes_.heads * rows.T + q0 - s.q0;
    out->push_back(p);
  }
}

comm::RequestPtr Attention::send(const void* data, size_t bytes, int tag) {
  return comm_->start_send({static_cast<const std::byte*>(data), bytes},
                           (comm_->rank() + 1) % comm_->size(), tag);
}

comm::RequestPtr Attention::receive(void* data, size_t bytes, int tag) {
  return comm_->start_recv({static_cast<std::byte*>(data), bytes},
                           (comm_->rank() + comm_->size() - 1) % comm_->size(),
                           tag);
}

void Attention::pack(const Rows& rows, const BlockParts& a, void* kv) {
  const int64_t columns = 2 * sizes_.kv_dim();
  backend_.convert_rows(rows.N, columns, d_,
                        element(a[kQkv], d_, sizes_.q_dim()), sizes_.qkv_dim(),
                        d_, kv, columns);
  backend_.synchronize();
}

void Attention::ring_forward(const Rows& rows, const BlockParts& a,
                             const Scratch& scratch) {
  const int64_t q = sizes_.q_dim();
  const size_t bytes = kv_bytes(rows, d_);
  float* out = d_ == Dtype::kFp32 ? a.f(kO) : scratch.attention;
  pack(rows, a, scratch.kv[0]);
  for (int step = 0; step < sizes_.cp; ++step) {
    void* kv = scratch.kv[step % 2];
    comm::RequestPtr sent, received;
    if (step + 1 < sizes_.cp) {
      sent = send(kv, bytes, kKeysTag);
      received = receive(scratch.kv[(step + 1) % 2], bytes, kKeysTag);
    }
    for (const Pair& p : pairs(rows, step)) {
      void* k = element(kv, d_, p.k_token * p.segment.kv_stride);
      backend_.attention_segment(
          d_, p.segment, element(a[kQkv], d_, p.q_token * p.segment.q_stride),
          k, element(k, d_, sizes_.kv_dim()), p.first, out + p.q_token * q,
          a.f(kLse) + p.lse);
    }
    if (received != nullptr) received->wait();
    if (sent != nullptr) sent->wait();
  }
  if (d_ != Dtype::kFp32)
    backend_.convert(rows.N * q, Dtype::kFp32, out, d_, a[kO]);
}

void Attention::ring_backward(const Rows& rows, const BlockParts& a,
                              const Scratch& scratch) {
  const int64_t q = sizes_.q_dim();
  const int64_t kv_dim = sizes_.kv_dim();
  const size_t bytes = kv_bytes(rows, d_);
  const size_t gradient_bytes = kv_bytes(rows, Dtype::kFp32);
  float* dq = scratch.attention;
  float* coming = scratch.dkv[2];  // of the current keys, from earlier ranks
  comm::RequestPtr sent[2], received, kv_sent, kv_received;
  backend_.zero(dq, static_cast<size_t>(rows.N * q) * sizeof(float));
  pack(rows, a, scratch.kv[0]);
  for (int step = 0; step < sizes_.cp; ++step) {
    void* kv = scratch.kv[step % 2];
    if (step + 1 < sizes_.cp) {
      kv_sent = send(kv, bytes, kKeysTag);
      kv_received = receive(scratch.kv[(step + 1) % 2], bytes, kKeysTag);
    }
    float* dk = scratch.dkv[step % 2];
    float* dv = dk + rows.N * kv_dim;
    comm::RequestPtr& before = sent[step % 2];
    if (before != nullptr) before->wait();
    backend_.zero(dk, gradient_bytes);
    for (const Pair& p : pairs(rows, step)) {
      void* k = element(kv, d_, p.k_token * p.segment.kv_stride);
      backend_.attention_segment_backward(
          d_, p.segment, element(a[kQkv], d_, p.q_token * p.segment.q_stride),
          k, element(k, d_, kv_dim), element(a[kO], d_, p.q_token * q),
          a.f(kLse) + p.lse, element(scratch.dattention, d_, p.q_token * q),
          dq + p.q_token * q, dk + p.k_token * kv_dim, dv + p.k_token * kv_dim);
    }
    if (received != nullptr) {
      received->wait();
      backend_.accumulate(rows.N * 2 * kv_dim, 1, coming, dk);
    }
    backend_.synchronize();
    before = send(dk, gradient_bytes, kGradientsTag);
    received = receive(coming, gradient_bytes, kGradientsTag);
    if (kv_received != nullptr) kv_received->wait();
    if (kv_sent != nullptr) kv_sent->wait();
    kv_received.reset();
    kv_sent.reset();
  }
  received->wait();
  unpack_gradients(rows, dq, coming, a[kDqkv]);
  for (comm::RequestPtr& s : sent)
    if (s != nullptr) s->wait();
}

void Attention::unpack_gradients(const Rows& rows, const float* dq,
                                 const float* dkv, void* dqkv) {
  const int64_t q = sizes_.q_dim();
  const int64_t kv = sizes_.kv_dim();
  const auto put = [&](int64_t columns, const float* from, int64_t at) {
    backend_.convert_rows(rows.N, columns, Dtype::kFp32, from, columns, d_,
                          element(dqkv, d_, at), sizes_.qkv_dim());
  };
  put(q, dq, 0);
  put(kv, dkv, q);
  put(kv, dkv + rows.N * kv, q + kv);
}

}  // namespace remesh::model
