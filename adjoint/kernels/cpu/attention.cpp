// Attention to some keys, and its cotangents, by blocks of queries and keys (Dao et al. 2022):
//
//   P_ij = exp(scale q_i . k_j - log_i),   out_i = sum_j P_ij v_j,   log_i = ln sum_j exp(scale q_i . k_j)
//   dv_j = sum_i P_ij d_i,   dS_ij = scale P_ij (d_i . v_j - delta_i),   dq_i = sum_j dS_ij k_j,   dk_j = sum_i dS_ij q_i
//
// The backward's log_i, and delta_i = d_i . out_i, may be of more keys than these: then results are these keys' shares.
// Causal: query i sees the keys up to i.
//
// Lanes are queries in the forward, where the largest scores and the sums then need no reduction, and keys in the
// backward, where a block of keys keeps its sums in the caches while all queries pass. Rows are whole vectors, on a
// vector's boundary: the caller pads them by zeros.
#include <algorithm>
#include <cmath>
#include <limits>

#include "products.h"

struct AttentionArgs {
  int64_t batch, heads, queries, keys, width, threads, causal;
  double scale;
  struct Rows {
    void* data;
    int64_t batch_stride, head_stride, token_stride;
  } q, k, v, out, d, dk, dv;
  void *log, *delta;  // (batch, heads, queries)
  void* dq;           // (parts, batch, heads, queries, width), zeroed by the caller: the threads that share a head add to one each
};

