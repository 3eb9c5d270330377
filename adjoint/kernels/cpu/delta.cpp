// The gated delta rule, chunked, forward and backward (Yang, Kautz & Hatamizadeh 2024, section 3.3), and Kimi Delta
// Attention (Kimi Team 2025), where decays are diagonal matrices: a number for each channel of the keys.
//
//   S_t = (I - beta_t k_t k_t') exp(g_t) S_{t-1} + beta_t k_t v_t',   o_t = S_t' q_t
//
// A block is at most 64 tokens; S is the state before it, c_i = g_first + .. + g_i, E_ij = exp(c_i - c_j):
//
//   r_i = v_i - S' exp(c_i) k_i                 what each token would write, were it the block's first
//   (I + L) N = diag(beta) r                    L_ij = beta_i k_i' E_ij k_j, j < i
//   o_i = S' exp(c_i) q_i + sum_j P_ij N_j      P_ij = q_i' E_ij k_j, j <= i
//   S <- exp(c_n) S + sum_j exp(c_n - c_j) k_j N_j'
//
// With a decay per channel E_ij is a product of tokens' own decays, from j + 1 to i, and no quotient, whose parts could
// overflow, nor the exponential of a difference, which rounds. A block is cut into pieces of 16 tokens; between two
// pieces E_ij = exp(c_i - c_a) exp(c_a - c_j), a the last token before i's piece.
//
// The backward goes from block to block with S's cotangent and computes all but S again. Blocks end at multiples of
// 64 tokens, whose states are saved, and where a document begins, whose state is zero.
#include "delta_rules.h"
#include "products.h"

struct DeltaArgs {
  int64_t batch, seqlen, nheads, d_k, d_v, wide, threads;  // wide: whether g is (.., nheads, d_k), not (.., nheads)
  TokenRows q, k, v, d_o;
  void *g, *beta, *initial_state, *reset;   // contiguous; the last two may be null
  void *o, *final_state, *checkpoints;      // checkpoints (batch, nheads, slots, d_k, d_v), may be null forward
  void *dfinal_state;                       // may be null
  void *dq, *dk, *dv, *dg, *dbeta, *dinitial_state;
};

