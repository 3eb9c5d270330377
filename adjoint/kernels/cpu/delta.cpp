// The gated delta rule, chunked, forward and backward (Yang, Kautz & Hatamizadeh 2024, section 3.3).
//
//   S_t = exp(g_t) (I - beta_t k_t k_t') S_{t-1} + beta_t k_t v_t',   o_t = S_t' q_t
//
// A block is at most 64 tokens; S is the state before it, c_i = g_first + .. + g_i, E_ij = exp(c_i - c_j):
//
//   r_i = v_i - exp(c_i) S' k_i                 what each token would write, were it the block's first
//   (I + L) N = diag(beta) r                    L_ij = beta_i k_i.k_j E_ij, j < i
//   o_i = exp(c_i) S' q_i + sum_j P_ij N_j      P_ij = q_i.k_j E_ij, j <= i
//   S <- exp(c_n) S + sum_j exp(c_n - c_j) k_j N_j'
//
// The backward goes from block to block with S's cotangent and computes all but S again. Blocks end at multiples of
// 64 tokens, whose states are saved, and where a document begins, whose state is zero.
#include "lanes.h"

struct TokenRows { void* data; int64_t batch_stride, time_stride; };  // the heads' rows of a token follow each other
struct DeltaArgs {
  int64_t batch, seqlen, nheads, d_k, d_v, threads;
  TokenRows q, k, v, d_o;
  void *g, *beta, *initial_state, *reset;   // contiguous; the last two may be null
  void *o, *final_state, *checkpoints;      // checkpoints (batch, nheads, slots, d_k, d_v), may be null forward
  void *dfinal_state;                       // may be null
  void *dq, *dk, *dv, *dg, *dbeta, *dinitial_state;
};

