// SSD scan (Mamba-2) on the CPU by blocks of Q tokens: forward and adjoint as small matrix products (Dao and Gu 2024,
// section 6). scan.cpp has the recurrence token by token, for what is too small for products.
//
// In a block, for one head, with X_j = delta_j x_j, s_i = the sum of delta A up to token i of the block, H the state
// before it and G_ij = C_i . B_j, which the heads of a group share:
//
//   y_i = sum over j <= i of M_ij X_j + e_i C_i H,     M_ij = G_ij exp(s_i - s_j),  e_i = exp(s_i)
//   H'  = e_last H + sum_j f_j B_j X_j,                f_j = exp(s_last - s_j)
//
// Adjoint, dH' being the cotangent of H':
//
//   dX_j = sum over i >= j of M_ij dy_i + f_j B_j dH'
//   dC_i = sum_j T_ij B_j + e_i dy_i H^T,   dB_j = sum_i T_ij C_i + f_j X_j dH'^T,   T_ij = (dy_i . X_j) exp(s_i - s_j)
//   dH   = e_last dH' + sum_i e_i C_i dy_i
//   d(delta_r A) = sum over i >= r > j of T_ij G_ij + sum over i >= r of e_i dy_i . C_i H
//                + sum over j < r of f_j X_j . B_j dH' + e_last H . dH'
//
// Every exponent is a sum of delta A over the tokens between two, which is at most 0 where A is negative, and nothing is
// subtracted in the last line: each term is there or not. Lanes are channels of the head in X, y, H, states in B, C,
// H^T, and tokens in G, M, T. Blocks end where a segment of `interval` tokens does and before a document's first token;
// the state before each segment is saved, as in scan.cpp, and the backward computes those of its blocks again.
//
// With a window W, the adjoint of token j sums the outputs i < j + W only. Tokens form groups of W, counted from the
// last token, and blocks end where groups do. Behind a block of a group that ends before token g:
//
// - R, the cotangent from the outputs before g, goes backward from block to block as dH' does without a window.
// - P = sum over i >= g of exp(s_i - s_g) C_i dy_i, up to the window's end of the block's first token, goes forward.
//   Both together are the block's dH' = R + exp(s_g - s_last) P.
// - The rows ahead are the outputs behind those of P, one for each token of the block, which only the windows of later
//   tokens of the block reach. With dy'_i = exp(s_i - s_last) dy_i and T'_ij = f_j dy'_i . X_j:
//
//   dX_j += f_j sum over i < j + W of G_ij dy'_i,   dB_j += sum over i < j + W of T'_ij C_i
//   d(delta_r A) += sum over i < r + W of (e_last dy'_i . C_i H + sum over j < r of T'_ij G_ij)
//
// No sum is the difference of two: what a window leaves out adds nothing to its error. Where W is less than Q, every
// block is a group, whose rows ahead begin with the next token, and M is a band.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "products.h"
#include "scan.h"

