// SSD scan (Mamba-2) on the CPU by blocks of Q tokens: forward and adjoint as small matrix products (Dao and Gu 2024,
// section 6). scan.cpp has the recurrence token by token, for windows and for what is too small for products.
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
  const int64_t N, P, NV, PV, NL, PL, segments, slots, per_group;

  explicit Ssd(const ScanArgs& a)
      : s(a), N(a.d_state), P(a.headdim), NV((N + L - 1) / L), PV((P + L - 1) / L), NL(NV * L), PL(PV * L),
        segments((a.seqlen + a.interval - 1) / a.interval), slots((a.interval + Q - 1) / Q),
        per_group(a.nheads / a.ngroups) {}

  struct Block { int64_t b, start, size; bool is_first; };  // is_first: of a document, nothing comes from before
  // A state is (channels in vectors, d_state, lanes), as in scan.cpp.
  int64_t state_size() const { return N * PL; }

  // Sums of the exponents and their exponentials. Float32 sums have a second number for what rounding leaves.
  struct Decays {
    alignas(VECTOR_BYTES) T high[QL], low[QL], from_start[QL], to_end[QL], delta[QL];
    T whole;
  };
  struct Buffer {
    std::vector<Vt> memory;
    T* resized(int64_t numbers) {
      memory.assign((numbers + L - 1) / L, Vt{});
      return (T*)memory.data();
    }
  };
  struct Work {
    Buffer buffers[20];
    T *B, *C, *B_by_state, *G;                  // (Q, NL) twice, (QV, N, L), (Q, QL)
    T *X, *M;                                   // (Q, PL), (Q, QL)
    T *state;                                   // (heads, state_size)
    T *dy, *scaled, *X_by_channel, *T_, *dG;    // (Q, PL) twice, (PV * L, QL), (Q, QL) twice
    T *turned, *dB, *dC;                        // (PL, NL), (Q, NL) twice
    T *states;                                  // (heads, slots, state_size)
    T *dD;                                      // (heads, PL)
    T *from_C, *from_X, *d_delta;               // (Q): e_i dy_i . C_i H, f_j X_j . B_j dH', dX_j . x_j
    bool goes_on[HEADS];                        // whether dH' is another number than zero
    Decays decays;
    Work(const Ssd& k, bool backward) {
      int i = 0;
      for (T** p : {&B, &C}) *p = buffers[i++].resized(Q * k.NL);
      B_by_state = buffers[i++].resized(QL * k.N);
      for (T** p : {&G, &M}) *p = buffers[i++].resized(Q * QL);
      for (T** p : {&X, &scaled}) *p = buffers[i++].resized(Q * k.PL);
      state = buffers[i++].resized(HEADS * k.state_size());
      if (!backward) return;
      dy = buffers[i++].resized(Q * k.PL);
      X_by_channel = buffers[i++].resized(k.PL * QL);
      for (T** p : {&T_, &dG}) *p = buffers[i++].resized(Q * QL);
      turned = buffers[i++].resized(k.PL * k.NL);
      for (T** p : {&dB, &dC}) *p = buffers[i++].resized(Q * k.NL);
      states = buffers[i++].resized(HEADS * k.slots * k.state_size());
      dD = buffers[i++].resized(HEADS * k.PL);
      T* numbers = buffers[i++].resized(3 * QL);
      from_C = numbers, from_X = numbers + QL, d_delta = numbers + 2 * QL;
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

  // (channels, d_state) of a head <-> a state
  void gather(const void* rows, T* state, int64_t b, int64_t head) const {
    std::memset((void*)state, 0, state_size() * sizeof(T));
    if (!rows) return;
    const T* p = (const T*)rows + (b * s.nheads + head) * P * N;
    for (int64_t c = 0; c < P; c++)
      for (int64_t n = 0; n < N; n++) state[(c / L * N + n) * L + c % L] = p[c * N + n];
  }
  void scatter(void* rows, const T* state, int64_t b, int64_t head) const {
    if (!rows) return;
    T* p = (T*)rows + (b * s.nheads + head) * P * N;
    for (int64_t c = 0; c < P; c++)
      for (int64_t n = 0; n < N; n++) p[c * N + n] = state[(c / L * N + n) * L + c % L];
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
  void read_decays(const Block& k, int64_t head, Decays& d) const {
    const T A = ((const T*)s.A)[head];
    double total = 0;
    for (int64_t t = 0; t < k.size; t++) {
      const T delta = row<T>(s.delta, k.b, k.start + t)[head];
      total += double(delta) * double(A) * LOG2E;
      d.delta[t] = delta;
      d.high[t] = T(total);
      d.low[t] = T(total - double(d.high[t]));
    }
    for (int64_t t = k.size; t < QL; t++) d.delta[t] = d.low[t] = 0, d.high[t] = d.high[k.size - 1];
    const Vt last = splat<T>(d.high[k.size - 1]), rest = splat<T>(d.low[k.size - 1]);
    for (int64_t t = 0; t < QL; t += L) {
      const Vt high = *(Vt*)(d.high + t), low = *(Vt*)(d.low + t);
      *(Vt*)(d.from_start + t) = exp2v<T>(high) * (1 + low * T(LN2));
      *(Vt*)(d.to_end + t) = exp2v<T>((last - high) + (rest - low));
    }
    d.whole = d.from_start[k.size - 1];
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
    for (int i = 0; i < R; i++)
      for (int v = 0; v < W; v++) *(Vt*)(to + i * row + v * L) = sum[i][v];
  }
  template <int R, int W> static ALWAYS_INLINE void scale(Vt (&sum)[R][W], const T* factors) {
    for (int i = 0; i < R; i++)
      for (int v = 0; v < W; v++) sum[i][v] *= factors[i];
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
    for (int i = 0; i < R; i++)
      for (int u = 0; u < W; u++) {
        const int64_t left = P - (v + u) * L;
        store<T>(rows[i] + (v + u) * L, sum[i][u], int(left < L ? left : L));
      }
  }

  // H' = factor H + (rows of B or C)^T (rows of X or dy), both scaled already; H may be zero.
  void next_state(const Block& k, T factor, const T* weights, const T* rows, T* state) const {
    in_tiles<T>(N, PV, [&](auto& sum, int64_t n, int64_t v) __attribute__((always_inline)) {
      for (size_t i = 0; i < sizeof(sum) / sizeof(sum[0]); i++)
        for (size_t u = 0; u < sizeof(sum[0]) / sizeof(Vt); u++)
          sum[i][u] = factor == 0 ? Vt{} : factor * *(Vt*)(state + ((v + u) * N + n + i) * L);
      add_product<T>(sum, k.size, {weights + n, 1, NL}, {rows + v * L, PL, L});
      for (size_t i = 0; i < sizeof(sum) / sizeof(sum[0]); i++)
        for (size_t u = 0; u < sizeof(sum[0]) / sizeof(Vt); u++)
          *(Vt*)(state + ((v + u) * N + n + i) * L) = sum[i][u];
    });
  }
  void scale_rows(const Block& k, const T* rows, const T* factors, T* to) const {
    for (int64_t t = 0; t < k.size; t++)
      for (int64_t v = 0; v < PV; v++) *(Vt*)(to + t * PL + v * L) = factors[t] * *(Vt*)(rows + t * PL + v * L);
  }
  void advance(const Block& k, Work& w, T* state) const {
    scale_rows(k, w.X, w.decays.to_end, w.scaled);
    next_state(k, k.is_first ? T(0) : w.decays.whole, w.B, w.scaled, state);
  }

  // ------------------------------------------------------------------------------------------- forward
  void forward(int64_t thread) const {
    Work w(*this, false);
    each_run(thread, [&](int64_t b, int64_t group, int64_t first, int64_t last, bool) {
      for (int64_t head = first; head < last; head++)
        gather(s.initial_state, w.state + (head - first) * state_size(), b, head);
      for (int64_t segment = 0; segment < segments; segment++) {
        for (int64_t head = first; s.checkpoints && head < last; head++)
          std::memcpy((void*)saved(b, segment, head), w.state + (head - first) * state_size(), state_size() * sizeof(T));
        const int64_t stop = stop_of(segment);
        for (int64_t start = segment * s.interval; start < stop;) {
          const Block k = block(b, start, stop);
          read_group(k, group, w);
          for (int64_t head = first; head < last; head++) forward_block(k, head, w, w.state + (head - first) * state_size());
          start += k.size;
        }
      }
      for (int64_t head = first; head < last; head++)
        scatter(s.final_state, w.state + (head - first) * state_size(), b, head);
    });
  }
  void forward_block(const Block& k, int64_t head, Work& w, T* state) const {
    Decays& d = w.decays;
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
    advance(k, w, state);
  }
  // What a product leaves in columns after a row's token need not be a number.
  ALWAYS_INLINE Vt masked(Vt x, int64_t i, int64_t v) const {
    VI<T> j;
    for (int l = 0; l < L; l++) j[l] = l;
    return j > typename Bits<T>::Int(i - v * L) ? Vt{} : x;
  }
  template <int R, int W>
  ALWAYS_INLINE void add_input(Vt (&sum)[R][W], const Block& k, int64_t head, int64_t i, int64_t v) const {
    for (int r = 0; r < R; r++)
      for (int u = 0; u < W; u++) {
        const int64_t c = (v + u) * L, left = P - c;
        const int width = int(left < L ? left : L);
        sum[r][u] += load<T>((const T*)s.D + head * P + c, width) * load<T>(row<T>(s.u, k.b, k.start + i + r) + head * P + c, width);
      }
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
        std::memset((void*)(w.dD + h * PL), 0, PL * sizeof(T));
      }
      for (int64_t segment = segments - 1; segment >= 0; segment--) {
        const int64_t begin = segment * s.interval, stop = stop_of(segment);
        std::vector<Block> blocks;
        for (int64_t start = begin; start < stop; start += blocks.back().size) blocks.push_back(block(b, start, stop));
        states_again(b, segment, group, first, last, blocks, w);
        for (size_t i = blocks.size(); i-- > 0;) {
          const Block& k = blocks[i];
          read_group(k, group, w);
          for (T* p : {w.dB, w.dC}) std::memset((void*)p, 0, k.size * NL * sizeof(T));
          std::memset((void*)w.dG, 0, k.size * QL * sizeof(T));
          for (int64_t h = 0; h < last - first; h++) {
            const T* before = w.states + (h * slots + (k.start - begin) / Q) * size;
            backward_block(k, first + h, before, w.state + h * size, w.dD + h * PL, w.goes_on[h], w);
          }
          write_group(k, thread, group, fresh, w);
        }
      }
      for (int64_t h = 0; h < last - first; h++) {
        scatter(s.dinitial_state, w.state + h * size, b, first + h);
        if (s.dD)
          each_vector<T>(P, 0, PV, [&](int64_t v, int64_t c, int width) {
            store<T>((T*)s.dD + (b * s.nheads + first + h) * P + c, *(Vt*)(w.dD + h * PL + v * L), width);
          });
      }
    });
  }
  // The states before the blocks of a segment that do not begin a document.
  void states_again(int64_t b, int64_t segment, int64_t group, int64_t first, int64_t last, const std::vector<Block>& blocks, Work& w) const {
    const int64_t size = state_size(), begin = segment * s.interval;
    for (int64_t h = 0; h < last - first; h++)
      std::memcpy((void*)(w.states + h * slots * size), saved(b, segment, first + h), size * sizeof(T));
    for (size_t i = 0; i + 1 < blocks.size(); i++) {
      if (blocks[i + 1].is_first) continue;
      const Block& k = blocks[i];
      copy_rows(s.B, k, group * N, N, w.B, NL);
      for (int64_t h = 0; h < last - first; h++) {
        T* before = w.states + (h * slots + (k.start - begin) / Q) * size;
        T* after = w.states + (h * slots + (blocks[i + 1].start - begin) / Q) * size;
        if (after != before) std::memcpy((void*)after, before, size * sizeof(T));
        read_decays(k, first + h, w.decays);
        read_X(k, first + h, w);
        advance(k, w, after);
      }
    }
  }
  void backward_block(const Block& k, int64_t head, const T* before, T* state, T* dD, bool& goes_on, Work& w) const {
    Decays& d = w.decays;
    read_decays(k, head, d);
    read_X(k, head, w);
    copy_rows(s.dy, k, head * P, P, w.dy, PL);
    for (int64_t v = 0; v < PV; v++) transpose_column<T>(w.X + v * L, PL, k.size, w.X_by_channel + v * L * QL, QL);
    std::memset((void*)w.from_C, 0, 3 * QL * sizeof(T));

    // T and M
    in_tiles<T>(k.size, (k.size + L - 1) / L, [&](auto& sum, int64_t i, int64_t v) __attribute__((always_inline)) {
      constexpr int R = sizeof(sum) / sizeof(sum[0]), W = sizeof(sum[0]) / sizeof(Vt);
      if (v * L <= i + R - 1) add_product<T>(sum, P, {w.dy + i * PL, PL, 1}, {w.X_by_channel + v * L, QL, L});
      for (int r = 0; r < R; r++)
        for (int u = 0; u < W; u++) {
          const int64_t at = (i + r) * QL + (v + u) * L;
          const Vt decay = between_tokens(d, i + r, v + u);
          const Vt t = masked(sum[r][u], i + r, v + u) * decay;
          *(Vt*)(w.T_ + at) = t;
          *(Vt*)(w.dG + at) += t;
          *(Vt*)(w.M + at) = (v + u) * L > i + r ? Vt{} : masked(*(Vt*)(w.G + at), i + r, v + u) * decay;
        }
    });
    // dX, and from it the gradients of x and of the step size
    in_tiles<T>(k.size, PV, [&](auto& sum, int64_t j, int64_t v) __attribute__((always_inline)) {
      constexpr int R = sizeof(sum) / sizeof(sum[0]), W = sizeof(sum[0]) / sizeof(Vt);
      if (goes_on) {
        add_product<T>(sum, N, {w.B + j * NL, NL, 1}, {state + v * N * L, L, N * L});
        scale(sum, d.to_end + j);
        add_dots(sum, w.X + j * PL + v * L, PL, w.from_X + j);
      }
      add_product<T>(sum, k.size - j, {w.M + j * QL + j, 1, QL}, {w.dy + j * PL + v * L, PL, L});
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
            gradient += load<T>((const T*)s.D + head * P + c, width) * dy;
            *(Vt*)(dD + c) += dy * input;
          }
          store<T>(dx + c, gradient, width);
        }
        w.d_delta[j + r] += lane_sum(dot);
      }
    });
    T through_state = 0;
    if (!k.is_first) {
      if (goes_on) {
        Vt dot{};
        for (int64_t i = 0; i < state_size(); i += L) dot += *(const Vt*)(before + i) * *(Vt*)(state + i);
        through_state = d.whole * lane_sum(dot);
      }
      for (int64_t v = 0; v < PV; v++) transpose_column<T>(before + v * N * L, L, N, w.turned + v * L * NL, NL);
      in_tiles<T>(k.size, NV, [&](auto& sum, int64_t i, int64_t v) __attribute__((always_inline)) {
        add_product<T>(sum, P, {w.dy + i * PL, PL, 1}, {w.turned + v * L, NL, L});
        scale(sum, d.from_start + i);
        add_dots(sum, w.C + i * NL + v * L, NL, w.from_C + i);
        add_rows(sum, w.dC + i * NL + v * L);
      });
    }
    if (goes_on) {
      for (int64_t v = 0; v < PV; v++) transpose_column<T>(state + v * N * L, L, N, w.turned + v * L * NL, NL);
      in_tiles<T>(k.size, NV, [&](auto& sum, int64_t j, int64_t v) __attribute__((always_inline)) {
        add_product<T>(sum, P, {w.X + j * PL, PL, 1}, {w.turned + v * L, NL, L});
        scale(sum, d.to_end + j);
        add_rows(sum, w.dB + j * NL + v * L);
      });
    }
    write_decays(k, head, through_state, w);
    if (k.is_first) {
      std::memset((void*)state, 0, state_size() * sizeof(T));
    } else {
      scale_rows(k, w.dy, d.from_start, w.scaled);
      next_state(k, goes_on ? d.whole : T(0), w.C, w.scaled, state);
    }
    goes_on = !k.is_first;
  }
  template <int R, int W> ALWAYS_INLINE void add_rows(const Vt (&sum)[R][W], T* to) const {
    for (int i = 0; i < R; i++)
      for (int v = 0; v < W; v++) *(Vt*)(to + i * NL + v * L) += sum[i][v];
  }
  // d(delta_r A) of every token r, the last one first: `after` sums T G over the rows i >= r.
  void write_decays(const Block& k, int64_t head, T through_state, Work& w) const {
    T before[Q], from_later = 0, from_earlier = 0;  // sums over i >= r, and over j < r
    for (int64_t r = 0; r < k.size; r++) {
      before[r] = from_earlier;
      from_earlier += w.from_X[r];
    }
    Vt after[QV] = {};
    VI<T> lane;
    for (int l = 0; l < L; l++) lane[l] = l;
    for (int64_t r = k.size - 1; r >= 0; r--) {
      Vt sum{};
      for (int64_t v = 0; v * L <= r; v++) {
        after[v] += *(Vt*)(w.T_ + r * QL + v * L) * masked(*(Vt*)(w.G + r * QL + v * L), r, v);
        sum += lane < typename Bits<T>::Int(r - v * L) ? after[v] : Vt{};
      }
      from_later += w.from_C[r];
      row<T>(s.ddecay, k.b, k.start + r)[head] = lane_sum(sum) + from_later + before[r] + through_state;
      row<T>(s.ddelta, k.b, k.start + r)[head] = w.d_delta[r];
    }
  }
  // dB and dC: sums over the heads of a group, of which a thread may come to several runs.
  void write_group(const Block& k, int64_t thread, int64_t group, bool fresh, Work& w) const {
    const int64_t part = s.partials > 1 ? thread : 0;
    T* out[2];
    int64_t i = 0;
    for (void* p : {s.dB, s.dC}) out[i++] = (T*)p + (((part * s.batch + k.b) * s.seqlen + k.start) * s.ngroups + group) * N;
    for (int which = 0; which < 2; which++) {
      in_tiles<T>(k.size, NV, [&](auto& sum, int64_t t, int64_t v) __attribute__((always_inline)) {
        constexpr int R = sizeof(sum) / sizeof(sum[0]), W = sizeof(sum[0]) / sizeof(Vt);
        if (which == 0) add_product<T>(sum, k.size - t, {w.dG + t * QL + t, 1, QL}, {w.C + t * NL + v * L, NL, L});
        else add_product<T>(sum, t + R, {w.dG + t * QL, QL, 1}, {w.B + v * L, NL, L});
        const T* others = which == 0 ? w.dB : w.dC;
        for (int r = 0; r < R; r++)
          for (int u = 0; u < W; u++) {
            const int64_t n = (v + u) * L, left = N - n;
            const int width = int(left < L ? left : L);
            T* to = out[which] + (t + r) * s.ngroups * N + n;
            const Vt value = sum[r][u] + *(const Vt*)(others + (t + r) * NL + n);
            store<T>(to, fresh ? value : value + load<T>(to, width), width);
          }
      });
    }
  }
};

template <class T> void run(const ScanArgs& s, bool backward) {
  Ssd<T> scan(s);
  parallel(s.threads, [&](int64_t i) { backward ? scan.backward(i) : scan.forward(i); });
}

}  // namespace

extern "C" {
void adjoint_ssd_f32(const ScanArgs* s, int backward) { run<float>(*s, backward); }
void adjoint_ssd_f64(const ScanArgs* s, int backward) { run<double>(*s, backward); }
}