namespace {
constexpr int64_t BLOCK = 64, ROWS = 4;  // tokens; rows of a product that are summed at a time
enum Shape { FULL, LOWER, UPPER };       // where the left factor is not zero

template <class T> struct Matrix {  // rows of whole vectors
  T* data;
  int64_t width;
  T* row(int64_t i) const { return data + i * width; }
};
template <class T> struct Left {  // a left factor: a matrix or its transpose
  const T* data;
  int64_t row, column;
  Left(Matrix<T> m, bool transposed = false)
      : data(m.data), row(transposed ? 1 : m.width), column(transposed ? m.width : 1) {}
};

template <class T, int C, int SIGN, bool ADD>
ALWAYS_INLINE void product_tile(Left<T> a, Matrix<T> b, Matrix<T> c, int64_t i, int64_t j, int64_t begin, int64_t end) {
  constexpr int L = Vec<T>::L;
  V<T> sum[ROWS][C] = {};
  for (int64_t p = begin; p < end; p++) {
    V<T> right[C];
    for (int x = 0; x < C; x++) right[x] = load<T>(b.row(p) + j + x * L, L);
    for (int r = 0; r < ROWS; r++) {
      const T left = a.data[(i + r) * a.row + p * a.column];
      for (int x = 0; x < C; x++) sum[r][x] += left * right[x];
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
template <class T> void transposed(Matrix<T> from, Matrix<T> to, int64_t rows) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < from.width; j++) to.row(j)[i] = from.row(i)[j];
}
template <class T> ALWAYS_INLINE void add_row(T* to, const T* from, int64_t width, T factor) {
  for (int64_t j = 0; j < width; j += Vec<T>::L)
    store<T>(to + j, load<T>(to + j, Vec<T>::L) + factor * load<T>(from + j, Vec<T>::L), Vec<T>::L);
}
template <class T> ALWAYS_INLINE void scale_row(T* to, const T* from, int64_t width, T factor) {
  for (int64_t j = 0; j < width; j += Vec<T>::L)
    store<T>(to + j, factor * load<T>(from + j, Vec<T>::L), Vec<T>::L);
}
template <class T> ALWAYS_INLINE T dot(const T* a, const T* b, int64_t width) {
  V<T> sum{};
  for (int64_t j = 0; j < width; j += Vec<T>::L) sum += load<T>(a + j, Vec<T>::L) * load<T>(b + j, Vec<T>::L);
  return lane_sum(sum);
}
int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <class T> class Delta {
  static constexpr int L = Vec<T>::L, WHOLE = L > ROWS ? L : ROWS;  // tokens and channels come in such numbers
  const DeltaArgs& s;
  const int64_t K, W, slots;  // d_k and d_v in whole vectors; blocks' states that are saved
  std::vector<V<T>> memory;
  T* free;
  int64_t b = 0, h = 0, t = 0, n = 0, rows = 0;  // the block: sequence, head, first token, tokens, in whole vectors
  T whole = 0;                                   // exp(c_n)
  // tokens' rows: (rows, K) and (rows, W)
  Matrix<T> q, k, v, d_o, r, N, Ns, dN, qS, dq, dk, wide;
  Matrix<T> S, dS, ST, dST;      // (K, W), and transposed
  Matrix<T> kT, NT;              // (K, rows), (W, rows)
  Matrix<T> kk, P, E, Low, dP, dL;  // (rows, rows)
  T *c, *ec, *last, *beta, *dc, *dbeta;  // (rows); ec = exp(c), last_j = exp(c_n - c_j)

  Matrix<T> take(int64_t height, int64_t width) {
    Matrix<T> m{free, width};
    free += height * width;
    return m;
  }
  int64_t needed() const {
    return 2 * BLOCK * K * 3 + 9 * BLOCK * W + 4 * K * W + (K + W) * BLOCK + 6 * BLOCK * BLOCK + 6 * BLOCK;
  }

 public:
  explicit Delta(const DeltaArgs& args)
      : s(args), K(padded(args.d_k, WHOLE)), W(padded(args.d_v, WHOLE)), slots((args.seqlen + BLOCK - 1) / BLOCK),
        memory(needed() / L + 1) {
    free = (T*)memory.data();
    for (auto m : {&q, &k, &dq, &dk, &wide}) *m = take(BLOCK, K);
    for (auto m : {&v, &d_o, &r, &N, &Ns, &dN, &qS}) *m = take(BLOCK, W);
    for (auto m : {&S, &dS}) *m = take(K, W);
    for (auto m : {&ST, &dST}) *m = take(W, K);
    kT = take(K, BLOCK);
    NT = take(W, BLOCK);
    for (auto m : {&kk, &P, &E, &Low, &dP, &dL}) *m = take(BLOCK, BLOCK);
    for (auto p : {&c, &ec, &last, &beta, &dc, &dbeta}) *p = take(1, BLOCK).data;
  }

  void forward(int64_t unit) {
    b = unit / s.nheads, h = unit % s.nheads;
    state_from(s.initial_state, S);
    for (int64_t slot = 0; slot < slots; slot++) {
      if (s.checkpoints) state_to(saved(slot), S);
      for (t = slot * BLOCK; t < end_of(slot); t += n) {
        n = tokens(slot);
        if (resets(t)) std::memset(S.data, 0, K * W * sizeof(T));
        read();
        solve();
        product<T, false>(q, S, qS, rows, K);
        for (int64_t i = 0; i < n; i++) scale_row(qS.row(i), qS.row(i), W, ec[i]);
        product<T, true, LOWER>(P, N, qS, rows, rows);
        write(s.o, s.d_v, qS);
        for (int64_t i = 0; i < K; i++) scale_row(S.row(i), S.row(i), W, whole);
        product<T, true>(Left<T>(k, true), Ns, S, K, rows);
      }
    }
    state_to((T*)s.final_state + state_offset(), S);
  }

  void backward(int64_t unit) {
    b = unit / s.nheads, h = unit % s.nheads;
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
  bool resets(int64_t token) const { return s.reset && ((const bool*)s.reset)[b * s.seqlen + token]; }
  int64_t tokens(int64_t slot) const {  // of the block that begins at t
    int64_t end = t + 1;
    while (end < end_of(slot) && !resets(end)) end++;
    return end - t;
  }
  int64_t state_offset() const { return (b * s.nheads + h) * s.d_k * s.d_v; }
  T* saved(int64_t slot) const { return (T*)s.checkpoints + ((b * s.nheads + h) * slots + slot) * s.d_k * s.d_v; }
  void get_state(const T* from, Matrix<T> to) const {
    std::memset(to.data, 0, K * W * sizeof(T));
    for (int64_t i = 0; i < s.d_k; i++) std::memcpy(to.row(i), from + i * s.d_v, s.d_v * sizeof(T));
  }
  void state_from(const void* states, Matrix<T> to) const {
    if (states) get_state((const T*)states + state_offset(), to);
    else std::memset(to.data, 0, K * W * sizeof(T));
  }
  void state_to(T* to, Matrix<T> from) const {
    for (int64_t i = 0; i < s.d_k; i++) std::memcpy(to + i * s.d_v, from.row(i), s.d_v * sizeof(T));
  }
  // The block's rows of a tensor, zeros behind them.
  void read_rows(const TokenRows& from, int64_t width, Matrix<T> to) const {
    for (int64_t i = 0; i < rows; i++) {
      const int64_t used = i < n ? width : 0;
      if (used) {
        const T* source = (const T*)from.data + b * from.batch_stride + (t + i) * from.time_stride + h * width;
        std::memcpy(to.row(i), source, used * sizeof(T));
      }
      std::memset(to.row(i) + used, 0, (to.width - used) * sizeof(T));
    }
  }
  void write(void* to, int64_t width, Matrix<T> from) const {
    for (int64_t i = 0; i < n; i++)
      std::memcpy((T*)to + ((b * s.seqlen + t + i) * s.nheads + h) * width, from.row(i), width * sizeof(T));
  }
  // Inputs of the block and the decays inside it.
  void read() {
    rows = padded(n, WHOLE);
    for (auto m : {&kT, &NT, &kk, &P, &E, &Low, &dP, &dL}) m->width = rows;
    read_rows(s.q, s.d_k, q);
    read_rows(s.k, s.d_k, k);
    read_rows(s.v, s.d_v, v);
    T sum = 0;
    for (int64_t i = 0; i < rows; i++) {
      const int64_t at = (b * s.seqlen + t + i) * s.nheads + h;
      if (i < n && !(i == 0 && resets(t))) sum += ((const T*)s.g)[at];  // where a document begins nothing decays
      beta[i] = i < n ? ((const T*)s.beta)[at] : 0;
      c[i] = sum;
    }
    for (int64_t i = 0; i < rows; i += L) {
      const V<T> to = load<T>(c + i, L) * T(LOG2E), rest = (sum - load<T>(c + i, L)) * T(LOG2E);
      store<T>(ec + i, exp2v<T>(to), L);
      store<T>(last + i, exp2v<T>(rest), L);
    }
    whole = exp2v<T>(splat<T>(sum * T(LOG2E)))[0];
  }
  // E, P, L, and N of (I + L) N = diag(beta) r; Ns_j = exp(c_n - c_j) N_j.
  void solve() {
    transposed(k, kT, rows);
    product<T, false>(k, kT, kk, rows, K);
    product<T, false>(q, kT, P, rows, K);
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
        store<T>(Low.row(i) + j, beta[i] * before * load<T>(kk.row(i) + j, L), L);
      }
    product<T, false>(k, S, r, rows, K);
    for (int64_t i = 0; i < rows; i++) {
      scale_row(r.row(i), r.row(i), W, -ec[i]);
      add_row(r.row(i), v.row(i), W, T(1));
      scale_row(N.row(i), r.row(i), W, beta[i]);
    }
    for (int64_t i = 0; i < rows; i += ROWS) {
      product_rows<T, -1, true>(Left<T>(Low), N, N, i, 0, i);
      for (int64_t x = i + 1; x < i + ROWS; x++)
        for (int64_t y = i; y < x; y++) add_row(N.row(x), N.row(y), W, -Low.row(x)[y]);
    }
    for (int64_t i = 0; i < rows; i++) scale_row(Ns.row(i), N.row(i), W, last[i]);
  }

  void block_backward() {
    read();
    read_rows(s.d_o, s.d_v, d_o);
    solve();
    transposed(S, ST, K);
    transposed(dS, dST, K);
    transposed(N, NT, rows);
    product<T, false>(d_o, NT, dP, rows, W);
    // dN = P' d_o + diag(last) k dS, then (I + L)' dR = dN, in place
    product<T, false>(k, dS, dN, rows, K);
    for (int64_t i = 0; i < rows; i++) scale_row(dN.row(i), dN.row(i), W, last[i]);
    product<T, true, UPPER>(Left<T>(P, true), d_o, dN, rows, rows);
    for (int64_t i = rows - ROWS; i >= 0; i -= ROWS) {
      product_rows<T, -1, true>(Left<T>(Low, true), dN, dN, i, i + ROWS, rows);
      for (int64_t x = i + ROWS - 2; x >= i; x--)
        for (int64_t y = x + 1; y < i + ROWS; y++) add_row(dN.row(x), dN.row(y), W, -Low.row(y)[x]);
    }
    product<T, false>(dN, NT, dL, rows, W);  // with the other sign
    T at_end = 0;                            // the cotangent of c_n
    for (int64_t i = 0; i < K; i++) at_end += dot(S.row(i), dS.row(i), W);
    at_end *= whole;
    // the written values' way into the next state
    product<T, false>(Ns, dST, dk, rows, W);
    for (int64_t i = 0; i < rows; i++) {
      const T share = dot(k.row(i), dk.row(i), K);
      at_end += share;
      dc[i] = -share;
    }
    // r, in whose place goes its cotangent times -exp(c); v's goes where dN was
    for (int64_t i = 0; i < rows; i++) {
      dbeta[i] = dot(dN.row(i), r.row(i), W);
      scale_row(dN.row(i), dN.row(i), W, beta[i]);
      scale_row(r.row(i), dN.row(i), W, -ec[i]);
      scale_row(d_o.row(i), d_o.row(i), W, ec[i]);
    }
    write(s.dv, s.d_v, dN);
    product<T, false>(d_o, ST, dq, rows, W);
    product<T, false>(r, ST, wide, rows, W);
    for (int64_t i = 0; i < rows; i++) {
      dc[i] += dot(q.row(i), dq.row(i), K) + dot(k.row(i), wide.row(i), K);
      add_row(dk.row(i), wide.row(i), K, T(1));
    }
    for (int64_t i = 0; i < K; i++) scale_row(dS.row(i), dS.row(i), W, whole);
    product<T, true>(Left<T>(q, true), d_o, dS, K, rows);
    product<T, true>(Left<T>(k, true), r, dS, K, rows);
    pairs();
    product<T, true, LOWER>(dP, k, dq, rows, rows);
    product<T, true, UPPER>(Left<T>(dP, true), q, dk, rows, rows);
    product<T, true, LOWER>(dL, k, dk, rows, rows);
    product<T, true, UPPER>(Left<T>(dL, true), k, dk, rows, rows);
    write(s.dq, s.d_k, dq);
    write(s.dk, s.d_k, dk);
    dc[n - 1] += at_end;
    T sum = 0;
    for (int64_t i = n - 1; i >= 0; i--) {
      const int64_t at = (b * s.seqlen + t + i) * s.nheads + h;
      sum += dc[i];
      ((T*)s.dg)[at] = i == 0 && resets(t) ? 0 : sum;
      ((T*)s.dbeta)[at] = dbeta[i];
    }
  }
  // From dP and -dL the cotangents of q k' and k k', in their places, those of beta, and those of the decays.
  void pairs() {
    for (int64_t i = 0; i < rows; i++) {
      V<T> row{}, beta_sum{};
      for (int64_t j = 0; j < padded(i + 1, WHOLE); j += L) {  // as far as products of lower triangles read
        const V<T> p = load<T>(dP.row(i) + j, L), e = load<T>(E.row(i) + j, L), low = load<T>(Low.row(i) + j, L);
        VI<T> lane;
        for (int x = 0; x < L; x++) lane[x] = x;
        const V<T> zero{}, before = lane < typename Bits<T>::Int(i - j) ? e : zero;
        const V<T> l = -load<T>(dL.row(i) + j, L), to_decay = p * load<T>(P.row(i) + j, L) + l * low;
        row += to_decay;
        store<T>(dc + j, load<T>(dc + j, L) - to_decay, L);
        beta_sum += l * before * load<T>(kk.row(i) + j, L);
        store<T>(dP.row(i) + j, p * e, L);
        store<T>(dL.row(i) + j, beta[i] * l * before, L);
      }
      dc[i] += lane_sum(row);
      dbeta[i] += lane_sum(beta_sum);
    }
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
