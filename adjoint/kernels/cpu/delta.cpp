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
// Where an entry of L is above 1 (beta above 1, keys that repeat), the block is computed in double: there a token turns the
// sign of what the state has at its key, and a rounded k_i' k_j would stretch it a little each time.
//
// The backward goes from block to block with S's cotangent and computes all but S again. Blocks end at multiples of
// 64 tokens, whose states are saved, and where a document begins, whose state is zero.
#include <algorithm>
#include <memory>
#include <type_traits>

#include "delta_rules.h"
#include "products.h"

struct DeltaArgs {
  int64_t batch, seqlen, nheads, d_k, d_v, wide, threads;  // wide: whether g is (.., nheads, d_k), not (.., nheads)
  TokenRows q, k, v, d_o;
  void *g, *beta, *initial_state, *reset;   // contiguous; the last two may be null
  void *o, *final_state, *checkpoints;      // checkpoints (batch, nheads, slots, d_k, d_v), may be null forward
  void *dfinal_state;                       // may be null
  TokenRows dq, dk, dv;
  void *dg, *dbeta, *dinitial_state;
};

namespace {
constexpr int64_t BLOCK = 64, PIECE = 16;  // tokens
enum Shape { FULL, LOWER, UPPER };         // where the left factor is not zero

// A left factor: a matrix or its transpose.
template <class T> Left<T> left(Matrix<T> m, bool transposed = false) {
  return {m.data, transposed ? 1 : m.width, transposed ? m.width : 1};
}

template <class Sums> constexpr int TILE_ROWS = std::extent_v<std::remove_reference_t<Sums>>;
template <class Sums> constexpr int TILE_VECTORS = std::extent_v<std::remove_reference_t<Sums>, 1>;
template <class T, int R, int C, class F> ALWAYS_INLINE void each_vector_of(V<T> (&sum)[R][C], int64_t i, int64_t v, F& use) {
  for (int r = 0; r < R; r++)
    for (int x = 0; x < C; x++) use(i + r, (v + x) * Vec<T>::L, sum[r][x]);
}
// Add to a tile's sums, whose first row is i and first vector v, those over the columns [begin, end) of A.
template <class T, int R, int C>
ALWAYS_INLINE void add_columns(V<T> (&sum)[R][C], Left<T> a, Matrix<T> b, int64_t i, int64_t v, int64_t begin, int64_t end) {
  add_product<T>(sum, end - begin, {a.data + i * a.row + begin * a.column, a.row, a.column},
                 {b.row(begin) + v * Vec<T>::L, b.width, Vec<T>::L});
}
// use(row, column, vector) for each vector of A B.
template <Shape SHAPE = FULL, class T, class F>
NEVER_INLINE void product(Left<T> a, Matrix<T> b, int64_t rows, int64_t inner, F use) {
  in_tiles<T>(rows, b.width / Vec<T>::L, [&](auto& sum, int64_t i, int64_t v) ALWAYS_INLINE_LAMBDA {
    const int64_t below = i + TILE_ROWS<decltype(sum)>;
    add_columns<T>(sum, a, b, i, v, SHAPE == UPPER ? i : 0, SHAPE == LOWER && below < inner ? below : inner);
    each_vector_of<T>(sum, i, v, use);
  });
}
// The same for the vectors of a square product that reach below its diagonal or to it.
template <class T, class F> NEVER_INLINE void lower_product(Left<T> a, Matrix<T> b, int64_t rows, int64_t inner, F use) {
  in_tiles<T>(rows, b.width / Vec<T>::L, [&](auto& sum, int64_t i, int64_t v) ALWAYS_INLINE_LAMBDA {
    if (v * Vec<T>::L >= i + TILE_ROWS<decltype(sum)>) return;
    add_columns<T>(sum, a, b, i, v, 0, inner);
    each_vector_of<T>(sum, i, v, use);
  });
}
// What becomes of a product's vectors: they are put into a matrix, or added to it.
template <class T> auto put_into(Matrix<T> to) {
  return [=](int64_t i, int64_t j, V<T> v) ALWAYS_INLINE_LAMBDA { store<T>(to.row(i) + j, v, Vec<T>::L); };
}
template <class T> auto add(Matrix<T> to) {
  return [=](int64_t i, int64_t j, V<T> v) ALWAYS_INLINE_LAMBDA {
    store<T>(to.row(i) + j, load<T>(to.row(i) + j, Vec<T>::L) + v, Vec<T>::L);
  };
}
template <class T> void transposed(Matrix<T> from, Matrix<T> to, int64_t rows) {
  for (int64_t j = 0; j < from.width; j += Vec<T>::L)
    transpose_column<T>(from.data + j, from.width, rows, to.row(j), to.width);
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
  using Base::s, Base::K, Base::W, Base::slots, Base::b, Base::h, Base::t, Base::n, Base::take, Base::resets, Base::saved_offset,
      Base::state_offset, Base::state_from, Base::get_state, Base::state_to, Base::write, Base::get, Base::put, Base::number,
      Base::is_narrow;
  template <class> friend class Delta;
  static constexpr int L = Vec<T>::L, WHOLE = L > 8 ? L : 8;  // tokens and channels come in such numbers
  const bool wide;
  int64_t rows = 0;  // the block's tokens in whole vectors
  // tokens' rows: (rows, K) and (rows, W); since = exp(c), until_j = exp(c_n - c_j), where they are a channel's own;
  // `step`: exp(g); qe = since q, ke = since k, kl = until k
  Matrix<T> q, k, since, until, step, qe, ke, kl, dq, dk, dw, near, far, v, d_o, r, N, dN, o;
  Matrix<T> S, dS, ST, dST, states;    // (K, W), and transposed; the heads' S or dS, which go from block to block
  Matrix<T> kT, NT;                    // (K, rows), (W, rows)
  Matrix<T> P, E, A, Low, dP, dA;      // (rows, rows); A_ij = k_i' E_ij k_j, j < i
  T *whole, *at_end;                   // exp(c_n) and c_n's cotangent (K)
  T *entire, *part;                    // (K): 1 and exp(c_n) - 1 where exp(c_n) is near 1, else 0 and exp(c_n)
  T *beta, *dbeta, *own, *c, *c_low;   // (rows); c_low: what rounding leaves of c
  T *scale, *to_end;                   // (rows): since and until where they are all channels', else 1
  std::unique_ptr<Delta<double>> in_double;  // for blocks that float is too short for
  std::vector<std::vector<T>> rests;   // of each of `states` what rounding has left, (K, W), or empty
  int64_t turn = 0;                    // which of them is in hand

  int64_t needed() const {
    return 13 * BLOCK * K + 6 * BLOCK * W + 3 * K * W + (K + W) * BLOCK + 6 * BLOCK * BLOCK + 4 * K + 7 * BLOCK;
  }

 public:
  Delta(const DeltaArgs& args, int64_t heads, bool narrow = false)
      : Base(args, WHOLE, WHOLE, BLOCK, narrow), wide(args.wide), rests(heads) {
    this->allocate(needed() + heads * K * W);
    states = take(heads * K, W);
    for (auto m : {&q, &k, &since, &until, &step, &qe, &ke, &kl, &dq, &dk, &dw, &near, &far}) *m = take(BLOCK, K);
    for (auto m : {&v, &d_o, &r, &N, &dN, &o}) *m = take(BLOCK, W);
    S = take(K, W);
    for (auto m : {&ST, &dST}) *m = take(W, K);
    kT = take(K, BLOCK);
    NT = take(W, BLOCK);
    for (auto m : {&P, &E, &A, &Low, &dP, &dA}) *m = take(BLOCK, BLOCK);
    for (auto p : {&whole, &at_end, &entire, &part}) *p = take(1, K).data;
    for (auto p : {&beta, &dbeta, &own, &c, &c_low, &scale, &to_end}) *p = take(1, BLOCK).data;
    dS = go_to(0, 0);
  }

  // Heads [first, end), of one sequence, which take turns block by block: of a token's rows, which follow each other in
  // memory, one head's alone are as far apart as pages.
  void forward(int64_t first, int64_t end) {
    for (int64_t unit = first; unit < end; unit++) {
      S = go_to(unit, first);
      rests[turn].clear();
      state_from(s.initial_state, S);
    }
    for (int64_t slot = 0; slot < slots; slot++)
      for (int64_t unit = first; unit < end; unit++) {
        S = go_to(unit, first);
        if (s.checkpoints) state_to(s.checkpoints, saved_offset(slot), S);
        for (t = slot * BLOCK; t < end_of(slot); t += n) {
          n = tokens(slot);
          if (resets(t)) clear(S);
          block<false>(S);
        }
      }
    for (int64_t unit = first; unit < end; unit++) {
      S = go_to(unit, first);
      state_to(s.final_state, state_offset(), S);
    }
  }

  void backward(int64_t first, int64_t end) {
    for (int64_t unit = first; unit < end; unit++) {
      dS = go_to(unit, first);
      rests[turn].clear();
      state_from(s.dfinal_state, dS);
    }
    for (int64_t slot = slots - 1; slot >= 0; slot--) {
      std::vector<int64_t> starts;  // of the slot's blocks
      for (t = slot * BLOCK; t < end_of(slot); t += tokens(slot)) starts.push_back(t);
      for (int64_t unit = first; unit < end; unit++) {
        dS = go_to(unit, first);
        for (auto start = starts.rbegin(); start != starts.rend(); start++) {
          t = *start;
          n = tokens(slot);
          const bool fresh = resets(t);
          // only a slot's first block goes on from a state; the others begin documents
          if (fresh) std::memset(S.data, 0, K * W * sizeof(T));
          else get_state(s.checkpoints, saved_offset(slot), S);
          block<true>(dS);
          if (fresh) clear(dS);
        }
      }
    }
    for (int64_t unit = first; unit < end; unit++) {
      dS = go_to(unit, first);
      state_to(s.dinitial_state, state_offset(), dS);
    }
  }

 private:
  // The state that goes from one of the head's blocks to the next.
  Matrix<T> go_to(int64_t unit, int64_t first) {
    Base::go_to(unit);
    turn = unit - first;
    return {states.row(turn * K), W};
  }
  void clear(Matrix<T> state) {
    std::memset(state.data, 0, K * W * sizeof(T));
    rests[turn].clear();
  }
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
    double sum = 0;  // a strong decay must not take the digits of those after it
    for (int64_t i = 0; i < rows; i++) {
      const int64_t at = (b * s.seqlen + t + i) * s.nheads + h;
      const bool decays = i < n && !(i == 0 && resets(t));  // where a document begins nothing decays
      beta[i] = i < n ? number(s.beta, at) : 0;
      if (!wide) {
        if (decays) sum += number(s.g, at);
        c[i] = T(sum), c_low[i] = T(sum - double(c[i]));
        continue;
      }
      scale[i] = 1;
      std::memset(step.row(i), 0, K * sizeof(T));
      if (decays && is_narrow()) get(s.g, at * s.d_k, step.row(i), s.d_k);
      else if (decays) std::memcpy(step.row(i), (const T*)s.g + at * s.d_k, s.d_k * sizeof(T));
      for (int64_t x = 0; x < K; x += L) {
        const V<T> g = load<T>(step.row(i) + x, L);
        store<T>(part + x, (i ? load<T>(part + x, L) : V<T>{}) + g, L);
        store<T>(step.row(i) + x, exp2v<T>(g * T(LOG2E)), L);
      }
    }
    if (!wide) {
      for (int64_t i = 0; i < rows; i += L) {
        store<T>(scale + i, exp2v<T>(load<T>(c + i, L) * T(LOG2E)), L);
        const V<T> after = (c[rows - 1] - load<T>(c + i, L)) + (c_low[rows - 1] - load<T>(c_low + i, L));
        store<T>(to_end + i, exp2v<T>(after * T(LOG2E)), L);
      }
      for (int64_t i = 0; i < rows; i++) scale_row(kl.row(i), k.row(i), K, to_end[i]);
      set_row(whole, scale[rows - 1]);
      set_row(part, T(sum));
      set_parts();
      return;
    }
    std::memcpy(since.row(0), step.row(0), K * sizeof(T));
    for (int64_t i = 1; i < rows; i++) multiply_row(since.row(i), since.row(i - 1), step.row(i), K);
    back_from(rows, until);
    for (int64_t i = 0; i < rows; i++) {
      multiply_row(qe.row(i), q.row(i), since.row(i), K);
      multiply_row(ke.row(i), k.row(i), since.row(i), K);
      multiply_row(kl.row(i), k.row(i), until.row(i), K);
    }
    std::memcpy(whole, since.row(rows - 1), K * sizeof(T));
    set_parts();
  }
  // `part` is c_n. A factor near 1 that multiplied the state itself would round the same way at each block.
  void set_parts() const {
    for (int64_t x = 0; x < K; x += L) {
      V<T> one, less;
      const V<T> power = load<T>(part + x, L) * T(LOG2E);
      exp2_parts(power, one, less);
      const auto near_1 = power > T(-0.5);
      store<T>(entire + x, near_1 ? splat<T>(1) : V<T>{}, L);
      store<T>(part + x, near_1 ? (one - 1) + less : one + less, L);
    }
  }
  // Starts to fetch a vector of the next head, which would otherwise be waited for: a product's inputs are all in caches.
  ALWAYS_INLINE void fetch_next_head(const TokenRows& from, int64_t width, int64_t i, int64_t j) const {
    if (is_narrow()) return;
    __builtin_prefetch((const T*)from.data + b * from.batch_stride + (t + i) * from.time_stride + (h + 1) * width + j);
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
  // Adds a product to what is left of a state after the block.
  auto add_decayed(Matrix<T> state) const {
    return [this, state](int64_t i, int64_t j, V<T> x) ALWAYS_INLINE_LAMBDA {
      const V<T> before = load<T>(state.row(i) + j, L);
      store<T>(state.row(i) + j, entire[i] * before + (part[i] * before + x), L);
    };
  }
  // P, A and diag(beta) A where one decay is all channels'.
  void pairs() {
    typedef typename Bits<T>::Int Int;
    VI<T> lane;
    for (int x = 0; x < L; x++) lane[x] = x;
    transposed(k, kT, rows);
    lower_product(left(k), kT, rows, K, [&](int64_t i, int64_t j, V<T> x) ALWAYS_INLINE_LAMBDA {
      const V<T> between = (c[i] - load<T>(c + j, L)) + (c_low[i] - load<T>(c_low + j, L));
      const V<T> e = exp2v<T>(between * T(LOG2E)), zero{};
      const V<T> a = lane < Int(i - j) ? e * x : zero;  // selected last: above the diagonal e may be infinite
      store<T>(E.row(i) + j, lane <= Int(i - j) ? e : zero, L);
      store<T>(A.row(i) + j, a, L);
      store<T>(Low.row(i) + j, beta[i] * a, L);
    });
    lower_product(left(q), kT, rows, K, [&](int64_t i, int64_t j, V<T> x) ALWAYS_INLINE_LAMBDA {
      store<T>(P.row(i) + j, load<T>(E.row(i) + j, L) * x, L);
    });
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
      for (int64_t i = begin; i < end; i++)
        for (auto m : {&P, &A}) std::memset(m->row(i) + begin, 0, (rows - begin) * sizeof(T));
      if (begin) {  // with the gradients' places, which are free
        cross(begin);
        for (int64_t j = 0; j < begin; j++) multiply_row(dw.row(j), k.row(j), far.row(j), K);
        kT.width = begin;
        transposed(dw, kT, begin);
        for (int64_t i = begin; i < end; i++) {
          multiply_row(dq.row(i), q.row(i), near.row(i), K);
          multiply_row(dk.row(i), k.row(i), near.row(i), K);
        }
        product(left(dq.from(begin)), kT, end - begin, K, put_into(P.from(begin)));
        product(left(dk.from(begin)), kT, end - begin, K, put_into(A.from(begin)));
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
  // A block, whose state or its cotangent goes on; in double if an entry of L is above 1.
  template <bool BACKWARD> void block(Matrix<T> state) {
    read();
    find_pairs();
    if constexpr (sizeof(T) < sizeof(double))
      if (above_1()) {
        if (!in_double) in_double.reset(new Delta<double>(s, 1, true));
        Delta<double>& d = *in_double;
        d.b = b, d.h = h, d.t = t, d.n = n;
        if (BACKWARD) this->widen(S, nullptr, d.S, s.d_k, s.d_v);
        const Matrix<double> goes_on = BACKWARD ? d.dS : d.S;
        std::vector<T>& rest = rests[turn];
        this->widen(state, rest.empty() ? nullptr : rest.data(), goes_on, s.d_k, s.d_v);
        d.template block<BACKWARD>(goes_on);
        rest.resize(K * W);
        this->split(goes_on, state, rest.data(), s.d_k, s.d_v);
        return;
      }
    solve();
    BACKWARD ? block_backward() : block_forward();
    rests[turn].clear();
  }
  // P, A and L.
  void find_pairs() {
    if (!wide) return pairs();
    wide_pairs();
    for (int64_t i = 0; i < rows; i++) scale_row(Low.row(i), A.row(i), rows, beta[i]);
  }
  bool above_1() const {
    VI<T> above{};
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < padded(i, L); j += L) {
        const V<T> x = load<T>(Low.row(i) + j, L);
        above |= (x > 1) | (x < -1);
      }
    for (int x = 0; x < L; x++)
      if (above[x]) return true;
    return false;
  }
  // N of (I + L) N = diag(beta) r.
  void solve() {
    product(left(wide ? ke : k), S, rows, K, [&](int64_t i, int64_t j, V<T> x) ALWAYS_INLINE_LAMBDA {
      const V<T> written = load<T>(v.row(i) + j, L) - scale[i] * x;
      store<T>(r.row(i) + j, written, L);
      store<T>(N.row(i) + j, beta[i] * written, L);
      fetch_next_head(s.k, s.d_k, i, j);
      fetch_next_head(s.v, s.d_v, i, j);
    });
    solve_lower([this](int64_t i, int64_t j) ALWAYS_INLINE_LAMBDA { fetch_next_head(s.q, s.d_k, i, j); });
  }
  // (I + L) N = right in N's place; use(row, column) with each vector.
  template <class F> NEVER_INLINE void solve_lower(F use) {
    const Matrix<T> low = Low, right = N;
    in_tiles<T>(rows, W / L, [&](auto& sum, int64_t i, int64_t v) ALWAYS_INLINE_LAMBDA {
      constexpr int R = TILE_ROWS<decltype(sum)>;
      add_columns<T>(sum, left(low), right, i, v, 0, i);
#pragma GCC unroll 8
      for (int x = 0; x < R; x++) {
        subtract_from(right.row(i + x) + v * L, sum[x]);
#pragma GCC unroll 8
        for (int y = 0; y < x; y++) subtract(sum[x], low.row(i + x)[i + y], sum[y]);
        store_row(right.row(i + x) + v * L, sum[x]);
        for (int y = 0; y < TILE_VECTORS<decltype(sum)>; y++) use(i + x, (v + y) * L);
      }
    });
  }
  // (I + L)' dR = dN, in dN's place.
  NEVER_INLINE void solve_transposed() {
    const Matrix<T> low = Low, right = dN;
    const int64_t rows = this->rows;
    in_tiles<T>(rows, W / L, [&](auto& sum, int64_t after, int64_t v) ALWAYS_INLINE_LAMBDA {
      constexpr int R = TILE_ROWS<decltype(sum)>;
      const int64_t end = rows - after, i = end - R;  // from the last rows to the first
      add_columns<T>(sum, left(low, true), right, i, v, end, rows);
#pragma GCC unroll 8
      for (int x = R - 1; x >= 0; x--) {
        subtract_from(right.row(i + x) + v * L, sum[x]);
#pragma GCC unroll 8
        for (int y = R - 1; y > x; y--) subtract(sum[x], low.row(i + y)[i + x], sum[y]);
        store_row(right.row(i + x) + v * L, sum[x]);
      }
    });
  }
  // A row of a tile becomes what is at `from` minus it; loses a factor times another row; is stored.
  template <int C> static ALWAYS_INLINE void subtract_from(const T* from, V<T> (&row)[C]) {
    for (int x = 0; x < C; x++) row[x] = load<T>(from + x * L, L) - row[x];
  }
  template <int C> static ALWAYS_INLINE void subtract(V<T> (&row)[C], T factor, const V<T> (&other)[C]) {
    for (int x = 0; x < C; x++) row[x] -= factor * other[x];
  }
  template <int C> static ALWAYS_INLINE void store_row(T* to, const V<T> (&row)[C]) {
    for (int x = 0; x < C; x++) store<T>(to + x * L, row[x], L);
  }

  void block_forward() {
    product(left(wide ? qe : q), S, rows, K, [&](int64_t i, int64_t j, V<T> x) ALWAYS_INLINE_LAMBDA {
      store<T>(o.row(i) + j, scale[i] * x, L);
    });
    product<LOWER>(left(P), N, rows, rows, add(o));
    write(s.o, s.d_v, o);
    product(left(kl, true), N, K, rows, add_decayed(S));
  }
  // Three gradients of keys are kept apart: dk of what reads, dw of what writes, and own, a token with itself. With
  // dq and dk goes exp(c_i), with dw exp(-c_j): from their products with q and k come the decays' gradients.
  void block_backward() {
    read_rows(s.d_o, s.d_v, d_o);
    if (!wide)
      for (int64_t i = 0; i < rows; i++) {
        scale_row(qe.row(i), q.row(i), K, scale[i]);
        scale_row(ke.row(i), k.row(i), K, scale[i]);
      }
    transposed(S, ST, K);
    transposed(dS, dST, K);
    transposed(N, NT, rows);
    lower_product(left(d_o), NT, rows, W, put_into(dP));
    // dN = P' d_o + kl dS, then (I + L)' dR = dN, in place
    product<UPPER>(left(P, true), d_o, rows, rows, put_into(dN));
    product(left(kl), dS, rows, K, [this](int64_t i, int64_t j, V<T> x) ALWAYS_INLINE_LAMBDA {
      store<T>(dN.row(i) + j, load<T>(dN.row(i) + j, L) + x, L);
      fetch_next_head(s.d_o, s.d_v, i, j);
    });
    solve_transposed();
    lower_product(left(dN), NT, rows, W, put_into(dA));  // with the other sign
    for (int64_t i = 0; i < K; i++) at_end[i] = whole[i] * dot(S.row(i), dS.row(i), W);
    // the written values' way into the next state
    product(left(N), dST, rows, W, [&](int64_t i, int64_t j, V<T> x) ALWAYS_INLINE_LAMBDA {
      const V<T> d = x * (wide ? load<T>(until.row(i) + j, L) : splat<T>(to_end[i]));
      store<T>(dw.row(i) + j, d, L);
      store<T>(at_end + j, load<T>(at_end + j, L) + load<T>(k.row(i) + j, L) * d, L);
    });
    for (int64_t i = 0; i < rows; i++) {
      dbeta[i] = dot(dN.row(i), r.row(i), W);
      scale_row(dN.row(i), dN.row(i), W, beta[i]);
      scale_row(r.row(i), dN.row(i), W, T(-1));
    }
    write(s.dv, s.d_v, dN);
    product(left(d_o), ST, rows, W, put_decayed(dq));
    product(left(r), ST, rows, W, put_decayed(dk));
    product(left(qe, true), d_o, K, rows, add_decayed(dS));
    product(left(ke, true), r, K, rows, add(dS));
    // dP and -dL become the cotangents of what is below the diagonals of P and A
    for (int64_t i = 0; i < rows; i++) {
      const int64_t width = padded(i + 1, WHOLE);
      own[i] = dP.row(i)[i];
      const int64_t end = std::max(width, std::min(rows, i + TILE_HEIGHT));  // of what products read of the row's tile
      for (int64_t j = i; j < end; j++) dP.row(i)[j] = dA.row(i)[j] = 0;
      dbeta[i] -= dot(dA.row(i), A.row(i), width);
      scale_row(dA.row(i), dA.row(i), width, -beta[i]);
      if (!wide)
        for (auto m : {&dP, &dA}) multiply_row(m->row(i), m->row(i), E.row(i), width);
    }
    if (wide) wide_pairs_backward();
    else pairs_backward();
    decays();
    write(s.dq, s.d_k, dq);
    write(s.dk, s.d_k, dk);
  }
  // The gradients of qe's or ke's rows become those of q's or k's.
  auto put_decayed(Matrix<T> to) const {
    return [this, to](int64_t i, int64_t j, V<T> x) ALWAYS_INLINE_LAMBDA {
      store<T>(to.row(i) + j, x * (wide ? load<T>(since.row(i) + j, L) : splat<T>(scale[i])), L);
    };
  }
  void pairs_backward() {
    product<LOWER>(left(dP), k, rows, rows, add(dq));
    product<LOWER>(left(dA), k, rows, rows, add(dk));
    product<UPPER>(left(dP, true), q, rows, rows, add(dw));
    product<UPPER>(left(dA, true), k, rows, rows, add(dw));
  }
  void wide_pairs_backward() {
    for (int64_t begin = 0; begin < rows; begin += PIECE) {
      const int64_t end = end_of_piece(begin);
      if (begin) {
        cross(begin);
        for (int64_t j = 0; j < begin; j++) multiply_row(kl.row(j), k.row(j), far.row(j), K);
        product(left(dP.from(begin)), kl, end - begin, begin, put_into(qe.from(begin)));
        product(left(dA.from(begin)), kl, end - begin, begin, put_into(ke.from(begin)));
        for (int64_t i = begin; i < end; i++)
          for (int64_t x = 0; x < K; x += L) {
            const V<T> e = load<T>(near.row(i) + x, L);
            store<T>(dq.row(i) + x, load<T>(dq.row(i) + x, L) + e * load<T>(qe.row(i) + x, L), L);
            store<T>(dk.row(i) + x, load<T>(dk.row(i) + x, L) + e * load<T>(ke.row(i) + x, L), L);
            store<T>(qe.row(i) + x, e * load<T>(q.row(i) + x, L), L);
            store<T>(ke.row(i) + x, e * load<T>(k.row(i) + x, L), L);
          }
        product(left(dP.from(begin), true), qe.from(begin), begin, end - begin, put_into(kl));
        product(left(dA.from(begin), true), ke.from(begin), begin, end - begin, add(kl));
        for (int64_t j = 0; j < begin; j++)
          for (int64_t x = 0; x < K; x += L)
            store<T>(dw.row(j) + x,
                     load<T>(dw.row(j) + x, L) + load<T>(far.row(j) + x, L) * load<T>(kl.row(j) + x, L), L);
      }
      // pointers of its own: each store would make the compiler read the matrices' addresses again
      for (int64_t j = begin; j < end; j++)
        for (int64_t x = 0, width = K, tokens = end - j - 1, pair = rows; x < K; x += L) {
          const V<T> key = load<T>(k.row(j) + x, L);
          V<T> decay = splat<T>(1), sum{};
          const T *steps = step.row(j + 1) + x, *queries = q.row(j + 1) + x, *keys = k.row(j + 1) + x;
          const T *from_p = dP.row(j + 1) + j, *from_a = dA.row(j + 1) + j;
          T *to_q = dq.row(j + 1) + x, *to_k = dk.row(j + 1) + x;
          for (int64_t i = 0; i < tokens; i++) {
            const int64_t at = i * width;
            decay *= load<T>(steps + at, L);
            const V<T> w = decay * key, p = splat<T>(from_p[i * pair]), a = splat<T>(from_a[i * pair]);
            store<T>(to_q + at, load<T>(to_q + at, L) + p * w, L);
            store<T>(to_k + at, load<T>(to_k + at, L) + a * w, L);
            sum += decay * (p * load<T>(queries + at, L) + a * load<T>(keys + at, L));
          }
          store<T>(dw.row(j) + x, load<T>(dw.row(j) + x, L) + sum, L);
        }
    }
  }
  // Gradients of g, sums of its running sums' from each token on; and all of those of q and k.
  void decays() {
    T* sum = at_end;
    for (int64_t i = n - 1; i >= 0; i--) {
      for (int64_t x = 0; x < K; x += L) {
        const V<T> key = load<T>(k.row(i) + x, L), read = load<T>(q.row(i) + x, L) * load<T>(dq.row(i) + x, L);
        const V<T> reading = load<T>(dk.row(i) + x, L), writing = load<T>(dw.row(i) + x, L);
        store<T>(sum + x, load<T>(sum + x, L) + read + key * (reading - writing), L);
        store<T>(dq.row(i) + x, load<T>(dq.row(i) + x, L) + own[i] * key, L);
        store<T>(dk.row(i) + x, reading + writing + own[i] * load<T>(q.row(i) + x, L), L);
      }
      const int64_t at = (b * s.seqlen + t + i) * s.nheads + h;
      const bool fresh = i == 0 && resets(t);
      put(s.dbeta, at, dbeta + i, 1);
      if (wide) {
        if (fresh) std::memset(sum, 0, K * sizeof(T));
        if (is_narrow()) put(s.dg, at * s.d_k, sum, s.d_k);
        else std::memcpy((T*)s.dg + at * s.d_k, sum, s.d_k * sizeof(T));
      } else {
        const T all = fresh ? 0 : row_sum(sum);
        put(s.dg, at, &all, 1);
      }
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
    const int64_t all = s.batch * s.nheads, last = all * (thread + 1) / s.threads;
    Delta<T> rule(s, s.nheads);
    for (int64_t first = all * thread / s.threads, end; first < last; first = end) {
      end = (first / s.nheads + 1) * s.nheads;  // of the sequence
      if (end > last) end = last;
      if (backward) rule.backward(first, end);
      else rule.forward(first, end);
    }
  });
}
}  // namespace

extern "C" {
void adjoint_delta_f32(const DeltaArgs* s, int backward) { run<float>(*s, backward); }
void adjoint_delta_f64(const DeltaArgs* s, int backward) { run<double>(*s, backward); }
}