namespace {
constexpr int64_t BLOCK = 64, PIECE = 16, ROWS = 4;  // tokens; tokens; rows of a product that are summed at a time
enum Shape { FULL, LOWER, UPPER };       // where the left factor is not zero

// A left factor: a matrix or its transpose.
template <class T> Left<T> left(Matrix<T> m, bool transposed = false) {
  return {m.data, transposed ? 1 : m.width, transposed ? m.width : 1};
}

template <class T, int C, int SIGN, bool ADD>
ALWAYS_INLINE void product_tile(Left<T> a, Matrix<T> b, Matrix<T> c, int64_t i, int64_t j, int64_t begin, int64_t end) {
  constexpr int L = Vec<T>::L;
  V<T> sum[ROWS][C] = {};
  for (int64_t p = begin; p < end; p++) {
    V<T> right[C];
    for (int x = 0; x < C; x++) right[x] = load<T>(b.row(p) + j + x * L, L);
    for (int r = 0; r < ROWS; r++) {
      const T factor = a.data[(i + r) * a.row + p * a.column];
      for (int x = 0; x < C; x++) sum[r][x] += factor * right[x];
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int x = 0; x < C; x++) {
      T* to = c.row(i + r) + j + x * L;
      const V<T> v = SIGN > 0 ? sum[r][x] : -sum[r][x];
      store<T>(to, ADD ? load<T>(to, L) + v : v, L);
    }
}
// Rows [i, i + 4) of C = +-A B, or added to it, over the columns [begin, end) of A.
template <class T, int SIGN, bool ADD>
ALWAYS_INLINE void product_rows(Left<T> a, Matrix<T> b, Matrix<T> c, int64_t i, int64_t begin, int64_t end) {
  constexpr int L = Vec<T>::L;
  int64_t j = 0;
  if (REGISTERS > 16)  // else the sums of 4 x 4 vectors do not fit
    for (; j + 4 * L <= c.width; j += 4 * L) product_tile<T, 4, SIGN, ADD>(a, b, c, i, j, begin, end);
  for (; j + 2 * L <= c.width; j += 2 * L) product_tile<T, 2, SIGN, ADD>(a, b, c, i, j, begin, end);
  for (; j < c.width; j += L) product_tile<T, 1, SIGN, ADD>(a, b, c, i, j, begin, end);
}
template <class T, bool ADD, Shape SHAPE = FULL>
__attribute__((noinline)) void product(Left<T> a, Matrix<T> b, Matrix<T> c, int64_t rows, int64_t inner) {
  for (int64_t i = 0; i < rows; i += ROWS)
    product_rows<T, 1, ADD>(a, b, c, i, SHAPE == UPPER ? i : 0, SHAPE == LOWER && i + ROWS < inner ? i + ROWS : inner);
}
// The lower triangle of a square C = A B, whole vectors of it.
template <class T> __attribute__((noinline)) void lower_product(Left<T> a, Matrix<T> b, Matrix<T> c, int64_t rows, int64_t inner) {
  constexpr int L = Vec<T>::L;
  for (int64_t i = 0; i < rows; i += ROWS) {
    const int64_t width = (i + ROWS + L - 1) / L * L;
    int64_t j = 0;
    for (; j + 2 * L <= width; j += 2 * L) product_tile<T, 2, 1, false>(a, b, c, i, j, 0, inner);
    if (j < width) product_tile<T, 1, 1, false>(a, b, c, i, j, 0, inner);
    for (j = width; j < rows; j += L)
      for (int64_t r = 0; r < ROWS; r++) store<T>(c.row(i + r) + j, V<T>{}, L);
  }
}
template <class T> void transposed(Matrix<T> from, Matrix<T> to, int64_t rows) {
  for (int64_t j = 0; j < from.width; j += Vec<T>::L)
    transpose_column<T>(from.data + j, from.width, rows, to.row(j), to.width);
}
template <class T> ALWAYS_INLINE void add_row(T* to, const T* from, int64_t width, T factor) {
  for (int64_t j = 0; j < width; j += Vec<T>::L)
    store<T>(to + j, load<T>(to + j, Vec<T>::L) + factor * load<T>(from + j, Vec<T>::L), Vec<T>::L);
}
template <class T> ALWAYS_INLINE void scale_row(T* to, const T* from, int64_t width, T factor) {
  for (int64_t j = 0; j < width; j += Vec<T>::L)
    store<T>(to + j, factor * load<T>(from + j, Vec<T>::L), Vec<T>::L);
}
template <class T> ALWAYS_INLINE void multiply_row(T* to, const T* from, const T* factor, int64_t width) {
  for (int64_t j = 0; j < width; j += Vec<T>::L)
    store<T>(to + j, load<T>(factor + j, Vec<T>::L) * load<T>(from + j, Vec<T>::L), Vec<T>::L);
}
template <class T> ALWAYS_INLINE T dot(const T* a, const T* b, int64_t width) {
  V<T> sum{};
  for (int64_t j = 0; j < width; j += Vec<T>::L) sum += load<T>(a + j, Vec<T>::L) * load<T>(b + j, Vec<T>::L);
  return lane_sum(sum);
}

template <class T> class Delta : DeltaRule<T, DeltaArgs> {
  using Base = DeltaRule<T, DeltaArgs>;
  using Base::s, Base::K, Base::W, Base::slots, Base::b, Base::h, Base::t, Base::n, Base::take, Base::resets, Base::saved,
      Base::state_offset, Base::state_from, Base::get_state, Base::state_to, Base::write;
  static constexpr int L = Vec<T>::L, WHOLE = L > ROWS ? L : ROWS;  // tokens and channels come in such numbers
  const bool wide;
  int64_t rows = 0;  // the block's tokens in whole vectors
  // tokens' rows: (rows, K) and (rows, W); since = exp(c), until_j = exp(c_n - c_j); `step`: exp(g)
  Matrix<T> q, k, since, until, step, qe, ke, kl, dq, dk, dw, near, far, v, d_o, r, N, dN, o;
  Matrix<T> S, dS, ST, dST;            // (K, W), and transposed
  Matrix<T> kT, NT;                    // (K, rows), (W, rows)
  Matrix<T> P, E, A, Low, dP, dA;      // (rows, rows); A_ij = k_i' E_ij k_j, j < i
  T *whole, *at_end, *beta, *dbeta, *own, *c;  // exp(c_n) and c_n's cotangent (K); (rows)

  int64_t needed() const {
    return 13 * BLOCK * K + 6 * BLOCK * W + 4 * K * W + (K + W) * BLOCK + 6 * BLOCK * BLOCK + 2 * K + 4 * BLOCK;
  }

 public:
  explicit Delta(const DeltaArgs& args)
      : Base(args, WHOLE, WHOLE, BLOCK), wide(args.wide) {
    this->allocate(needed());
    for (auto m : {&q, &k, &since, &until, &step, &qe, &ke, &kl, &dq, &dk, &dw, &near, &far}) *m = take(BLOCK, K);
    for (auto m : {&v, &d_o, &r, &N, &dN, &o}) *m = take(BLOCK, W);
    for (auto m : {&S, &dS}) *m = take(K, W);
    for (auto m : {&ST, &dST}) *m = take(W, K);
    kT = take(K, BLOCK);
    NT = take(W, BLOCK);
    for (auto m : {&P, &E, &A, &Low, &dP, &dA}) *m = take(BLOCK, BLOCK);
    for (auto p : {&whole, &at_end}) *p = take(1, K).data;
    for (auto p : {&beta, &dbeta, &own, &c}) *p = take(1, BLOCK).data;
  }

  void forward(int64_t unit) {
    this->go_to(unit);
    state_from(s.initial_state, S);
    for (int64_t slot = 0; slot < slots; slot++) {
      if (s.checkpoints) state_to(saved(slot), S);
      for (t = slot * BLOCK; t < end_of(slot); t += n) {
        n = tokens(slot);
        if (resets(t)) std::memset(S.data, 0, K * W * sizeof(T));
        read();
        solve();
        product<T, false>(left(qe), S, o, rows, K);
        product<T, true, LOWER>(left(P), N, o, rows, rows);
        write(s.o, s.d_v, o);
        for (int64_t i = 0; i < K; i++) scale_row(S.row(i), S.row(i), W, whole[i]);
        product<T, true>(left(kl, true), N, S, K, rows);
      }
    }
    state_to((T*)s.final_state + state_offset(), S);
  }

  void backward(int64_t unit) {
    this->go_to(unit);
    state_from(s.dfinal_state, dS);
    for (int64_t slot = slots - 1; slot >= 0; slot--) {
      std::vector<int64_t> starts;
      for (t = slot * BLOCK; t < end_of(slot); t += tokens(slot)) starts.push_back(t);
      for (auto start = starts.rbegin(); start != starts.rend(); start++) {
        t = *start;
        n = tokens(slot);
        const bool fresh = resets(t);
        // only a slot's first block goes on from a state; the others begin documents
        if (fresh) std::memset(S.data, 0, K * W * sizeof(T));
        else get_state(saved(slot), S);
        block_backward();
        if (fresh) std::memset(dS.data, 0, K * W * sizeof(T));
      }
    }
    state_to((T*)s.dinitial_state + state_offset(), dS);
  }

 private:
  int64_t end_of(int64_t slot) const { return (slot + 1) * BLOCK < s.seqlen ? (slot + 1) * BLOCK : s.seqlen; }
  int64_t tokens(int64_t slot) const {  // of the block that begins at t
    int64_t end = t + 1;
    while (end < end_of(slot) && !resets(end)) end++;
    return end - t;
  }
  void read_rows(const TokenRows& from, int64_t width, Matrix<T> to) const { Base::read_rows(from, width, to, rows); }
  // Inputs of the block and the decays inside it.
  void read() {
    rows = padded(n, WHOLE);
    for (auto m : {&kT, &NT, &P, &E, &A, &Low, &dP, &dA}) m->width = rows;
    read_rows(s.q, s.d_k, q);
    read_rows(s.k, s.d_k, k);
    read_rows(s.v, s.d_v, v);
    T sum = 0;
    for (int64_t i = 0; i < rows; i++) {
      const int64_t at = (b * s.seqlen + t + i) * s.nheads + h;
      const bool decays = i < n && !(i == 0 && resets(t));  // where a document begins nothing decays
      beta[i] = i < n ? ((const T*)s.beta)[at] : 0;
      if (!wide) {
        if (decays) sum += ((const T*)s.g)[at];
        c[i] = sum;
        continue;
      }
      std::memset(step.row(i), 0, K * sizeof(T));
      if (decays) std::memcpy(step.row(i), (const T*)s.g + at * s.d_k, s.d_k * sizeof(T));
      for (int64_t x = 0; x < K; x += L)
        store<T>(step.row(i) + x, exp2v<T>(load<T>(step.row(i) + x, L) * T(LOG2E)), L);
    }
    if (wide) {
      std::memcpy(since.row(0), step.row(0), K * sizeof(T));
      for (int64_t i = 1; i < rows; i++) multiply_row(since.row(i), since.row(i - 1), step.row(i), K);
      back_from(rows, until);
    } else
      for (int64_t i = 0; i < rows; i += L) {
        const V<T> to = load<T>(c + i, L) * T(LOG2E), rest = (sum - load<T>(c + i, L)) * T(LOG2E);
        const V<T> before = exp2v<T>(to), after = exp2v<T>(rest);
        for (int x = 0; x < L; x++) set_row(since.row(i + x), before[x]), set_row(until.row(i + x), after[x]);
      }
    for (int64_t i = 0; i < rows; i++) {
      multiply_row(qe.row(i), q.row(i), since.row(i), K);
      multiply_row(ke.row(i), k.row(i), since.row(i), K);
      multiply_row(kl.row(i), k.row(i), until.row(i), K);
    }
    std::memcpy(whole, since.row(rows - 1), K * sizeof(T));
  }
  // Rows before `end`: by how much each token's channels decay until the last one of them.
  void back_from(int64_t end, Matrix<T> to) const {
    set_row(to.row(end - 1), T(1));
    for (int64_t j = end - 2; j >= 0; j--) multiply_row(to.row(j), to.row(j + 1), step.row(j + 1), K);
  }
  void set_row(T* to, T value) const {
    for (int64_t j = 0; j < K; j += L) store<T>(to + j, splat<T>(value), L);
  }
  int64_t end_of_piece(int64_t at) const { return at + PIECE < rows ? at + PIECE : rows; }
  // P and A where one decay is all channels'.
  void pairs() {
    transposed(k, kT, rows);
    lower_product<T>(left(k), kT, A, rows, K);
    lower_product<T>(left(q), kT, P, rows, K);
    VI<T> lane;
    for (int x = 0; x < L; x++) lane[x] = x;
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < rows; j += L) {
        typedef typename Bits<T>::Int Int;
        const V<T> e = exp2v<T>((c[i] - load<T>(c + j, L)) * T(LOG2E)), zero{};
        const V<T> decay = lane <= Int(i - j) ? e : zero;
        const V<T> before = lane < Int(i - j) ? e : zero;
        store<T>(E.row(i) + j, decay, L);
        store<T>(P.row(i) + j, decay * load<T>(P.row(i) + j, L), L);
        store<T>(A.row(i) + j, before * load<T>(A.row(i) + j, L), L);
      }
  }
  // The factors of E between a piece's tokens and those before it: `near`'s rows of the piece, `far`'s before it.
  void cross(int64_t begin) {
    std::memcpy(near.row(begin), step.row(begin), K * sizeof(T));
    for (int64_t i = begin + 1; i < end_of_piece(begin); i++)
      multiply_row(near.row(i), near.row(i - 1), step.row(i), K);
    back_from(begin, far);
  }
  // P and A with a decay for each channel.
  void wide_pairs() {
    for (int64_t begin = 0; begin < rows; begin += PIECE) {
      const int64_t end = end_of_piece(begin);
      if (begin == 0)
        for (auto m : {&P, &A}) std::memset(m->data, 0, end * rows * sizeof(T));
      else {
        cross(begin);
        std::memset(kT.data, 0, K * rows * sizeof(T));
        for (int64_t j = 0; j < begin; j++)
          for (int64_t x = 0; x < K; x++) kT.row(x)[j] = k.row(j)[x] * far.row(j)[x];
        for (int64_t i = begin; i < end; i++) {  // in the gradients' places, which are free
          multiply_row(dq.row(i), q.row(i), near.row(i), K);
          multiply_row(dk.row(i), k.row(i), near.row(i), K);
        }
        for (int64_t i = begin; i < end; i += ROWS) {
          product_rows<T, 1, false>(left(dq), kT, P, i, 0, K);
          product_rows<T, 1, false>(left(dk), kT, A, i, 0, K);
        }
      }
      for (int64_t j = begin; j < end; j++) {
        T* decayed = dw.row(j);
        std::memcpy(decayed, k.row(j), K * sizeof(T));
        P.row(j)[j] = dot(q.row(j), decayed, K);
        for (int64_t i = j + 1; i < end; i++) {
          V<T> by_q{}, by_k{};
          for (int64_t x = 0; x < K; x += L) {
            const V<T> w = load<T>(decayed + x, L) * load<T>(step.row(i) + x, L);
            store<T>(decayed + x, w, L);
            by_q += w * load<T>(q.row(i) + x, L);
            by_k += w * load<T>(k.row(i) + x, L);
          }
          P.row(i)[j] = lane_sum(by_q);
          A.row(i)[j] = lane_sum(by_k);
        }
      }
    }
  }
  // P, A, L, and N of (I + L) N = diag(beta) r.
  void solve() {
    if (wide) wide_pairs();
    else pairs();
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < rows; j += L) store<T>(Low.row(i) + j, beta[i] * load<T>(A.row(i) + j, L), L);
    product<T, false>(left(ke), S, r, rows, K);
    for (int64_t i = 0; i < rows; i++) {
      scale_row(r.row(i), r.row(i), W, T(-1));
      add_row(r.row(i), v.row(i), W, T(1));
      scale_row(N.row(i), r.row(i), W, beta[i]);
    }
    for (int64_t i = 0; i < rows; i += ROWS) {
      product_rows<T, -1, true>(left(Low), N, N, i, 0, i);
      for (int64_t x = i + 1; x < i + ROWS; x++)
        for (int64_t y = i; y < x; y++) add_row(N.row(x), N.row(y), W, -Low.row(x)[y]);
    }
  }

