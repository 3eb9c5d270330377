// The generalised delta rule (Peng et al. 2025, "RWKV-7 Goose"), whose transition is diagonal plus low-rank (DPLR),
// forward and backward, token by token:
//
//   u_t = S_{t-1}' a_t,   S_t = diag(exp(g_t)) S_{t-1} + b_t u_t' + k_t v_t',   o_t = S_t' q_t
//
// S is (d_k, d_v); its columns do not depend on each other. So the forward walks a strip of columns, a few vectors
// wide, through all tokens of a segment while it stays in the first cache. u and o are sums over the strip's rows.
//
// Backward, with D_t the cotangent of S_t, a segment of at most 64 tokens at a time, from its saved state:
//
//   D_t = q_t do_t' + diag(exp(g_{t+1})) D_{t+1} + a_{t+1} du_{t+1}',   du_t = D_t' b_t,   dv_t = D_t' k_t
//   dq_t = S_t do_t,  dk_t = D_t v_t,  db_t = D_t u_t,  da_t = S_{t-1} du_t,  dg_t = exp(g_t) rows' dots of D_t, S_{t-1}
//
// The first line sums over rows, the second one over columns, which would be sums inside of vectors. With u and du known
// from strips of columns, the rows do not depend on each other either: a second walk has S and D transposed, in strips of
// rows. So each pass is sums of whole vectors, and D is carried from segment to segment in both layouts.
//
// In float each token would round the state. A state that lasts for thousands of tokens, as decays are near 1 or a'b is below
// -1 and turns the sign of what is read, has its segments computed in double.
#include <memory>

#include "delta_rules.h"

struct DplrArgs {
  int64_t batch, seqlen, nheads, d_k, d_v, threads;
  TokenRows q, k, v, a, b, g, d_o;
  void *initial_state, *reset;          // contiguous; may be null
  void *o, *final_state, *checkpoints;  // checkpoints (batch, nheads, slots, d_k, d_v), may be null forward
  void *dfinal_state;                   // may be null
  void *dq, *dk, *dv, *da, *db, *dg, *dinitial_state;
};

