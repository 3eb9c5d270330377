// h_t = A_t h_{t-1} + b_t with a dense A_t, on the CPU: forward and adjoint, windowed or not.
//
// Cotangents are rows here:  mu_t = g_t + mu_{t+1} A_{t+1}.  With a window W, mu_t sums only g_t .. g_{t+W-1}:
// blocks of W tokens, a suffix sum R_t inside the block and what the next block adds to it,
//
//   mu_t = R_t + P_{t+W-1} S_t,   P_j = sum over s in [block's first, j] of g_s A_s .. A_first,
//                                 S_t = A_{last of t's block} .. A_{t+1}.
//
// No subtraction, no division. Running products Q and S a token would take two products of matrices a token.
// Instead blocks are cut into stretches of a few tokens: one product of matrices a token gives each stretch's own
// product M, Q and S advance a stretch at a time, and inside a stretch rows are carried through A itself.
// Everything of the size of A is kept in dA, which is written last.
#include <memory>

#include "linear.h"

namespace {
constexpr int64_t AHEAD = 8;  // tokens that matrices are fetched ahead of their use

template <class T, int FIXED> struct Dense {
  // A row of a matrix in K vectors; FIXED 0 is any d_state, in plain loops.
  static constexpr int BYTES = FIXED && FIXED * sizeof(T) < VECTOR_BYTES ? FIXED * sizeof(T) : VECTOR_BYTES;
  static constexpr int L = BYTES / sizeof(T), K = FIXED ? FIXED / L : 1;
  typedef T R __attribute__((vector_size(BYTES)));

  const LinearArgs& s;
  const int64_t W, blocks;           // of one sequence
  const int64_t stretches, stretch;  // in a block, tokens in each
  std::unique_ptr<V<T>[]> prefix;    // (batch, seqlen, d_state), vectors for their alignment
  std::vector<int64_t> begun;        // (batch, seqlen + 1): documents that began before each token

  explicit Dense(const LinearArgs& args)
      : s(args), W(args.window), blocks(W ? (args.seqlen + W - 1) / W : 1), stretches(stretches_of(W, args.d_state)),
        stretch((W + stretches - 1) / stretches) {
    if (!s.reset) return;
    for (int64_t b = 0; b < s.batch; b++) {
      int64_t count = 0;
      for (int64_t t = 0; t < s.seqlen; t++) begun.push_back(count), count += s.reset[b * s.seqlen + t];
      begun.push_back(count);
    }
  }
  // Whether a document begins at one of the tokens [first, end): nothing is carried through, no NaN either.
  ALWAYS_INLINE bool cut(int64_t b, int64_t first, int64_t end) const {
    return __builtin_expect(s.reset != nullptr, 0) && begun[b * (s.seqlen + 1) + end] > begun[b * (s.seqlen + 1) + first];
  }
  ALWAYS_INLINE void carry(T* X, int64_t rows, const T* A, T* spare, bool cut) const {
    if (cut) std::memset(X, 0, rows * states() * sizeof(T));
    else carry(X, rows, A, spare);
  }

  // Long ones carry many rows, short ones make many products: this is the least arithmetic. A block of up to three
  // is better left whole, without any product.
  static int64_t stretches_of(int64_t W, int64_t d_state) {
    const int64_t best = d_state <= 8 ? 4 : 8;
    return W <= 3 * best ? 1 : (W + best - 1) / best;
  }
  ALWAYS_INLINE int64_t states() const { return FIXED ? FIXED : s.d_state; }
  T* at(void* p, int64_t b, int64_t t, int64_t width) const { return (T*)p + (b * s.seqlen + t) * width; }
  T* matrix(void* p, int64_t b, int64_t t) const { return at(p, b, t, states() * states()); }
  T* vector(void* p, int64_t b, int64_t t) const { return at(p, b, t, states()); }
  T* product_of(int64_t i) const { return (T*)s.da + i * states() * states(); }  // M of stretch i, dense in dA
  struct Rows {  // zeroed scratch on a vector's boundary
    std::vector<V<T>> memory;
    explicit Rows(int64_t numel) : memory(numel / Vec<T>::L + 1) {}
    T* data() { return (T*)memory.data(); }
  };
  static ALWAYS_INLINE R load_row(const T* p) {
    R v;
    std::memcpy(&v, p, BYTES);
    return v;
  }

  // X <- X A for G rows at a time. Enough sums run side by side to hide the latency of multiply-add.
  template <int G> static ALWAYS_INLINE void carry_group(T* X, const T* A) {
    constexpr int N = FIXED, U = G * K >= 4 || N < 8 ? 1 : 4 / (G * K);
    R sum[G][U][K] = {};
#pragma GCC unroll 64
    for (int i = 0; i < N; i++)
      for (int k = 0; k < K; k++) {
        const R a = load_row(A + i * N + k * L);
        for (int r = 0; r < G; r++) sum[r][i % U][k] += a * X[r * N + i];
      }
    for (int r = 0; r < G; r++)
      for (int k = 0; k < K; k++) {
        R total = sum[r][0][k];
        if (U == 2) total += sum[r][1][k];
        if (U == 4) total = (total + sum[r][1][k]) + (sum[r][2][k] + sum[r][3][k]);
        std::memcpy(X + r * N + k * L, &total, BYTES);
      }
  }
  __attribute__((noinline)) void carry(T* X, int64_t rows, const T* A, T* spare) const {
    const int64_t N = states();
    if constexpr (FIXED > 0) {
      for (; rows >= 4; rows -= 4, X += 4 * N) carry_group<4>(X, A);
      if (rows == 3) carry_group<3>(X, A);
      else if (rows == 2) carry_group<2>(X, A);
      else if (rows == 1) carry_group<1>(X, A);
    } else {
      for (; rows > 0; rows--, X += N) {
        std::memset(spare, 0, N * sizeof(T));
        for (int64_t i = 0; i < N; i++) add(spare, A + i * N, X[i]);
        std::memcpy(X, spare, N * sizeof(T));
      }
    }
  }
  ALWAYS_INLINE void add(T* __restrict x, const T* __restrict y, T factor = 1) const {
    for (int64_t n = 0; n < states(); n++) x[n] += factor * y[n];
  }
  ALWAYS_INLINE void prefetch(const T* A) const {
    for (size_t i = 0; i < states() * states() * sizeof(T); i += 64) __builtin_prefetch((const char*)A + i);
  }
  ALWAYS_INLINE void copy(T* to, const T* from, int64_t numel) const { std::memcpy(to, from, numel * sizeof(T)); }

  void forward(int64_t thread) const {
    const int64_t N = states();
    Rows h(N), next(N), none(N);
    for (int64_t b = thread; b < s.batch; b += s.threads) {
      if (s.initial_state) copy(h.data(), (T*)s.initial_state + b * N, N);
      else std::memset(h.data(), 0, N * sizeof(T));
      for (int64_t t = 0; t < s.seqlen; t++) {
        const T *A = matrix(s.a, b, t), *x = vector(s.b, b, t);
        const T* before = cut(b, t, t + 1) ? none.data() : h.data();
        T* h_t = next.data();
        for (int64_t i = 0; i < N; i++) {
          T sum = 0;
          for (int64_t j = 0; j < N; j++) sum += A[i * N + j] * before[j];
          h_t[i] = sum + x[i];
        }
        h.memory.swap(next.memory);
        copy(vector(s.h, b, t), h.data(), N);
      }
    }
  }

  void backward() {
    if (W > 1) prefix.reset(new V<T>[s.batch * s.seqlen * states() / Vec<T>::L + 1]);
    const int64_t all = s.batch * blocks, pieces = s.threads == 1 ? 1 : 8 * s.threads;
    Phase phase[4];
    parallel(s.threads, [&](int64_t) {
      if (W > 1) {
        in_pieces(phase[0], pieces, all * stretches, [&](int64_t lo, int64_t hi) { local(lo, hi); });
        in_pieces(phase[1], pieces, all, [&](int64_t lo, int64_t hi) { join_prefixes(lo, hi); });
      }
      in_pieces(phase[2], pieces, all, [&](int64_t lo, int64_t hi) { sweep(lo, hi); });
      in_pieces(phase[3], pieces, s.batch * s.seqlen, [&](int64_t lo, int64_t hi) { outer(lo, hi); });
    });
  }
  struct Piece { int64_t b, block, begin, end; };  // tokens [begin, end) of sequence b
  Piece block_of(int64_t i) const {
    const int64_t begin = i % blocks * W, end = W && begin + W < s.seqlen ? begin + W : s.seqlen;
    return {i / blocks, i % blocks, begin, end};
  }

  // Each stretch by itself: its prefix sums, carried to before its first token, and its product M of matrices.
  void local(int64_t lo, int64_t hi) const {
    const int64_t N = states();
    Rows scratch((N + stretch + 1) * N);
    T *M = scratch.data(), *p = M + N * N, *spare = p + stretch * N;  // p holds the stretch's last token first
    for (int64_t i = hi - 1; i >= lo; i--) {
      const Piece block = block_of(i / stretches);
      const int64_t b = block.b, e = block.begin + i % stretches * stretch;
      const int64_t f = e + stretch < block.end ? e + stretch : block.end;
      const bool prefixed = block.block > 0, joined = block.end < s.seqlen;
      const bool product = (prefixed && f < block.end) || (joined && e > block.begin);  // for Q, for S
      if (e >= f || !(prefixed || product)) continue;
      for (int64_t t = f - 1; t >= e; t--) {
        const T *g = vector(s.dh, b, t), *A = matrix(s.a, b, t);
        const int64_t open = prefixed ? f - t : 0;
        prefetch(A - AHEAD * N * N);
        for (int64_t r = 0; r + 1 < open; r++) add(p + r * N, g);
        if (open) copy(p + (open - 1) * N, g, N);
        if (product && t < f - 1) carry(M, N + open, A, spare, cut(b, t, t + 1));
        else carry(p, open, A, spare, cut(b, t, t + 1));
        if (product && t == f - 1) copy(M, A, N * N);
      }
      if (prefixed)
        for (int64_t t = e; t < f; t++) copy(vector(prefix.get(), b, t), p + (f - 1 - t) * N, N);
      if (product) copy(product_of(i), M, N * N);
    }
  }
  // The stretches' prefix sums become the block's.
  void join_prefixes(int64_t lo, int64_t hi) const {
    const int64_t N = states();
    Rows scratch(2 * N * N + 2 * N);
    T *Q = scratch.data(), *next = Q + N * N, *edge = next + N * N, *spare = edge + N;
    for (int64_t i = lo; i < hi; i++) {
      const Piece block = block_of(i);
      if (block.block == 0) continue;
      std::memset(edge, 0, N * sizeof(T));
      for (int64_t e = block.begin; e < block.end; e += stretch) {
        const int64_t f = e + stretch < block.end ? e + stretch : block.end;
        T* P = vector(prefix.get(), block.b, e);
        if (e > block.begin) carry(P, f - e, Q, spare, cut(block.b, block.begin, e));
        for (int64_t t = e; t < f; t++) add(P + (t - e) * N, edge);
        copy(edge, P + (f - e - 1) * N, N);
        if (f == block.end) break;
        copy(next, product_of(i * stretches + (e - block.begin) / stretch), N * N);
        if (e > block.begin) carry(next, N, Q, spare, cut(block.b, block.begin, e));
        std::swap(Q, next);
      }
    }
  }
  // In reverse: R and, for the first block, D, the window of the token before the first; X are the next block's parts.
  void sweep(int64_t lo, int64_t hi) const {
    const int64_t N = states(), owned = s.seqlen - s.halo;
    Rows scratch((N + stretch + 3) * N);
    T *S = scratch.data(), *D = S + N * N, *sum = D + N, *X = sum + N, *spare = X + stretch * N;
    for (int64_t i = hi - 1; i >= lo; i--) {
      const Piece block = block_of(i);
      const int64_t b = block.b;
      const bool joined = W > 1 && block.end < s.seqlen, virtual_token = W > 1 && block.block == 0;
      std::memset(D, 0, 2 * N * sizeof(T));
      const int64_t length = W > 1 ? stretch : block.end - block.begin;
      for (int64_t e = block.begin + (block.end - 1 - block.begin) / length * length; e >= block.begin; e -= length) {
        const int64_t f = e + length < block.end ? e + length : block.end;
        if (joined) {
          for (int64_t t = e; t < f; t++)  // the block's first token has its whole window inside
            if (t > block.begin) copy(X + (t - e) * N, vector(prefix.get(), b, last_of_window(t)), N);
          if (f < block.end) carry(X, f - e, S, spare, cut(b, f, block.end));
        }
        for (int64_t t = f - 1; t >= e; t--) {
          const T *g = vector(s.dh, b, t), *A = matrix(s.a, b, t);
          T* mu = vector(s.db, b, t);
          prefetch(A - AHEAD * N * N);
          add(sum, g);
          if (virtual_token && t <= W - 2) add(D, g);
          if (t >= owned) std::memset(mu, 0, N * sizeof(T));
          else {
            copy(mu, sum, N);
            if (joined && t > block.begin) add(mu, X + (t - e) * N);
          }
          if (W == 1) std::memset(sum, 0, N * sizeof(T));
          else carry(virtual_token ? D : sum, 1 + virtual_token + (joined ? t - e : 0), A, spare, cut(b, t, t + 1));
        }
        if (joined && e > block.begin) {
          const T* M = product_of(i * stretches + (e - block.begin) / stretch);
          if (f < block.end) carry(S, N, M, spare, cut(b, e, block.end));
          else copy(S, M, N * N);
        }
      }
      if (block.block == 0) copy((T*)s.dinitial_state + b * N, virtual_token ? D : sum, N);
    }
  }
  int64_t last_of_window(int64_t t) const { return t + W - 1 < s.seqlen ? t + W - 1 : s.seqlen - 1; }
  // dA_t = mu_t h_{t-1}^T
  void outer(int64_t lo, int64_t hi) const {
    const int64_t N = states();
    const Rows zero(N);
    for (int64_t i = lo; i < hi; i++) {
      const int64_t b = i / s.seqlen, t = i % s.seqlen;
      const T *first = s.initial_state ? (T*)s.initial_state + b * N : (const T*)zero.memory.data();
      const T *before = t ? vector(s.h, b, t - 1) : first, *mu = vector(s.db, b, t);
      T* dA = matrix(s.da, b, t);
      for (int64_t r = 0; r < N; r++) scaled(dA + r * N, before, mu[r]);
    }
  }
  ALWAYS_INLINE void scaled(T* __restrict to, const T* __restrict from, T factor) const {
    for (int64_t n = 0; n < states(); n++) to[n] = factor * from[n];
  }
};

template <class T, int N> void run(const LinearArgs& s, bool backward) {
  Dense<T, N> scan(s);
  if (backward) scan.backward();
  else parallel(s.threads, [&](int64_t i) { scan.forward(i); });
}
template <class T> void dispatch(const LinearArgs& s, bool backward) {
  switch (s.d_state) {
    case 4: return run<T, 4>(s, backward);
    case 8: return run<T, 8>(s, backward);
    case 16: return run<T, 16>(s, backward);
    case 32: return run<T, 32>(s, backward);
    default: return run<T, 0>(s, backward);
  }
}
}  // namespace

extern "C" {
void adjoint_dense_f32(const LinearArgs* s, int backward) { dispatch<float>(*s, backward); }
void adjoint_dense_f64(const LinearArgs* s, int backward) { dispatch<double>(*s, backward); }
}