namespace {

constexpr int Q = 32;
constexpr int64_t HEADS = 8;  // whose states are in the caches together, while they share B, C and G

template <class T> struct Ssd {
  typedef V<T> Vt;
  static constexpr int L = Vec<T>::L, QV = (Q + L - 1) / L;
  static constexpr int64_t QL = QV * L;
  const ScanArgs& s;
  const int64_t N, P, NV, PV, NL, PL, segments, per_group, owned;

  explicit Ssd(const ScanArgs& a)
      : s(a), N(a.d_state), P(a.headdim), NV((N + L - 1) / L), PV((P + L - 1) / L), NL(NV * L), PL(PV * L),
        segments((a.seqlen + a.interval - 1) / a.interval), per_group(a.nheads / a.ngroups), owned(a.seqlen - a.halo) {}

  struct Block {
    int64_t b, start, size;
    bool is_first;  // of a document: nothing comes from before
    int64_t end() const { return start + size; }
  };
  // Of a block: its group's end g and its rows ahead, tokens [first, first + size). P sums the outputs [g, first).
  struct Ahead {
    int64_t group_end, first, size;
    bool reaches;  // whether the block's document goes on in them
    bool has_prefix() const { return reaches && first > group_end; }
  };
  // A state is (channels in vectors, d_state, lanes), as in scan.cpp.
  int64_t state_size() const { return N * PL; }

  // Sums of the exponents and their exponentials. Float32 sums have a second number for what rounding leaves.
  struct Decays {
    alignas(VECTOR_BYTES) T high[QL], low[QL], from_start[QL], to_end[QL];
    alignas(VECTOR_BYTES) T delta[QL], slope[QL];  // the step size, and its derivative by what the caller gives
    T whole, less_one;  // of the block, and that less 1
    double exponent;    // of `whole`, to base 2
  };
  struct Buffer {
    std::vector<Vt> memory;
    T* resized(int64_t numbers) {
      memory.assign((numbers + L - 1) / L, Vt{});
      return (T*)memory.data();
    }
    T* at_least(int64_t numbers) {
      if (int64_t(memory.size()) * L < numbers) resized(numbers);
      return (T*)memory.data();
    }
  };
  // P before the rows ahead of blocks, or of the first blocks of segments: (heads, blocks, state_size).
  struct Prefixes {
    Buffer memory;
    T* P;
    std::vector<double> exponents;  // s_i - s_g of the last token in P, to base 2
    int64_t blocks;
    void resize(int64_t count, int64_t size) {
      blocks = count, P = memory.at_least(HEADS * count * size);
      exponents.resize(HEADS * count);
    }
    T* at(int64_t h, int64_t block, int64_t size) { return P + (h * blocks + block) * size; }
    double& exponent(int64_t h, int64_t block) { return exponents[h * blocks + block]; }
  };
  struct Work {
    Buffer buffers[20], states_memory;
    T *B, *C, *B_by_state, *G;                  // (Q, NL) twice, (QV, N, L), (Q, QL)
    T *X, *M;                                   // (Q, PL), (Q, QL)
    T *state, *rests;                           // (heads, state_size) twice
    bool has_rest[HEADS];                       // where `rests` is not zero
    T *dy, *scaled, *X_by_channel, *T_, *dG;    // (Q, PL) twice, (PV * L, QL), (Q, QL) twice
    T *turned, *dB, *dC;                        // (PL, NL), (Q, NL) twice
    T *states;                                  // (heads, blocks of the segment, state_size)
    T *dD;                                      // (heads, PL): sums over a segment
    std::vector<double> dD_sums;                // (heads, PL): over all segments
    double dA[HEADS], ddelta_bias[HEADS];       // sums over all tokens
    T *from_C, *from_X, *d_delta;               // (Q): e_i dy_i . C_i H, f_j X_j . B_j dH', dX_j . x_j
    bool goes_on[HEADS];                        // whether dH' is another number than zero
    Decays decays;
    // With a window:
    Buffer more[8];
    T *C_ahead, *dy_ahead;                      // (Q, NL), (Q, PL)
    T *G_ahead, *M_ahead, *K_ahead, *dG_ahead;  // (Q, QL) each; K = T' G
    T *from_C_ahead;                            // (Q): e_last dy'_i . C_i H
    T *arriving, *initial;                      // dH', (state_size), and P of the initial state, (heads, state_size)
    Prefixes of_segments, of_blocks;
    double to_group_end[HEADS] = {};              // s_g - s_last, to base 2
    std::vector<int64_t> next_document;          // first token of the next document from a token on, (seqlen)
    Work(const Ssd& k, bool backward) {
      int i = 0;
      for (T** p : {&B, &C}) *p = buffers[i++].resized(Q * k.NL);
      B_by_state = buffers[i++].resized(QL * k.N);
      for (T** p : {&G, &M}) *p = buffers[i++].resized(Q * QL);
      for (T** p : {&X, &scaled}) *p = buffers[i++].resized(Q * k.PL);
      for (T** p : {&state, &rests}) *p = buffers[i++].resized(HEADS * k.state_size());
      if (!backward) return;
      dy = buffers[i++].resized(Q * k.PL);
      X_by_channel = buffers[i++].resized(k.PL * QL);
      for (T** p : {&T_, &dG}) *p = buffers[i++].resized(Q * QL);
      turned = buffers[i++].resized(k.PL * k.NL);
      for (T** p : {&dB, &dC}) *p = buffers[i++].resized(Q * k.NL);
      dD = buffers[i++].resized(HEADS * k.PL);
      dD_sums.resize(HEADS * k.PL);
      T* numbers = buffers[i++].resized(3 * QL);
      from_C = numbers, from_X = numbers + QL, d_delta = numbers + 2 * QL;
      if (!k.s.window) return;
      i = 0;
      C_ahead = more[i++].resized(Q * k.NL);
      dy_ahead = more[i++].resized(Q * k.PL);
      T* rows = more[i++].resized(4 * Q * QL);
      for (T** p : {&G_ahead, &M_ahead, &K_ahead, &dG_ahead}) *p = rows, rows += Q * QL;
      from_C_ahead = more[i++].resized(QL);
      arriving = more[i++].resized(k.state_size());
      initial = more[i++].resized(HEADS * k.state_size());
    }
  };

  Right<T> of_state(const T* state) const { return {state, L, N * L}; }
  T* saved(int64_t b, int64_t segment, int64_t head) const {
    return (T*)s.checkpoints + ((b * segments + segment) * s.nheads + head) * state_size();
  }
  // The end of the block that begins at a token.
  int64_t end_of(int64_t b, int64_t start, int64_t stop) const {
    const int64_t in_segment = start % s.interval;
    const int64_t grid = start - in_segment + (in_segment / Q + 1) * Q;
    int64_t end = grid < stop ? grid : stop;
    for (int64_t edge : {s.window ? window_edge(start) : end, owned})
      if (start < edge && edge < end) end = edge;
    if (s.reset)
      for (int64_t t = start + 1; t < end; t++)
        if (s.reset[b * s.seqlen + t]) return t;
    return end;
  }
  Block block(int64_t b, int64_t start, int64_t stop) const {
    return {b, start, end_of(b, start, stop) - start, s.reset && s.reset[b * s.seqlen + start]};
  }
  int64_t stop_of(int64_t segment) const {
    const int64_t stop = (segment + 1) * s.interval;
    return stop < s.seqlen ? stop : s.seqlen;
  }

  // (channels, d_state) of a head <-> a state. body(a state's rows, the channels', how many of each) for every square.
  template <class F> void each_square(int64_t b, int64_t head, F body) const {
    const int64_t first = (b * s.nheads + head) * P * N;
    for (int64_t c = 0; c < P; c += L)
      for (int64_t n = 0; n < N; n += L)
        body((c / L * N + n) * L, first + c * N + n, int(P - c < L ? P - c : L), int(N - n < L ? N - n : L));
  }
  void gather(const void* rows, T* state, int64_t b, int64_t head) const {
    if (!rows) {
      std::memset((void*)state, 0, state_size() * sizeof(T));
      return;
    }
    each_square(b, head, [&](int64_t to, int64_t from, int channels, int width) {
      Vt square[L] = {};
      for (int i = 0; i < channels; i++) square[i] = load<T>((const T*)rows + from + i * N, width);
      transpose_square<T>(square);
      for (int n = 0; n < width; n++) *(Vt*)(state + to + n * L) = square[n];
    });
  }
  void scatter(void* rows, const T* state, int64_t b, int64_t head) const {
    each_square(b, head, [&](int64_t from, int64_t to, int channels, int width) {
      Vt square[L] = {};
      for (int n = 0; n < width; n++) square[n] = *(const Vt*)(state + from + n * L);
      transpose_square<T>(square);
      for (int i = 0; i < channels; i++) store<T>((T*)rows + to + i * N, square[i], width);
    });
  }

  // Rows of a block, padded with zeros to whole vectors.
  void copy_rows(const Rows& from, const Block& k, int64_t first, int64_t size, T* to, int64_t width) const {
    for (int64_t t = 0; t < k.size; t++) {
      const T* p = row<T>(from, k.b, k.start + t) + first;
      each_vector<T>(size, 0, width / L, [&](int64_t v, int64_t c, int w) { *(Vt*)(to + t * width + v * L) = load<T>(p + c, w); });
    }
  }
  // B, C and G = C B^T of a group's heads.
  void read_group(const Block& k, int64_t group, Work& w) const {
    copy_rows(s.B, k, group * N, N, w.B, NL);
    copy_rows(s.C, k, group * N, N, w.C, NL);
    for (int64_t v = 0; v < NV; v++) {
      const int64_t states = N - v * L < L ? N - v * L : L;
      alignas(VECTOR_BYTES) T columns[L * QL];
      transpose_column<T>(w.B + v * L, NL, k.size, columns, QL);
      for (int64_t l = 0; l < states; l++)
        for (int64_t j = 0; j < QV; j++)
          *(Vt*)(w.B_by_state + (j * N + v * L + l) * L) = *(Vt*)(columns + l * QL + j * L);
    }
    in_tiles<T>(k.size, (k.size + L - 1) / L, [&](auto& sum, int64_t i, int64_t v) __attribute__((always_inline)) {
      if (v * L > last_row(sum, i)) return;
      add_product<T>(sum, N, {w.C + i * NL, NL, 1}, {w.B_by_state + v * N * L, L, N * L});
      put(sum, w.G + i * QL + v * L, QL);
    });
  }
  // The step size delta of each lane from what the caller gives, and its derivative.
  ALWAYS_INLINE void step_size(int64_t head, Vt& delta, Vt& slope) const {
    if (s.delta_bias) delta += ((const T*)s.delta_bias)[head];
    slope = splat<T>(1);
    if (s.softplus) softplusv<T>(delta, delta, slope);
  }
  // delta A of a token, to base 2
  double exponent(T delta, int64_t head) const { return double(delta) * double(((const T*)s.A)[head]) * LOG2E; }
  double exponent(int64_t b, int64_t t, int64_t head) const {
    Vt delta = splat<T>(row<T>(s.delta, b, t)[head]), slope;
    step_size(head, delta, slope);
    return exponent(delta[0], head);
  }
  // 2^(high + low), low being what rounding has left of the sum
  static ALWAYS_INLINE Vt exp2_of(Vt high, Vt low) { return exp2v<T>(high) * (1 + low * T(LN2)); }
  void read_decays(const Block& k, int64_t head, Decays& d) const {
    for (int64_t t = 0; t < QL; t++) d.delta[t] = t < k.size ? row<T>(s.delta, k.b, k.start + t)[head] : T(0);
    for (int64_t t = 0; t < QL; t += L) step_size(head, *(Vt*)(d.delta + t), *(Vt*)(d.slope + t));
    double total = 0;
    for (int64_t t = 0; t < k.size; t++) {
      total += exponent(d.delta[t], head);
      d.high[t] = T(total);
      d.low[t] = T(total - double(d.high[t]));
    }
    d.exponent = total;
    for (int64_t t = k.size; t < QL; t++) d.delta[t] = d.low[t] = 0, d.high[t] = d.high[k.size - 1];
    const Vt last = splat<T>(d.high[k.size - 1]), rest = splat<T>(d.low[k.size - 1]);
    for (int64_t t = 0; t < QL; t += L) {
      const Vt high = *(Vt*)(d.high + t), low = *(Vt*)(d.low + t);
      *(Vt*)(d.from_start + t) = exp2_of(high, low);
      *(Vt*)(d.to_end + t) = exp2v<T>((last - high) + (rest - low));
    }
    d.whole = d.from_start[k.size - 1];
    d.less_one = is_near_1(d.whole) ? T(std::expm1(total / LOG2E)) : d.whole - 1;
  }
  // exp(s_i - s_j) for the tokens j of a vector; 0 for those after i
  ALWAYS_INLINE Vt between_tokens(const Decays& d, int64_t i, int64_t v) const {
    VI<T> j;
    for (int l = 0; l < L; l++) j[l] = l;
    const Vt power = (d.high[i] - *(const Vt*)(d.high + v * L)) + (d.low[i] - *(const Vt*)(d.low + v * L));
    const auto hidden = j > typename Bits<T>::Int(i - v * L);
    return hidden ? Vt{} : exp2v<T>(hidden ? Vt{} : power);
  }
  void read_X(const Block& k, int64_t head, Work& w) const {
    for (int64_t t = 0; t < k.size; t++) {
      const T* x = row<T>(s.u, k.b, k.start + t) + head * P;
      each_vector<T>(P, 0, PV, [&](int64_t v, int64_t c, int width) {
        *(Vt*)(w.X + t * PL + v * L) = w.decays.delta[t] * load<T>(x + c, width);
      });
    }
  }

  // Sums of a tile.
  template <int R, int W> static ALWAYS_INLINE int64_t last_row(Vt (&)[R][W], int64_t i) { return i + R - 1; }
  template <int R, int W> static ALWAYS_INLINE void put(const Vt (&sum)[R][W], T* to, int64_t row) {
    each_of_tile(sum, 0, 0, [&](Vt x, int64_t i, int64_t v) ALWAYS_INLINE_LAMBDA { *(Vt*)(to + i * row + v * L) = x; });
  }
  template <int R, int W> static ALWAYS_INLINE void scale(Vt (&sum)[R][W], const T* factors) {
    each_of_tile(sum, 0, 0, [&](Vt& x, int64_t i, int64_t) ALWAYS_INLINE_LAMBDA { x *= factors[i]; });
  }
  // out_i += the sum's row i . x's row i
  template <int R, int W>
  static ALWAYS_INLINE void add_dots(const Vt (&sum)[R][W], const T* x, int64_t row, T* out) {
    for (int i = 0; i < R; i++) {
      Vt dot{};
      for (int v = 0; v < W; v++) dot += sum[i][v] * *(const Vt*)(x + i * row + v * L);
      out[i] += lane_sum(dot);
    }
  }
  template <int R, int W> ALWAYS_INLINE void write_rows(const Vt (&sum)[R][W], T* const (&rows)[R], int64_t v) const {
    each_of_tile(sum, 0, v, [&](Vt x, int64_t i, int64_t u) ALWAYS_INLINE_LAMBDA {
      const int64_t left = P - u * L;
      store<T>(rows[i] + u * L, x, int(left < L ? left : L));
    });
  }

  static bool is_near_1(T decay) { return decay > T(0.5); }
  // What rounding leaves of a head's state from block to block, if decays are so near 1 that the state is a sum over many
  // blocks. Else null.
  T* rest_of(int64_t h, T decay, Work& w) const {
    const bool lasts = decay > T(1 - 1.0 / 64);
    T* rest = w.rests + h * state_size();
    if (w.has_rest[h] && !lasts) std::memset((void*)rest, 0, state_size() * sizeof(T));
    w.has_rest[h] = lasts;
    return w.has_rest[h] ? rest : nullptr;
  }
  void clear_rests(Work& w) const {
    std::memset((void*)w.rests, 0, HEADS * state_size() * sizeof(T));
    std::fill(w.has_rest, w.has_rest + HEADS, false);
  }
  // H' = factor H + (rows of B or C)^T (rows of X or dy), both scaled already; H may be zero. Where the factor is near 1,
  // H is added last: multiplied, it would round the same way at each block, or at each token.
  void next_state(const Block& k, T factor, T less_one, const T* weights, const T* rows, T* state, T* rest = nullptr) const {
    if (!is_near_1(factor)) add_block<false, false>(k, factor, weights, rows, state, rest);
    else if (rest) add_block<true, true>(k, less_one, weights, rows, state, rest);
    else add_block<true, false>(k, less_one, weights, rows, state, rest);
  }
  // H' = H, if ONTO, + what is left of it, if RESTS, + first H + (rows of B or C)^T (rows of X or dy)
  template <bool ONTO, bool RESTS>
  void add_block(const Block& k, T first, const T* weights, const T* rows, T* state, T* rest) const {
    in_tiles<T>(N, PV, [&](auto& sum, int64_t n, int64_t v) __attribute__((always_inline)) {
      each_of_tile(sum, n, v, [&](Vt& x, int64_t i, int64_t u) ALWAYS_INLINE_LAMBDA {
        x = first == 0 ? Vt{} : first * *(Vt*)(state + (u * N + i) * L);
      });
      add_product<T>(sum, k.size, {weights + n, 1, NL}, {rows + v * L, PL, L});
      each_of_tile(sum, n, v, [&](Vt x, int64_t i, int64_t u) ALWAYS_INLINE_LAMBDA {
        const int64_t at = (u * N + i) * L;
        if (RESTS) x += *(Vt*)(rest + at);
        const Vt before = ONTO ? *(Vt*)(state + at) : Vt{}, after = ONTO ? before + x : x;
        *(Vt*)(state + at) = after;
        if (RESTS) *(Vt*)(rest + at) = x - (after - before);
      });
    });
  }
  void scale_rows(const Block& k, const T* rows, const T* factors, T* to) const {
    for (int64_t t = 0; t < k.size; t++)
      for (int64_t v = 0; v < PV; v++) *(Vt*)(to + t * PL + v * L) = factors[t] * *(Vt*)(rows + t * PL + v * L);
  }
  void advance(const Block& k, Work& w, T* state, T* rest = nullptr) const {
    scale_rows(k, w.X, w.decays.to_end, w.scaled);
    next_state(k, k.is_first ? T(0) : w.decays.whole, w.decays.less_one, w.B, w.scaled, state, rest);
  }

  // ------------------------------------------------------------------------------------------- forward
  void forward(int64_t thread) const {
    Work w(*this, false);
    each_run(thread, [&](int64_t b, int64_t group, int64_t first, int64_t last, bool) {
      clear_rests(w);
      for (int64_t head = first; head < last; head++)
        gather(s.initial_state, w.state + (head - first) * state_size(), b, head);
      for (int64_t segment = 0; segment < segments; segment++) {
        for (int64_t head = first; s.checkpoints && head < last; head++)
          std::memcpy((void*)saved(b, segment, head), w.state + (head - first) * state_size(), state_size() * sizeof(T));
        const int64_t stop = stop_of(segment);
        for (int64_t start = segment * s.interval; start < stop;) {
          const Block k = block(b, start, stop);
          read_group(k, group, w);
          for (int64_t head = first; head < last; head++) forward_block(k, head, head - first, w);
          start += k.size;
        }
      }
      for (int64_t head = first; head < last; head++)
        scatter(s.final_state, w.state + (head - first) * state_size(), b, head);
    });
  }
  void forward_block(const Block& k, int64_t head, int64_t h, Work& w) const {
    Decays& d = w.decays;
    T* state = w.state + h * state_size();
    read_decays(k, head, d);
    read_X(k, head, w);
    for (int64_t i = 0; i < k.size; i++)
      for (int64_t v = 0; v < QV; v++)
        *(Vt*)(w.M + i * QL + v * L) = v * L > i ? Vt{} : masked(*(Vt*)(w.G + i * QL + v * L), i, v) * between_tokens(d, i, v);
    in_tiles<T>(k.size, PV, [&](auto& sum, int64_t i, int64_t v) __attribute__((always_inline)) {
      constexpr int R = sizeof(sum) / sizeof(sum[0]);
      if (!k.is_first) {
        add_product<T>(sum, N, {w.C + i * NL, NL, 1}, {state + v * N * L, L, N * L});
        scale(sum, d.from_start + i);
      }
      add_product<T>(sum, i + R, {w.M + i * QL, QL, 1}, {w.X + v * L, PL, L});
      T* rows[R];
      for (int r = 0; r < R; r++) rows[r] = row<T>(s.y, k.b, k.start + i + r) + head * P;
      if (s.D) add_input(sum, k, head, i, v);
      write_rows(sum, rows, v);
    });
    advance(k, w, state, rest_of(h, k.is_first ? T(0) : d.whole, w));
  }
  // What a product leaves in columns after a row's token need not be a number.
  ALWAYS_INLINE Vt masked(Vt x, int64_t i, int64_t v) const {
    VI<T> j;
    for (int l = 0; l < L; l++) j[l] = l;
    return j > typename Bits<T>::Int(i - v * L) ? Vt{} : x;
  }
  // Only the columns after token i.
  ALWAYS_INLINE Vt after(Vt x, int64_t i, int64_t v) const {
    VI<T> j;
    for (int l = 0; l < L; l++) j[l] = l;
    return j > typename Bits<T>::Int(i - v * L) ? x : Vt{};
  }
  template <int R, int W>
  ALWAYS_INLINE void add_input(Vt (&sum)[R][W], const Block& k, int64_t head, int64_t i, int64_t v) const {
    each_of_tile(sum, k.start + i, v, [&](Vt& x, int64_t t, int64_t u) ALWAYS_INLINE_LAMBDA {
      const int64_t c = u * L, left = P - c;
      const int width = int(left < L ? left : L);
      x += ((const T*)s.D)[head] * load<T>(row<T>(s.u, k.b, t) + head * P + c, width);
    });
  }
  // body(row of the batch, group, first head, last head, whether the group's gradients have no values yet)
  template <class F> void each_run(int64_t thread, F body) const {
    const int64_t units = s.batch * s.nheads;
    const int64_t lo = units * thread / s.threads, hi = units * (thread + 1) / s.threads;
    for (int64_t unit = lo; unit < hi;) {
      const int64_t b = unit / s.nheads, head = unit % s.nheads, group = head / per_group;
      int64_t last = (group + 1) * per_group;
      if (last > head + HEADS) last = head + HEADS;
      if (last > head + hi - unit) last = head + hi - unit;
      body(b, group, head, last, head % per_group == 0 || unit == lo);
      unit += last - head;
    }
  }

  // ------------------------------------------------------------------------------------------ backward
  void backward(int64_t thread) const {
    Work w(*this, true);
    const int64_t size = state_size();
    each_run(thread, [&](int64_t b, int64_t group, int64_t first, int64_t last, bool fresh) {
      for (int64_t h = 0; h < last - first; h++) {
        gather(s.dfinal_state, w.state + h * size, b, first + h);
        w.goes_on[h] = s.dfinal_state != nullptr;
      }
      clear_rests(w);
      std::fill(w.dD_sums.begin(), w.dD_sums.end(), 0.0);
      for (double* sums : {w.dA, w.ddelta_bias}) std::fill(sums, sums + HEADS, 0.0);
      if (s.window) read_prefixes(b, group, first, last, w);
      for (int64_t segment = segments - 1; segment >= 0; segment--) {
        const int64_t stop = stop_of(segment);
        std::vector<Block> blocks;
        for (int64_t start = segment * s.interval; start < stop; start += blocks.back().size)
          blocks.push_back(block(b, start, stop));
        const int64_t count = blocks.size();
        std::memset((void*)w.dD, 0, HEADS * PL * sizeof(T));
        states_again(b, segment, group, first, last, blocks, w);
        if (s.window >= Q) prefixes_again(segment, group, first, last, blocks, w);
        for (int64_t i = count; i-- > 0;) {
          const Block& k = blocks[i];
          Ahead a = ahead(k, w);
          if (!a.reaches) a.size = 0;
          read_group(k, group, w);
          for (T* p : {w.dB, w.dC}) std::memset((void*)p, 0, k.size * NL * sizeof(T));
          std::memset((void*)w.dG, 0, k.size * QL * sizeof(T));
          if (a.size) read_group_ahead(k, a, group, w);
          for (int64_t h = 0; h < last - first; h++) {
            if (k.end() == a.group_end && a.group_end < s.seqlen)
              w.to_group_end[h] = exponent(b, a.group_end, first + h);
            if (k.start < owned) {
              const T* before = w.states + (h * count + i) * size;
              backward_block(k, first + h, h, before, arriving(k, a, h, first + h, i, w), a, w);
            } else {
              read_outside(k, first + h, w);
            }
            add_to_cotangent(k, h, w);
            w.to_group_end[h] += w.decays.exponent;
          }
          write_group(k, a, thread, group, fresh, w);
        }
        for (int64_t c = 0; s.dD && c < (last - first) * PL; c += L) add_to<T>(&w.dD_sums[c], *(Vt*)(w.dD + c));
      }
      for (int64_t h = 0; h < last - first; h++) {
        if (s.window) add_state(w.initial + h * size, w.state + h * size);
        scatter(s.dinitial_state, w.state + h * size, b, first + h);
        const int64_t of_head = b * s.nheads + first + h;
        ((T*)s.dA)[of_head] = T(w.dA[h]);
        if (s.ddelta_bias) ((T*)s.ddelta_bias)[of_head] = T(w.ddelta_bias[h]);
        const auto dD = w.dD_sums.begin() + h * PL;
        if (s.dD) ((T*)s.dD)[of_head] = T(std::accumulate(dD, dD + P, 0.0));
      }
    });
  }
  // The states before the blocks of a segment that do not begin a document.
  void states_again(int64_t b, int64_t segment, int64_t group, int64_t first, int64_t last, const std::vector<Block>& blocks, Work& w) const {
    const int64_t size = state_size(), count = blocks.size();
    w.states = w.states_memory.at_least(HEADS * count * size);
    for (int64_t h = 0; h < last - first; h++)
      std::memcpy((void*)(w.states + h * count * size), saved(b, segment, first + h), size * sizeof(T));
    for (int64_t i = 0; i + 1 < count; i++) {
      if (blocks[i + 1].is_first) continue;
      const Block& k = blocks[i];
      copy_rows(s.B, k, group * N, N, w.B, NL);
      for (int64_t h = 0; h < last - first; h++) {
        T *before = w.states + (h * count + i) * size, *after = before + size;
        std::memcpy((void*)after, before, size * sizeof(T));
        read_decays(k, first + h, w.decays);
        read_X(k, first + h, w);
        advance(k, w, after);
      }
    }
  }
  // The block's gradients. before: H; state: dH', null if it is zero.
  void backward_block(const Block& k, int64_t head, int64_t h, const T* before, const T* state, const Ahead& a,
                      Work& w) const {
    Decays& d = w.decays;
    T* dD = w.dD + h * PL;
    read_decays(k, head, d);
    read_X(k, head, w);
    copy_rows(s.dy, k, head * P, P, w.dy, PL);
    const int64_t reach = is_narrow(k.start) ? s.window : Q;  // of a token's window within the block
    for (int64_t v = 0; v < PV; v++) transpose_column<T>(w.X + v * L, PL, k.size, w.X_by_channel + v * L * QL, QL);
    std::memset((void*)w.from_C, 0, 3 * QL * sizeof(T));

    // T and M
    in_tiles<T>(k.size, (k.size + L - 1) / L, [&](auto& sum, int64_t i, int64_t v) __attribute__((always_inline)) {
      if (v * L <= last_row(sum, i)) add_product<T>(sum, P, {w.dy + i * PL, PL, 1}, {w.X_by_channel + v * L, QL, L});
      each_of_tile(sum, i, v, [&](Vt x, int64_t r, int64_t u) ALWAYS_INLINE_LAMBDA {
        const int64_t at = r * QL + u * L;
        const Vt decay = between_tokens(d, r, u);
        const Vt t = masked(x, r, u) * decay;
        *(Vt*)(w.T_ + at) = t;
        *(Vt*)(w.dG + at) += t;
        const Vt m = u * L > r ? Vt{} : masked(*(Vt*)(w.G + at), r, u) * decay;
        *(Vt*)(w.M + at) = after(m, r - reach, u);
      });
    });
    if (a.size) products_ahead(k, a, w);
    // dX, and from it the gradients of x and of the step size
    in_tiles<T>(k.size, PV, [&](auto& sum, int64_t j, int64_t v) __attribute__((always_inline)) {
      constexpr int R = sizeof(sum) / sizeof(sum[0]), W = sizeof(sum[0]) / sizeof(Vt);
      if (state) {
        add_product<T>(sum, N, {w.B + j * NL, NL, 1}, {state + v * N * L, L, N * L});
        scale(sum, d.to_end + j);
        add_dots(sum, w.X + j * PL + v * L, PL, w.from_X + j);
      }
      add_product<T>(sum, k.size - j, {w.M + j * QL + j, 1, QL}, {w.dy + j * PL + v * L, PL, L});
      if (a.size) add_product<T>(sum, rows_ahead(k, a, j + R - 1), {w.M_ahead + j, 1, QL}, {w.dy_ahead + v * L, PL, L});
      for (int r = 0; r < R; r++) {
        const T* x = row<T>(s.u, k.b, k.start + j + r) + head * P;
        T* dx = row<T>(s.du, k.b, k.start + j + r) + head * P;
        Vt dot{};
        for (int u = 0; u < W; u++) {
          const int64_t c = (v + u) * L, left = P - c;
          const int width = int(left < L ? left : L);
          const Vt input = load<T>(x + c, width), dy = *(Vt*)(w.dy + (j + r) * PL + c);
          dot += input * sum[r][u];
          Vt gradient = d.delta[j + r] * sum[r][u];
          if (s.D) {
            gradient += ((const T*)s.D)[head] * dy;
            *(Vt*)(dD + c) += dy * input;
          }
          store<T>(dx + c, gradient, width);
        }
        w.d_delta[j + r] += lane_sum(dot);
      }
    });
    T through_state = 0;
    if (!k.is_first) {
      if (state) {
        Vt dot{};
        for (int64_t i = 0; i < state_size(); i += L) dot += *(const Vt*)(before + i) * *(const Vt*)(state + i);
        through_state = d.whole * lane_sum(dot);
      }
      for (int64_t v = 0; v < PV; v++) transpose_column<T>(before + v * N * L, L, N, w.turned + v * L * NL, NL);
      in_tiles<T>(k.size, NV, [&](auto& sum, int64_t i, int64_t v) __attribute__((always_inline)) {
        add_product<T>(sum, P, {w.dy + i * PL, PL, 1}, {w.turned + v * L, NL, L});
        scale(sum, d.from_start + i);
        add_dots(sum, w.C + i * NL + v * L, NL, w.from_C + i);
        add_rows(sum, w.dC + i * NL + v * L);
      });
      in_tiles<T>(a.size, NV, [&](auto& sum, int64_t i, int64_t v) __attribute__((always_inline)) {
        add_product<T>(sum, P, {w.dy_ahead + i * PL, PL, 1}, {w.turned + v * L, NL, L});
        add_dots(sum, w.C_ahead + i * NL + v * L, NL, w.from_C_ahead + i);
      });
      for (int64_t i = 0; i < a.size; i++) w.from_C_ahead[i] *= d.whole;
    }
    if (state) {
      for (int64_t v = 0; v < PV; v++) transpose_column<T>(state + v * N * L, L, N, w.turned + v * L * NL, NL);
      in_tiles<T>(k.size, NV, [&](auto& sum, int64_t j, int64_t v) __attribute__((always_inline)) {
        add_product<T>(sum, P, {w.X + j * PL, PL, 1}, {w.turned + v * L, NL, L});
        scale(sum, d.to_end + j);
        add_rows(sum, w.dB + j * NL + v * L);
      });
    }
    write_steps(k, head, h, a, through_state, w);
  }
  // A block whose gradients are another piece's: zeros.
  void read_outside(const Block& k, int64_t head, Work& w) const {
    read_decays(k, head, w.decays);
    copy_rows(s.dy, k, head * P, P, w.dy, PL);
    for (int64_t t = k.start; t < k.end(); t++) {
      std::memset((void*)(row<T>(s.du, k.b, t) + head * P), 0, P * sizeof(T));
      row<T>(s.ddelta, k.b, t)[head] = 0;
    }
  }
  // R before a block from R behind it: zero before a document and before a group.
  void add_to_cotangent(const Block& k, int64_t h, Work& w) const {
    T* state = w.state + h * state_size();
    bool& goes_on = w.goes_on[h];
    if (k.is_first || begins_group(k.start)) {
      rest_of(h, T(0), w);
      std::memset((void*)state, 0, state_size() * sizeof(T));
      goes_on = false;
      return;
    }
    scale_rows(k, w.dy, w.decays.from_start, w.scaled);
    const T decay = goes_on ? w.decays.whole : T(0);
    next_state(k, decay, w.decays.less_one, w.C, w.scaled, state, rest_of(h, decay, w));
    goes_on = true;
  }
  template <int R, int W> ALWAYS_INLINE void add_rows(const Vt (&sum)[R][W], T* to) const {
    each_of_tile(sum, 0, 0, [&](Vt x, int64_t i, int64_t v) ALWAYS_INLINE_LAMBDA { *(Vt*)(to + i * NL + v * L) += x; });
  }
  // d(delta_r A) of every token r, the last one first, and from it the gradients of the step sizes, of A and of the bias:
  // `later` sums T G over the rows i >= r in the window of r.
  void write_steps(const Block& k, int64_t head, int64_t h, const Ahead& a, T through_state, Work& w) const {
    const Decays& d = w.decays;
    T before[Q], from_later = 0, from_earlier = 0;  // sums over i >= r; over j < r, and over the rows ahead
    T from_ahead = 0;
    Vt later[QV] = {}, sum_ahead[QV] = {};
    VI<T> lane;
    for (int l = 0; l < L; l++) lane[l] = l;
    const auto sum_before = [&](const Vt* columns, int64_t r) ALWAYS_INLINE_LAMBDA {
      Vt sum{};
      for (int64_t v = 0; v * L < r; v++) sum += lane < typename Bits<T>::Int(r - v * L) ? columns[v] : Vt{};
      return lane_sum(sum);
    };
    for (int64_t r = 0, i = 0; r < k.size; r++) {
      for (; i < rows_ahead(k, a, r); i++) {
        for (int64_t v = 0; v * L < k.size; v++) sum_ahead[v] += *(Vt*)(w.K_ahead + i * QL + v * L);
        from_ahead += w.from_C_ahead[i];
      }
      before[r] = from_earlier + from_ahead;
      if (i) before[r] += sum_before(sum_ahead, r);
      from_earlier += w.from_X[r];
    }
    const bool narrow = is_narrow(k.start);
    for (int64_t r = k.size - 1; r >= 0; r--) {
      const int64_t stop = narrow && r + s.window < k.size ? r + s.window : narrow ? k.size : r + 1;
      if (narrow) {
        for (Vt& x : later) x = Vt{};
        from_later = 0;
      }
      for (int64_t i = r; i < stop; i++) {
        for (int64_t v = 0; v * L <= r; v++)
          later[v] += *(Vt*)(w.T_ + i * QL + v * L) * masked(*(Vt*)(w.G + i * QL + v * L), i, v);
        from_later += w.from_C[i];
      }
      const T of_exponent = sum_before(later, r) + from_later + before[r] + through_state;
      const T of_input = (w.d_delta[r] + of_exponent * ((const T*)s.A)[head]) * d.slope[r];
      row<T>(s.ddelta, k.b, k.start + r)[head] = of_input;
      w.dA[h] += double(of_exponent) * double(d.delta[r]);
      w.ddelta_bias[h] += double(of_input);
    }
  }
  // A thread's part of dB or dC at a token, if threads share groups
  T* part_of(void* parts, int64_t thread, int64_t b, int64_t t, int64_t group) const {
    return (T*)parts + (((thread * s.batch + b) * s.seqlen + t) * s.ngroups + group) * N;
  }
  // dB and dC: sums over the heads of a group, of which a thread may come to several runs.
  void write_group(const Block& k, const Ahead& a, int64_t thread, int64_t group, bool fresh, Work& w) const {
    T* out[] = {row<T>(s.dB_sum, k.b, k.start) + group * N, row<T>(s.dC_sum, k.b, k.start) + group * N};
    int64_t strides[] = {s.dB_sum.time_stride, s.dC_sum.time_stride};
    if (s.dB) {
      out[0] = part_of(s.dB, thread, k.b, k.start, group), out[1] = part_of(s.dC, thread, k.b, k.start, group);
      strides[0] = strides[1] = s.ngroups * N;
    }
    for (int which : {1, 0}) {
      for (int64_t i = s.window; which == 0 && is_narrow(k.start) && i < k.size; i++)
        for (int64_t at = i * QL, v = 0; v < QV; v++)
          *(Vt*)(w.dG + at + v * L) = after(*(Vt*)(w.dG + at + v * L), i - s.window, v);
      in_tiles<T>(k.size, NV, [&](auto& sum, int64_t t, int64_t v) __attribute__((always_inline)) {
        if (which == 0) add_product<T>(sum, k.size - t, {w.dG + t * QL + t, 1, QL}, {w.C + t * NL + v * L, NL, L});
        else add_product<T>(sum, last_row(sum, t) + 1, {w.dG + t * QL, QL, 1}, {w.B + v * L, NL, L});
        if (which == 0 && a.size)
          add_product<T>(sum, rows_ahead(k, a, last_row(sum, t)), {w.dG_ahead + t, 1, QL}, {w.C_ahead + v * L, NL, L});
        const T* others = which == 0 ? w.dB : w.dC;
        each_of_tile(sum, t, v, [&](Vt x, int64_t r, int64_t u) ALWAYS_INLINE_LAMBDA {
          const int64_t n = u * L, left = N - n;
          const int width = int(left < L ? left : L);
          T* to = out[which] + r * strides[which] + n;
          const Vt value = x + *(const Vt*)(others + r * NL + n);
          store<T>(to, fresh ? value : value + load<T>(to, width), width);
        });
      });
    }
  }
  // Sums over threads of dB and dC at tokens of all rows, counted in the batch's order.
  void add_parts(int64_t first, int64_t end) const {
    const int64_t units = s.batch * s.nheads;
    for (int64_t i = first; i < end; i++)
      for (int64_t group = 0, b = i / s.seqlen, t = i % s.seqlen; group < s.ngroups; group++) {
        // the threads with heads of the group: `each_run`
        const int64_t unit = b * s.nheads + group * per_group, from = ((unit + 1) * s.threads - 1) / units;
        const int64_t to = ((unit + per_group) * s.threads - 1) / units;
        for (int which : {0, 1}) {
          void* parts = which ? s.dC : s.dB;
          T* out = row<T>(which ? s.dC_sum : s.dB_sum, b, t) + group * N;
          each_vector<T>(N, 0, (N + L - 1) / L, [&](int64_t, int64_t n, int width) {
            Vt sum = load<T>(part_of(parts, from, b, t, group) + n, width);
            for (int64_t p = from + 1; p <= to; p++) sum += load<T>(part_of(parts, p, b, t, group) + n, width);
            store<T>(out + n, sum, width);
          });
        }
      }
  }

  // ------------------------------------------------------------------------------------------- windows
  // Whether the windows from a token on are narrower than blocks and end before the sequence does.
  bool is_narrow(int64_t start) const { return s.window && s.window < Q && start < s.seqlen - s.window; }
  bool begins_group(int64_t start) const {
    return s.window && (is_narrow(start) || (s.seqlen - start) % s.window == 0);
  }
  // Where the last of the windows from a token on that are alike ends: a group's end, or the last narrow one.
  int64_t window_edge(int64_t start) const {
    return is_narrow(start) ? s.seqlen - s.window : s.seqlen - (s.seqlen - start - 1) / s.window * s.window;
  }
  int64_t next_document(int64_t t, const Work& w) const {
    return s.reset && t < s.seqlen ? w.next_document[t] : s.seqlen;
  }
  Ahead ahead(const Block& k, const Work& w) const {
    if (!s.window) return {};
    const bool narrow = is_narrow(k.start);
    Ahead a{narrow ? k.end() : window_edge(k.start), narrow ? k.end() : k.start + s.window, 0, false};
    if (a.group_end == s.seqlen) return a;
    const int64_t document_end = next_document(a.group_end + 1, w), window_end = k.end() + s.window - narrow;
    a.size = (window_end < document_end ? window_end : document_end) - a.first;
    if (a.size < 0) a.size = 0;
    a.reaches = next_document(k.end(), w) > a.group_end;
    return a;
  }
  // Number of rows ahead in the window of a block's token, or of those before it
  int64_t rows_ahead(const Block& k, const Ahead& a, int64_t token) const {
    const int64_t rows = k.start + token + s.window - a.first;
    return rows < 0 ? 0 : rows < a.size ? rows : a.size;
  }
  // dy of rows ahead, times exp(s_i - s_g). sum: s_i - s_g to base 2, of the token before them unless P begins with
  // them, then of their last one.
  void read_ahead(const Block& rows, int64_t head, bool is_first, double& sum, Work& w) const {
    alignas(VECTOR_BYTES) T factors[QL] = {}, low[QL] = {};
    if (is_first) sum = 0;
    for (int64_t t = 0; t < rows.size; t++) {
      if (t > 0 || !is_first) sum += exponent(rows.b, rows.start + t, head);
      factors[t] = T(sum);
      low[t] = T(sum - double(factors[t]));
    }
    for (int64_t t = 0; t < QL; t += L)
      *(Vt*)(factors + t) = exp2_of(*(Vt*)(factors + t), *(Vt*)(low + t));
    copy_rows(s.dy, rows, head * P, P, w.dy_ahead, PL);
    scale_rows(rows, w.dy_ahead, factors, w.dy_ahead);
  }
  // Adds the rows ahead to P of every head.
  void add_ahead(int64_t b, const Ahead& a, int64_t group, int64_t first, int64_t last, Prefixes& prefixes,
                 int64_t block, Work& w) const {
    const Block rows{b, a.first, a.size, false};
    const bool is_first = a.first == a.group_end;
    if (!a.size && !is_first) return;
    copy_rows(s.C, rows, group * N, N, w.C_ahead, NL);
    for (int64_t h = 0; h < last - first; h++) {
      read_ahead(rows, first + h, is_first, prefixes.exponent(h, block), w);
      next_state(rows, T(!is_first), T(0), w.C_ahead, w.dy_ahead, prefixes.at(h, block, state_size()));
    }
  }
  // P of the initial state, which is behind a token -1, and P before each segment's first rows ahead.
  void read_prefixes(int64_t b, int64_t group, int64_t first, int64_t last, Work& w) const {
    const int64_t size = state_size(), edge = s.window < Q ? 0 : s.seqlen % s.window;
    if (s.reset) {
      w.next_document.assign(s.seqlen, s.seqlen);
      for (int64_t t = s.seqlen - 1; t >= 0; t--)
        w.next_document[t] = s.reset[b * s.seqlen + t] ? t : next_document(t + 1, w);
    }
    Prefixes& prefixes = w.of_segments;
    prefixes.resize((s.seqlen - s.window) / s.interval + 1, size);
    const int64_t document_end = next_document(edge + 1, w);
    const int64_t stop = s.window - 1 < document_end ? s.window - 1 : document_end;
    Ahead a{edge, edge, 0, next_document(0, w) > edge};
    do {
      a.size = stop - a.first < Q ? stop - a.first : Q;
      if (a.size < 0) a.size = 0;
      add_ahead(b, a, group, first, last, prefixes, 0, w);
      a.first += a.size;
    } while (a.first < stop);
    for (int64_t h = 0; h < last - first; h++) {
      double sum = 0;
      for (int64_t t = 0; a.reaches && t <= edge; t++) sum += exponent(b, t, first + h);
      scale_state(prefixes.at(h, 0, size), a.reaches ? T(std::exp2(sum)) : T(0), w.initial + h * size);
    }
    if (s.window < Q) return;
    if (edge && s.window - 1 < document_end)
      add_ahead(b, {edge, s.window - 1, 1, true}, group, first, last, prefixes, 0, w);
    for (int64_t segment = 0; segment + 1 < prefixes.blocks; segment++) {
      const int64_t begin = segment * s.interval, stop = stop_of(segment);
      copy_prefixes(prefixes, segment, prefixes, segment + 1, last - first);
      for (int64_t start = begin; start < stop;) {
        const Block k = block(b, start, stop);
        add_ahead(b, ahead(k, w), group, first, last, prefixes, segment + 1, w);
        start = k.end();
      }
    }
  }
  void copy_prefixes(Prefixes& from, int64_t i, Prefixes& to, int64_t j, int64_t heads) const {
    for (int64_t h = 0; h < heads; h++) {
      std::memcpy((void*)to.at(h, j, state_size()), from.at(h, i, state_size()), state_size() * sizeof(T));
      to.exponent(h, j) = from.exponent(h, i);
    }
  }
  void add_state(const T* from, T* to) const {
    for (int64_t i = 0; i < state_size(); i += L) *(Vt*)(to + i) += *(const Vt*)(from + i);
  }
  void scale_state(const T* from, T factor, T* to) const {
    for (int64_t i = 0; i < state_size(); i += L) *(Vt*)(to + i) = factor == 0 ? Vt{} : factor * *(const Vt*)(from + i);
  }
  // P before the rows ahead of each of a segment's blocks.
  void prefixes_again(int64_t segment, int64_t group, int64_t first, int64_t last, const std::vector<Block>& blocks,
                      Work& w) const {
    const int64_t count = blocks.size();
    if (segment >= w.of_segments.blocks) return;
    w.of_blocks.resize(count, state_size());
    copy_prefixes(w.of_segments, segment, w.of_blocks, 0, last - first);
    for (int64_t i = 0; i + 1 < count && blocks[i + 1].start < s.seqlen - s.window; i++) {
      copy_prefixes(w.of_blocks, i, w.of_blocks, i + 1, last - first);
      add_ahead(blocks[i].b, ahead(blocks[i], w), group, first, last, w.of_blocks, i + 1, w);
    }
  }
  // C of the rows ahead, and their G.
  void read_group_ahead(const Block& k, const Ahead& a, int64_t group, Work& w) const {
    copy_rows(s.C, {k.b, a.first, a.size, false}, group * N, N, w.C_ahead, NL);
    std::memset((void*)w.dG_ahead, 0, a.size * QL * sizeof(T));
    in_tiles<T>(a.size, (k.size + L - 1) / L, [&](auto& sum, int64_t i, int64_t v) __attribute__((always_inline)) {
      add_product<T>(sum, N, {w.C_ahead + i * NL, NL, 1}, {w.B_by_state + v * N * L, L, N * L});
      put(sum, w.G_ahead + i * QL + v * L, QL);
    });
  }
  // The cotangent of the state behind a block, null if it is zero; reads dy' of the rows ahead.
  const T* arriving(const Block& k, const Ahead& a, int64_t h, int64_t head, int64_t block, Work& w) const {
    const T* state = w.goes_on[h] ? w.state + h * state_size() : nullptr;
    const T factor = T(std::exp2(w.to_group_end[h]));
    if (a.size) {
      double sum = a.has_prefix() ? w.of_blocks.exponent(h, block) : 0;
      read_ahead({k.b, a.first, a.size, false}, head, a.first == a.group_end, sum, w);
      for (int64_t i = 0; i < a.size * PL; i += L) *(Vt*)(w.dy_ahead + i) *= factor;
    }
    if (!a.has_prefix()) return state;
    scale_state(w.of_blocks.at(h, block, state_size()), factor, w.arriving);
    if (state) add_state(state, w.arriving);
    return w.arriving;
  }
  // T' G, M and the sum of T' over heads, for the rows ahead.
  void products_ahead(const Block& k, const Ahead& a, Work& w) const {
    const int64_t offset = a.first - k.start - s.window;  // row i is in the windows of tokens j > i + offset
    std::memset((void*)w.from_C_ahead, 0, QL * sizeof(T));
    in_tiles<T>(a.size, (k.size + L - 1) / L, [&](auto& sum, int64_t i, int64_t v) __attribute__((always_inline)) {
      add_product<T>(sum, P, {w.dy_ahead + i * PL, PL, 1}, {w.X_by_channel + v * L, QL, L});
      each_of_tile(sum, i, v, [&](Vt x, int64_t r, int64_t u) ALWAYS_INLINE_LAMBDA {
        const int64_t at = r * QL + u * L;
        const Vt decay = *(Vt*)(w.decays.to_end + u * L), t = x * decay, G = *(Vt*)(w.G_ahead + at);
        *(Vt*)(w.K_ahead + at) = t * G;
        *(Vt*)(w.dG_ahead + at) += after(t, r + offset, u);
        *(Vt*)(w.M_ahead + at) = after(G * decay, r + offset, u);
      });
    });
  }
};

template <class T> void run(const ScanArgs& s, bool backward) {
  Ssd<T> scan(s);
  if (!backward) return parallel(s.threads, [&](int64_t i) { scan.forward(i); });
  Phase parts, sums;
  parallel(s.threads, [&](int64_t) {
    in_pieces(parts, s.threads, s.threads, [&](int64_t i, int64_t) { scan.backward(i); });
    if (s.dB) in_pieces(sums, s.threads, s.batch * s.seqlen, [&](int64_t first, int64_t end) { scan.add_parts(first, end); });
  });
}

}  // namespace

extern "C" {
void adjoint_ssd_f32(const ScanArgs* s, int backward) { run<float>(*s, backward); }
void adjoint_ssd_f64(const ScanArgs* s, int backward) { run<double>(*s, backward); }
}