  // Three gradients of keys are kept apart: dk of what reads, dw of what writes, and own, a token with itself. With
  // dq and dk goes exp(c_i), with dw exp(-c_j): from their products with q and k come the decays' gradients.
  void block_backward() {
    read();
    read_rows(s.d_o, s.d_v, d_o);
    solve();
    transposed(S, ST, K);
    transposed(dS, dST, K);
    transposed(N, NT, rows);
    lower_product<T>(left(d_o), NT, dP, rows, W);
    // dN = P' d_o + kl dS, then (I + L)' dR = dN, in place
    product<T, false>(left(kl), dS, dN, rows, K);
    product<T, true, UPPER>(left(P, true), d_o, dN, rows, rows);
    for (int64_t i = rows - ROWS; i >= 0; i -= ROWS) {
      product_rows<T, -1, true>(left(Low, true), dN, dN, i, i + ROWS, rows);
      for (int64_t x = i + ROWS - 2; x >= i; x--)
        for (int64_t y = x + 1; y < i + ROWS; y++) add_row(dN.row(x), dN.row(y), W, -Low.row(y)[x]);
    }
    lower_product<T>(left(dN), NT, dA, rows, W);  // with the other sign
    for (int64_t i = 0; i < K; i++) at_end[i] = whole[i] * dot(S.row(i), dS.row(i), W);
    // the written values' way into the next state
    product<T, false>(left(N), dST, dw, rows, W);
    for (int64_t i = 0; i < rows; i++) {
      multiply_row(dw.row(i), dw.row(i), until.row(i), K);
      for (int64_t x = 0; x < K; x += L)
        store<T>(at_end + x, load<T>(at_end + x, L) + load<T>(k.row(i) + x, L) * load<T>(dw.row(i) + x, L), L);
    }
    for (int64_t i = 0; i < rows; i++) {
      dbeta[i] = dot(dN.row(i), r.row(i), W);
      scale_row(dN.row(i), dN.row(i), W, beta[i]);
      scale_row(r.row(i), dN.row(i), W, T(-1));
    }
    write(s.dv, s.d_v, dN);
    product<T, false>(left(d_o), ST, dq, rows, W);
    product<T, false>(left(r), ST, dk, rows, W);
    for (int64_t i = 0; i < rows; i++) {
      multiply_row(dq.row(i), dq.row(i), since.row(i), K);
      multiply_row(dk.row(i), dk.row(i), since.row(i), K);
    }
    for (int64_t i = 0; i < K; i++) scale_row(dS.row(i), dS.row(i), W, whole[i]);
    product<T, true>(left(qe, true), d_o, dS, K, rows);
    product<T, true>(left(ke, true), r, dS, K, rows);
    // dP and -dL become the cotangents of what is below the diagonals of P and A
    for (int64_t i = 0; i < rows; i++) {
      own[i] = dP.row(i)[i];
      for (int64_t j = i; j < rows; j++) dP.row(i)[j] = dA.row(i)[j] = 0;
      dbeta[i] -= dot(dA.row(i), A.row(i), padded(i, WHOLE));
      scale_row(dA.row(i), dA.row(i), padded(i, WHOLE), -beta[i]);
    }
    if (wide) wide_pairs_backward();
    else pairs_backward();
    decays();
    for (int64_t i = 0; i < rows; i++) {
      add_row(dq.row(i), k.row(i), K, own[i]);
      add_row(dk.row(i), q.row(i), K, own[i]);
      add_row(dk.row(i), dw.row(i), K, T(1));
    }
    write(s.dq, s.d_k, dq);
    write(s.dk, s.d_k, dk);
  }
  void pairs_backward() {
    for (int64_t i = 0; i < rows; i++)
      for (auto m : {&dP, &dA}) multiply_row(m->row(i), m->row(i), E.row(i), rows);
    product<T, true, LOWER>(left(dP), k, dq, rows, rows);
    product<T, true, LOWER>(left(dA), k, dk, rows, rows);
    product<T, true, UPPER>(left(dP, true), q, dw, rows, rows);
    product<T, true, UPPER>(left(dA, true), k, dw, rows, rows);
  }
  void wide_pairs_backward() {
    for (int64_t begin = 0; begin < rows; begin += PIECE) {
      const int64_t end = end_of_piece(begin);
      if (begin) {
        cross(begin);
        for (int64_t j = 0; j < begin; j++) multiply_row(kl.row(j), k.row(j), far.row(j), K);
        for (int64_t i = begin; i < end; i += ROWS) {
          product_rows<T, 1, false>(left(dP), kl, qe, i, 0, begin);
          product_rows<T, 1, false>(left(dA), kl, ke, i, 0, begin);
        }
        for (int64_t i = begin; i < end; i++)
          for (int64_t x = 0; x < K; x += L) {
            const V<T> e = load<T>(near.row(i) + x, L);
            store<T>(dq.row(i) + x, load<T>(dq.row(i) + x, L) + e * load<T>(qe.row(i) + x, L), L);
            store<T>(dk.row(i) + x, load<T>(dk.row(i) + x, L) + e * load<T>(ke.row(i) + x, L), L);
            store<T>(qe.row(i) + x, e * load<T>(q.row(i) + x, L), L);
            store<T>(ke.row(i) + x, e * load<T>(k.row(i) + x, L), L);
          }
        for (int64_t j = 0; j < begin; j += ROWS) {
          product_rows<T, 1, false>(left(dP, true), qe, kl, j, begin, end);
          product_rows<T, 1, true>(left(dA, true), ke, kl, j, begin, end);
        }
        for (int64_t j = 0; j < begin; j++)
          for (int64_t x = 0; x < K; x += L)
            store<T>(dw.row(j) + x,
                     load<T>(dw.row(j) + x, L) + load<T>(far.row(j) + x, L) * load<T>(kl.row(j) + x, L), L);
      }
      for (int64_t j = begin; j < end; j++)
        for (int64_t x = 0; x < K; x += L) {
          const V<T> key = load<T>(k.row(j) + x, L);
          V<T> decay = splat<T>(1), sum{};
          for (int64_t i = j + 1; i < end; i++) {
            decay *= load<T>(step.row(i) + x, L);
            const T p = dP.row(i)[j], a = dA.row(i)[j];
            const V<T> w = decay * key;
            store<T>(dq.row(i) + x, load<T>(dq.row(i) + x, L) + p * w, L);
            store<T>(dk.row(i) + x, load<T>(dk.row(i) + x, L) + a * w, L);
            sum += decay * (p * load<T>(q.row(i) + x, L) + a * load<T>(k.row(i) + x, L));
          }
          store<T>(dw.row(j) + x, load<T>(dw.row(j) + x, L) + sum, L);
        }
    }
  }
  // Of g, sums of its running sums' gradients, from each token on.
  void decays() {
    T* sum = at_end;
    for (int64_t i = n - 1; i >= 0; i--) {
      for (int64_t x = 0; x < K; x += L) {
        const V<T> key = load<T>(k.row(i) + x, L), read = load<T>(q.row(i) + x, L) * load<T>(dq.row(i) + x, L);
        const V<T> dc = read + key * (load<T>(dk.row(i) + x, L) - load<T>(dw.row(i) + x, L));
        store<T>(sum + x, load<T>(sum + x, L) + dc, L);
      }
      const int64_t at = (b * s.seqlen + t + i) * s.nheads + h;
      const bool fresh = i == 0 && resets(t);
      ((T*)s.dbeta)[at] = dbeta[i];
      if (wide) {
        T* to = (T*)s.dg + at * s.d_k;
        if (fresh) std::memset(to, 0, s.d_k * sizeof(T));
        else std::memcpy(to, sum, s.d_k * sizeof(T));
      } else ((T*)s.dg)[at] = fresh ? 0 : row_sum(sum);
    }
  }
  T row_sum(const T* row) const {
    V<T> sum{};
    for (int64_t x = 0; x < K; x += L) sum += load<T>(row + x, L);
    return lane_sum(sum);
  }
};

template <class T> void run(const DeltaArgs& s, bool backward) {
  parallel(s.threads, [&](int64_t thread) {
    Delta<T> rule(s);
    for (int64_t unit = thread; unit < s.batch * s.nheads; unit += s.threads)
      if (backward) rule.backward(unit);
      else rule.forward(unit);
  });
}
}  // namespace

extern "C" {
void adjoint_delta_f32(const DeltaArgs* s, int backward) { run<float>(*s, backward); }
void adjoint_delta_f64(const DeltaArgs* s, int backward) { run<double>(*s, backward); }
}