namespace {
constexpr int64_t SEGMENT = 64;  // tokens between saved states
constexpr int COLUMNS = REGISTERS > 16 ? 4 : 2, ROWS = REGISTERS > 16 ? 2 : 1;  // widths of strips, in vectors

// A strip's vectors at p.
template <class T, int C> struct Strip {
  V<T> x[C];
  static ALWAYS_INLINE Strip at(const T* p) {
    Strip s;
    for (int i = 0; i < C; i++) s.x[i] = load<T>(p + i * Vec<T>::L, Vec<T>::L);
    return s;
  }
  static ALWAYS_INLINE Strip zero() {
    Strip s;
    for (int i = 0; i < C; i++) s.x[i] = V<T>{};
    return s;
  }
  ALWAYS_INLINE void to(T* p) const {
    for (int i = 0; i < C; i++) store<T>(p + i * Vec<T>::L, x[i], Vec<T>::L);
  }
};

template <class T> class Dplr : DeltaRule<T, DplrArgs> {
  using Base = DeltaRule<T, DplrArgs>;
  using Base::s, Base::K, Base::W, Base::slots, Base::b, Base::h, Base::t, Base::n, Base::take, Base::saved_offset,
      Base::state_offset, Base::state_from, Base::get_state, Base::state_to, Base::write, Base::number;
  template <class> friend class Dplr;
  static constexpr int L = Vec<T>::L;
  Matrix<T> q, k, a, w, e, dq, dk, da, dw, dg, v, d_o, u, du, o, dv;  // the segment's tokens; w: the operation's b; e: exp(g)
  Matrix<T> S, D, DT;                                       // (K, W), (K, W), (W, K)
  Matrix<T> before;                                         // a strip of rows before each token, and the last, transposed
  const bool is_backward;
  std::unique_ptr<Dplr<double>> in_double;                  // for segments that float is too short for
  std::vector<T> rest, rest_transposed;                     // what rounding has left of S or D, and of DT; or empty

 public:
  Dplr(const DplrArgs& args, bool backward, bool narrow = false)
      : Base(args, ROWS * L, COLUMNS * L, SEGMENT, narrow), is_backward(backward) {
    const int64_t strip = ROWS * L, states = backward ? 3 * K * W + (SEGMENT + 1) * s.d_v * strip : K * W;
    this->allocate(10 * SEGMENT * K + 6 * SEGMENT * W + states);
    for (auto m : {&q, &k, &a, &w, &e, &dq, &dk, &da, &dw, &dg}) *m = take(SEGMENT, K);
    for (auto m : {&v, &d_o, &u, &du, &o, &dv}) *m = take(SEGMENT, W);
    S = take(K, W);
    if (!backward) return;
    D = take(K, W);
    DT = take(W, K);
    before = take((SEGMENT + 1) * s.d_v, strip);
  }

  void forward(int64_t unit) {
    go_to(unit);
    state_from(s.initial_state, S);
    for (int64_t slot = 0; slot < slots; slot++) {
      if (s.checkpoints) state_to(s.checkpoints, saved_offset(slot), S);
      segment(slot);
    }
    state_to(s.final_state, state_offset(), S);
  }

  void backward(int64_t unit) {
    go_to(unit);
    state_from(s.dfinal_state, D);
    transposed(D, DT);
    for (int64_t slot = slots - 1; slot >= 0; slot--) segment(slot);
    state_to(s.dinitial_state, state_offset(), D);
  }

 private:
  void go_to(int64_t unit) {
    Base::go_to(unit);
    rest.clear(), rest_transposed.clear();
  }
  bool resets(int64_t i) const { return Base::resets(t + i); }
  void segment(int64_t slot) {
    read(slot);
    if constexpr (sizeof(T) < sizeof(double))
      if (states_last()) return segment_in_double(slot);
    rest.clear(), rest_transposed.clear();
    if (is_backward) return segment_backward(slot);
    for (int64_t x = 0; x < W; x += COLUMNS * L) walk<true>(x);
    write(s.o, s.d_v, o);
  }
  void segment_in_double(int64_t slot) {
    if (!in_double) in_double.reset(new Dplr<double>(s, is_backward, true));
    Dplr<double>& d = *in_double;
    d.b = b, d.h = h;
    const auto own = [](std::vector<T>& rest) { return rest.empty() ? nullptr : rest.data(); };
    const Matrix<T> state = is_backward ? D : S;
    const Matrix<double> wide = is_backward ? d.D : d.S;
    this->widen(state, own(rest), wide, s.d_k, s.d_v);
    if (is_backward) this->widen(DT, own(rest_transposed), d.DT, s.d_v, s.d_k);
    d.segment(slot);
    rest.resize(K * W);
    this->split(wide, state, rest.data(), s.d_k, s.d_v);
    if (!is_backward) return;
    rest_transposed.resize(K * W);
    this->split(d.DT, DT, rest_transposed.data(), s.d_v, s.d_k);
  }
  // Whether a channel's decay is so near 1, or a'b so far below -1, that rounding adds up; by four of the segment's tokens.
  bool states_last() const {
    const int64_t at[] = {0, n / 4, n / 2, n * 3 / 4};
    for (int64_t x = 0; x < s.d_k; x += L) {
      V<T> sum{};
      for (int64_t i : at) sum += load<T>(e.row(i) + x, L);
      for (int64_t l = 0; l < L && x + l < s.d_k; l++)
        if (sum[l] > T(4 - 4.0 / 2048)) return true;
    }
    for (int64_t i : at) {
      V<T> sum{};
      for (int64_t x = 0; x < K; x += L) sum += load<T>(a.row(i) + x, L) * load<T>(w.row(i) + x, L);
      if (lane_sum(sum) < -1) return true;
    }
    return false;
  }
  void segment_backward(int64_t slot) {
    read_rows(s.d_o, s.d_v, d_o);
    get_state(s.checkpoints, saved_offset(slot), S);
    for (int64_t x = 0; x < W; x += COLUMNS * L) {
      walk<false>(x);
      walk_back(x);
    }
    for (int64_t x = 0; x < K; x += ROWS * L) {
      walk_rows(saved_offset(slot), x);
      walk_rows_back(x);
    }
    write(s.dv, s.d_v, dv);
    write(s.dq, s.d_k, dq);
    write(s.dk, s.d_k, dk);
    write(s.da, s.d_k, da);
    write(s.db, s.d_k, dw);
    write(s.dg, s.d_k, dg);
  }
  void transposed(Matrix<T> from, Matrix<T> to) const {
    for (int64_t i = 0; i < K; i++)
      for (int64_t j = 0; j < W; j++) to.row(j)[i] = from.row(i)[j];
  }
  void read_rows(const TokenRows& from, int64_t width, Matrix<T> to) const { Base::read_rows(from, width, to, n); }
  void read(int64_t slot) {
    t = slot * SEGMENT;
    n = s.seqlen - t < SEGMENT ? s.seqlen - t : SEGMENT;
    read_rows(s.q, s.d_k, q);
    read_rows(s.k, s.d_k, k);
    read_rows(s.a, s.d_k, a);
    read_rows(s.b, s.d_k, w);
    read_rows(s.g, s.d_k, e);
    read_rows(s.v, s.d_v, v);
    for (int64_t i = 0; i < n; i++)
      for (int64_t x = 0; x < K; x += L)
        store<T>(e.row(i) + x, exp2v<T>(load<T>(e.row(i) + x, L) * T(LOG2E)), L);
  }
  void clear(Matrix<T> m, int64_t rows, int64_t x, int64_t width) const {
    for (int64_t i = 0; i < rows; i++) std::memset(m.row(i) + x, 0, width * sizeof(T));
  }

  // S's columns from x on through the segment: u, and o if it is asked for. A token's pass over the rows also sums u of
  // the next token.
  template <bool OUTPUTS> __attribute__((noinline)) void walk(int64_t x) {
    typedef Strip<T, COLUMNS> Columns;
    Columns reads = Columns::zero();
    for (int64_t j = 0; j < s.d_k; j++) {
      const Columns state = Columns::at(S.row(j) + x);
      for (int c = 0; c < COLUMNS; c++) reads.x[c] += a.row(0)[j] * state.x[c];
    }
    for (int64_t i = 0; i < n; i++) {
      if (resets(i)) {
        clear(S, s.d_k, x, COLUMNS * L);
        reads = Columns::zero();
      }
      reads.to(u.row(i) + x);
      const Columns value = Columns::at(v.row(i) + x);
      Columns out = Columns::zero(), next = Columns::zero();
      const T *decay = e.row(i), *key = k.row(i), *writes = w.row(i), *query = q.row(i);
      const T* following = a.row(i + 1 < n ? i + 1 : i);  // the last token's sum is not read
      for (int64_t j = 0; j < s.d_k; j++) {
        Columns state = Columns::at(S.row(j) + x);
        for (int c = 0; c < COLUMNS; c++) {
          state.x[c] = decay[j] * state.x[c] + writes[j] * reads.x[c] + key[j] * value.x[c];
          if (OUTPUTS) out.x[c] += query[j] * state.x[c];
          next.x[c] += following[j] * state.x[c];
        }
        state.to(S.row(j) + x);
      }
      if (OUTPUTS) out.to(o.row(i) + x);
      reads = next;
    }
  }

  // D's columns from x on, back through the segment: dv and du. A token's pass over the rows begins with what the token
  // after it leaves to do.
  __attribute__((noinline)) void walk_back(int64_t x) {
    typedef Strip<T, COLUMNS> Columns;
    Columns later = Columns::zero();  // du of the token after
    for (int64_t i = n - 1; i >= 0; i--) {
      const bool carries = i + 1 < n && !resets(i + 1);
      const T *decay = carries ? e.row(i + 1) : nullptr, *read = carries ? a.row(i + 1) : nullptr;
      if (i + 1 < n && !carries) clear(D, s.d_k, x, COLUMNS * L);
      const Columns cotangent = Columns::at(d_o.row(i) + x);
      Columns values = Columns::zero(), reads = Columns::zero();
      const T *key = k.row(i), *writes = w.row(i), *query = q.row(i);
      for (int64_t j = 0; j < s.d_k; j++) {
        Columns d = Columns::at(D.row(j) + x);
        for (int c = 0; c < COLUMNS; c++) {
          if (carries) d.x[c] = decay[j] * d.x[c] + read[j] * later.x[c];
          d.x[c] += query[j] * cotangent.x[c];
          values.x[c] += key[j] * d.x[c];
          reads.x[c] += writes[j] * d.x[c];
        }
        d.to(D.row(j) + x);
      }
      values.to(dv.row(i) + x);
      reads.to(du.row(i) + x);
      later = reads;
    }
    if (resets(0)) {
      clear(D, s.d_k, x, COLUMNS * L);
      return;
    }
    for (int64_t j = 0; j < s.d_k; j++) {
      Columns d = Columns::at(D.row(j) + x);
      for (int c = 0; c < COLUMNS; c++) d.x[c] = e.row(0)[j] * d.x[c] + a.row(0)[j] * later.x[c];
      d.to(D.row(j) + x);
    }
  }

  // S's rows from x on through the segment, all kept in `before`: dq and da.
  __attribute__((noinline)) void walk_rows(int64_t state, int64_t x) {
    typedef Strip<T, ROWS> Rows;
    const int64_t width = s.d_k - x < ROWS * L ? s.d_k - x : ROWS * L;
    if (width < ROWS * L) clear(before, s.d_v, 0, ROWS * L);
    for (int64_t l = 0; l < width; l++)
      for (int64_t j = 0; j < s.d_v; j++) before.row(j)[l] = number(s.checkpoints, state + (x + l) * s.d_v + j);
    for (int64_t i = 0; i < n; i++) {
      T* at = before.row(i * s.d_v);
      if (resets(i)) std::memset(at, 0, s.d_v * ROWS * L * sizeof(T));
      const Rows decay = Rows::at(e.row(i) + x), key = Rows::at(k.row(i) + x), writes = Rows::at(w.row(i) + x);
      Rows queries = Rows::zero(), reads = Rows::zero();
      const T *value = v.row(i), *cotangent = d_o.row(i), *read = u.row(i), *d_read = du.row(i);
      for (int64_t j = 0; j < s.d_v; j++, at += ROWS * L) {
        Rows row = Rows::at(at);
        for (int c = 0; c < ROWS; c++) {
          reads.x[c] += d_read[j] * row.x[c];
          row.x[c] = decay.x[c] * row.x[c] + writes.x[c] * read[j] + key.x[c] * value[j];
          queries.x[c] += cotangent[j] * row.x[c];
        }
        row.to(at + s.d_v * ROWS * L);
      }
      queries.to(dq.row(i) + x);
      reads.to(da.row(i) + x);
    }
  }

  // D's rows from x on, back through the segment: dk, db and dg.
  __attribute__((noinline)) void walk_rows_back(int64_t x) {
    typedef Strip<T, ROWS> Rows;
    for (int64_t i = n - 1; i >= 0; i--) {
      const Rows decay = Rows::at(e.row(i) + x), query = Rows::at(q.row(i) + x), reads = Rows::at(a.row(i) + x);
      Rows keys = Rows::zero(), writes = Rows::zero(), decays = Rows::zero();
      const T *value = v.row(i), *cotangent = d_o.row(i), *read = u.row(i), *d_read = du.row(i);
      const T* at = before.row(i * s.d_v);
      for (int64_t j = 0; j < s.d_v; j++, at += ROWS * L) {
        Rows d = Rows::at(DT.row(j) + x);
        const Rows row = Rows::at(at);
        for (int c = 0; c < ROWS; c++) {
          d.x[c] += query.x[c] * cotangent[j];
          keys.x[c] += value[j] * d.x[c];
          writes.x[c] += read[j] * d.x[c];
          decays.x[c] += row.x[c] * d.x[c];
          d.x[c] = decay.x[c] * d.x[c] + reads.x[c] * d_read[j];
        }
        d.to(DT.row(j) + x);
      }
      if (resets(i)) clear(DT, s.d_v, x, ROWS * L);
      for (int c = 0; c < ROWS; c++) decays.x[c] *= decay.x[c];
      keys.to(dk.row(i) + x);
      writes.to(dw.row(i) + x);
      decays.to(dg.row(i) + x);
    }
  }
};

template <class T> void run(const DplrArgs& s, bool backward) {
  parallel(s.threads, [&](int64_t thread) {
    Dplr<T> rule(s, backward);
    for (int64_t unit = thread; unit < s.batch * s.nheads; unit += s.threads)
      if (backward) rule.backward(unit);
      else rule.forward(unit);
  });
}
}  // namespace

extern "C" {
void adjoint_dplr_f32(const DplrArgs* s, int backward) { run<float>(*s, backward); }
void adjoint_dplr_f64(const DplrArgs* s, int backward) { run<double>(*s, backward); }
}