namespace {
// Of whole tiles (`in_tiles`).
constexpr int64_t QUERIES = REGISTERS == 32 ? 64 : 96, KEYS = REGISTERS == 32 ? 128 : 96;

template <class T> struct Attention {
  typedef V<T> Vt;
  static constexpr int L = Vec<T>::L;
  static constexpr T NOTHING = -std::numeric_limits<T>::infinity();  // the score of a key that is not seen
  const AttentionArgs& s;
  const int64_t W, WV;  // width, in numbers and in vectors

  explicit Attention(const AttentionArgs& a) : s(a), W(a.width), WV(a.width / L) {}

  static ALWAYS_INLINE Vt& at(T* p) { return *(Vt*)p; }
  T* row(const AttentionArgs::Rows& rows, int64_t head, int64_t token) const {
    return (T*)rows.data + head / s.heads * rows.batch_stride + head % s.heads * rows.head_stride + token * rows.token_stride;
  }
  static T* sized(std::vector<Vt>& memory, int64_t numbers) {
    memory.assign(numbers / L, Vt{});
    return (T*)memory.data();
  }
  // Rows as columns, (width, size), of which those past `count` are zero.
  void transpose(const T* from, int64_t stride, int64_t count, T* to, int64_t size) const {
    for (int64_t v = 0; v < WV; v++) transpose_column<T>(from + v * L, stride, count, to + v * L * size, size);
  }
  // to_i = factor(i) to_i + sum over k < depth of left(i, k) right_k, rows of W numbers. A block's sum begins at zero:
  // a running one would round to the size of all keys' sum at each key.
  template <class F> ALWAYS_INLINE void add(T* to, int64_t rows, int64_t depth, Left<T> left, const T* right, int64_t right_row, F factor) const {
    in_tiles<T>(rows, WV, [&](auto& sum, int64_t i, int64_t v) ALWAYS_INLINE_LAMBDA {
      add_product<T>(sum, depth, {left.data + i * left.row, left.row, left.column}, {right + v * L, right_row, L});
      each_of_tile(sum, i, v, [&](Vt x, int64_t r, int64_t c) ALWAYS_INLINE_LAMBDA {
        Vt& total = at(to + r * W + c * L);
        total = total * factor(r) + x;
      });
    });
  }

  void forward(int64_t thread) const {
    constexpr int64_t M = QUERIES, MV = M / L;
    const T power = T(s.scale * LOG2E);
    std::vector<Vt> memory[3];
    T *by_channel = sized(memory[0], W * M), *P = sized(memory[1], KEYS * M);
    const int64_t blocks = (s.queries + M - 1) / M, units = s.batch * s.heads * blocks;
    for (int64_t u = units * thread / s.threads; u < units * (thread + 1) / s.threads; u++) {
      const int64_t head = u / blocks, first = u % blocks * M, m = std::min(M, s.queries - first);
      T* sum = sized(memory[2], M * W);
      transpose(row(s.q, head, first), s.q.token_stride, m, by_channel, M);
      Vt largest[MV], total[MV] = {};
      for (Vt& x : largest) x = splat<T>(NOTHING);
      const int64_t end = s.causal ? std::min(s.keys, first + m) : s.keys;
      for (int64_t start = 0; start < end; start += KEYS) {
        const int64_t n = std::min(KEYS, end - start);
        const T* keys = row(s.k, head, start);
        in_tiles<T>(n, MV, [&](auto& scores, int64_t j, int64_t v) ALWAYS_INLINE_LAMBDA {
          add_product<T>(scores, W, {keys + j * s.k.token_stride, s.k.token_stride, 1}, {by_channel + v * L, M, L});
          each_of_tile(scores, j, v, [&](Vt x, int64_t r, int64_t c) ALWAYS_INLINE_LAMBDA { at(P + r * M + c * L) = x * power; });
        });
        if (s.causal)
          for (int64_t j = std::max<int64_t>(0, first + 1 - start); j < n; j++)
            std::fill(P + j * M, P + j * M + std::min(M, start + j - first), NOTHING);
        alignas(VECTOR_BYTES) T shrink[M];
        for (int64_t v = 0; v < MV; v++) {
          Vt top = largest[v];
          for (int64_t j = 0; j < n; j++) {
            const Vt x = at(P + j * M + v * L);
            top = x > top ? x : top;
          }
          const Vt less = exp2v<T>(largest[v] - top);
          at(shrink + v * L) = less;
          largest[v] = top;
          Vt of_block{};
          for (int64_t j = 0; j < n; j++) {
            Vt& x = at(P + j * M + v * L);
            x = exp2v<T>(x - top);
            of_block += x;
          }
          total[v] = total[v] * less + of_block;
        }
        add(sum, m, n, {P, 1, M}, row(s.v, head, start), s.v.token_stride, [&](int64_t i) ALWAYS_INLINE_LAMBDA { return shrink[i]; });
      }
      for (int64_t i = 0; i < m; i++) {
        const T whole = total[i / L][i % L];
        ((T*)s.log)[head * s.queries + first + i] = largest[i / L][i % L] * T(LN2) + std::log(whole);
        for (int64_t v = 0; v < WV; v++) at(row(s.out, head, first + i) + v * L) = at(sum + i * W + v * L) / splat<T>(whole);
      }
    }
  }

  void backward(int64_t thread) const {
    constexpr int64_t N = KEYS, NV = N / L;
    const T scale = T(s.scale), power = T(s.scale * LOG2E);
    std::vector<Vt> memory[6];
    T *k_by_channel = sized(memory[0], W * N), *v_by_channel = sized(memory[1], W * N);
    T *P = sized(memory[2], QUERIES * N), *dS = sized(memory[3], QUERIES * N);
    const int64_t blocks = (s.keys + N - 1) / N, heads = s.batch * s.heads, units = heads * blocks;
    const auto once = [](int64_t) { return T(1); };
    for (int64_t u = units * thread / s.threads; u < units * (thread + 1) / s.threads; u++) {
      const int64_t head = u / blocks, start = u % blocks * N, n = std::min(N, s.keys - start);
      const int64_t first_thread = ((head * blocks + 1) * s.threads - 1) / units;  // of those that share the head
      T* head_dq = (T*)s.dq + ((thread - first_thread) * heads + head) * s.queries * W;
      const T *k = row(s.k, head, start), *v = row(s.v, head, start);
      T *dk = sized(memory[4], N * W), *dv = sized(memory[5], N * W);
      transpose(k, s.k.token_stride, n, k_by_channel, N);
      transpose(v, s.v.token_stride, n, v_by_channel, N);
      for (int64_t first = s.causal ? start / QUERIES * QUERIES : 0; first < s.queries; first += QUERIES) {
        const int64_t m = std::min(QUERIES, s.queries - first);
        const T *q = row(s.q, head, first), *d = row(s.d, head, first);
        const T *log = (const T*)s.log + head * s.queries + first, *delta = (const T*)s.delta + head * s.queries + first;
        in_tiles<T>(m, NV, [&](auto& scores, int64_t i, int64_t c) ALWAYS_INLINE_LAMBDA {
          add_product<T>(scores, W, {q + i * s.q.token_stride, s.q.token_stride, 1}, {k_by_channel + c * L, N, L});
          each_of_tile(scores, i, c, [&](Vt x, int64_t r, int64_t w) ALWAYS_INLINE_LAMBDA {
            at(P + r * N + w * L) = exp2v<T>(x * power - splat<T>(log[r] * T(LOG2E)));
          });
        });
        if (s.causal)
          for (int64_t i = 0; i < std::min(m, start + n - 1 - first); i++)
            std::fill(P + i * N + std::max<int64_t>(0, first + i + 1 - start), P + (i + 1) * N, T(0));
        in_tiles<T>(m, NV, [&](auto& sum, int64_t i, int64_t c) ALWAYS_INLINE_LAMBDA {
          add_product<T>(sum, W, {d + i * s.d.token_stride, s.d.token_stride, 1}, {v_by_channel + c * L, N, L});
          each_of_tile(sum, i, c, [&](Vt x, int64_t r, int64_t w) ALWAYS_INLINE_LAMBDA {
            at(dS + r * N + w * L) = at(P + r * N + w * L) * (x - splat<T>(delta[r])) * scale;
          });
        });
        add(dv, n, m, {P, 1, N}, d, s.d.token_stride, once);
        add(dk, n, m, {dS, 1, N}, q, s.q.token_stride, once);
        add(head_dq + first * W, m, n, {dS, N, 1}, k, s.k.token_stride, once);
      }
      for (int64_t j = 0; j < n; j++) {
        std::copy(dk + j * W, dk + (j + 1) * W, row(s.dk, head, start + j));
        std::copy(dv + j * W, dv + (j + 1) * W, row(s.dv, head, start + j));
      }
    }
  }
};

template <class T> void run_attention(const AttentionArgs& s, bool backward) {
  Attention<T> attention{s};
  parallel(s.threads, [&](int64_t i) { backward ? attention.backward(i) : attention.forward(i); });
}
}  // namespace

extern "C" {
int adjoint_attention_block(int of_keys) { return of_keys ? KEYS : QUERIES; }
void adjoint_attention_f32(const AttentionArgs* s, int backward) { run_attention<float>(*s, backward); }
void adjoint_attention_f64(const AttentionArgs* s, int backward) { run_attention<double>(*s, backward); }
}
