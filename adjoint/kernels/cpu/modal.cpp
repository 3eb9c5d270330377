// Modal filters: a causal filter of any length as a sum of decaying exponentials, in each channel
//   h_{n,t} = p_n h_{n,t-1} + u_t,   y_t = sum_n R_n h_{n,t} + D u_t
// and its adjoint
//   mu_{n,t} = R_n dy_t + p_n mu_{n,t+1},   du_t = sum_n mu_{n,t} + D dy_t,   dp_n = sum_t mu_{n,t} h_{n,t-1},
//   dR_n = sum_t dy_t h_{n,t}
// A thread takes vectors of channels, and of these a segment of tokens at a time. A few modes of one vector are in registers
// while the segment's tokens pass: two multiply-adds for a mode and token, fewer than a product with a block's impulse response
// would take. States are in double, also for float inputs: they are sums over as many tokens as a pole lasts. The caller keeps
// the states before each segment; the backward makes the others again.
#include "lanes.h"

#include <algorithm>

struct ModalArgs {
  int64_t batch, seqlen, channels, order, threads, segment, window, halo;  // window: 0 for none
  void* u;
  int64_t u_batch_stride, u_time_stride;
  double *pole, *R, *D;  // (order, channels), (order, channels), (channels) or null
  void *initial_state, *final_state, *y, *checkpoints;  // (batch, channels, order) twice; contiguous; (batch, segments, order, channels)
  uint8_t* reset;                                       // (batch, seqlen) or null: nothing is carried to such a token
  void* dy;
  int64_t dy_batch_stride, dy_time_stride;
  void *dfinal_state, *dinitial_state, *du;
  double *dpole, *dR, *dD;  // a sum for each batch entry: (batch, order, channels) twice, (batch, channels)
};

namespace {
typedef V<double> Vd;
constexpr int LANES = Vec<double>::L;
constexpr int FORWARD_MODES = REGISTERS == 32 ? 8 : 4, BACKWARD_MODES = REGISTERS == 32 ? 4 : 2;

template <class T> ALWAYS_INLINE Vd load_wide(const T* p, int width) {
  if constexpr (sizeof(T) == sizeof(double)) return load<double>(p, width);
  typedef T Part __attribute__((vector_size(LANES * sizeof(T))));
  Part part{};
  if (width == LANES) std::memcpy(&part, p, sizeof(part));
  else std::memcpy(&part, p, width * sizeof(T));
  return __builtin_convertvector(part, Vd);
}
template <class T> ALWAYS_INLINE void store_narrow(T* p, Vd v, int width) {
  if constexpr (sizeof(T) == sizeof(double)) return store<double>(p, v, width);
  typedef T Part __attribute__((vector_size(LANES * sizeof(T))));
  const Part part = __builtin_convertvector(v, Part);
  if (width == LANES) std::memcpy(p, &part, sizeof(part));
  else std::memcpy(p, &part, width * sizeof(T));
}

// body(constant M, first mode) for `order` modes, M at a time
template <int M, class F> ALWAYS_INLINE void each_modes(int64_t order, F body) {
  int64_t n = 0;
  for (; n + M <= order; n += M) body(std::integral_constant<int, M>{}, n);
  for (; n + 2 <= order; n += 2) body(std::integral_constant<int, 2>{}, n);
  for (; n < order; n++) body(std::integral_constant<int, 1>{}, n);
}

template <class T> struct Modal {
  const ModalArgs& s;
  int64_t blocks() const { return (s.channels + LANES - 1) / LANES; }
  int64_t segments() const { return (s.seqlen + s.segment - 1) / s.segment; }
  bool begins(int64_t b, int64_t t) const { return s.reset && s.reset[b * s.seqlen + t]; }
  int width_of(int64_t block) const { return int(std::min<int64_t>(LANES, s.channels - block * LANES)); }
  const T* u_of(int64_t b, int64_t t) const { return (const T*)s.u + b * s.u_batch_stride + t * s.u_time_stride; }
  const T* dy_of(int64_t b, int64_t t) const { return (const T*)s.dy + b * s.dy_batch_stride + t * s.dy_time_stride; }
  T* saved(int64_t b, int64_t segment, int64_t n) const { return (T*)s.checkpoints + ((b * segments() + segment) * s.order + n) * s.channels; }

  // body(b, first block, end) for this thread's share of (batch, blocks)
  template <class F> void each(int64_t thread, F body) const {
    const int64_t units = s.batch * blocks(), end = units * (thread + 1) / s.threads;
    for (int64_t i = units * thread / s.threads; i < end;) {
      const int64_t b = i / blocks(), first = i % blocks(), stop = std::min(first + end - i, blocks());
      body(b, first, stop);
      i += stop - first;
    }
  }
  // A thread's parameters, (blocks, order) each.
  struct Parameters {
    std::vector<Vd> pole, R, D;
  };
  Parameters parameters(int64_t first, int64_t stop) const {
    Parameters p;
    for (int64_t block = first; block < stop; block++) {
      const int64_t c = block * LANES;
      const int width = width_of(block);
      for (int64_t n = 0; n < s.order; n++) {
        p.pole.push_back(load<double>(s.pole + n * s.channels + c, width));
        p.R.push_back(load<double>(s.R + n * s.channels + c, width));
      }
      p.D.push_back(s.D ? load<double>(s.D + c, width) : Vd{});
    }
    return p;
  }
  // The states (batch, channels, order) of some vectors of channels, zero without any, and back.
  std::vector<Vd> read_states(const void* states, int64_t b, int64_t first, int64_t stop) const {
    std::vector<Vd> h((stop - first) * s.order);
    for (int64_t c = first * LANES; states && c < std::min(stop * LANES, s.channels); c++)
      for (int64_t n = 0; n < s.order; n++)
        h[(c / LANES - first) * s.order + n][c % LANES] = ((const T*)states)[(b * s.channels + c) * s.order + n];
    return h;
  }
  void write_states(void* states, const std::vector<Vd>& h, int64_t b, int64_t first, int64_t stop) const {
    for (int64_t c = first * LANES; c < std::min(stop * LANES, s.channels); c++)
      for (int64_t n = 0; n < s.order; n++)
        ((T*)states)[(b * s.channels + c) * s.order + n] = T(h[(c / LANES - first) * s.order + n][c % LANES]);
  }

  void forward(int64_t thread) const {
    each(thread, [&](int64_t b, int64_t first, int64_t stop) {
      const Parameters p = parameters(first, stop);
      std::vector<Vd> states = read_states(s.initial_state, b, first, stop), inputs(s.segment), outputs(s.segment);
      Vd *x = inputs.data(), *y = outputs.data();
      for (int64_t begin = 0; begin < s.seqlen; begin += s.segment) {
        const int64_t tokens = std::min(s.segment, s.seqlen - begin);
        for (int64_t block = first; block < stop; block++) {
          const int64_t c = block * LANES, row = (block - first) * s.order;
          const int width = width_of(block);
          Vd* h = states.data() + row;
          for (int64_t n = 0; s.checkpoints && n < s.order; n++) store_narrow<T>(saved(b, begin / s.segment, n) + c, h[n], width);
          for (int64_t i = 0; i < tokens; i++) {
            x[i] = load_wide<T>(u_of(b, begin + i) + c, width);
            y[i] = s.D ? p.D[block - first] * x[i] : Vd{};
          }
          each_modes<FORWARD_MODES>(s.order, [&](auto modes, int64_t n) {
            run(modes, b, begin, tokens, h + n, p.pole.data() + row + n, p.R.data() + row + n, x, y);
          });
          for (int64_t i = 0; i < tokens; i++) store_narrow<T>((T*)s.y + (b * s.seqlen + begin + i) * s.channels + c, y[i], width);
        }
      }
      write_states(s.final_state, states, b, first, stop);
    });
  }
  // Adds what M modes give to a segment's outputs.
  template <int M>
  NEVER_INLINE void run(std::integral_constant<int, M>, int64_t b, int64_t begin, int64_t tokens, Vd* states, const Vd* poles,
                        const Vd* residues, const Vd* x, Vd* y) const {
    Vd h[M], pole[M], R[M];
    for (int m = 0; m < M; m++) h[m] = states[m], pole[m] = poles[m], R[m] = residues[m];
    for (int64_t i = 0, end; i < tokens; i = end) {
      if (begins(b, begin + i))
        for (int m = 0; m < M; m++) h[m] = Vd{};
      for (end = i + 1; end < tokens && !begins(b, begin + end);) end++;
      for (int64_t t = i; t < end; t++) {
        const Vd in = x[t];
        Vd sum[2] = {y[t], Vd{}};
        for (int m = 0; m < M; m++) {
          h[m] = pole[m] * h[m] + in;
          sum[m % 2] += R[m] * h[m];
        }
        y[t] = sum[0] + sum[1];
      }
    }
    for (int m = 0; m < M; m++) states[m] = h[m];
  }

  // What goes on to the left of the tokens that have been done, and sums over them; (blocks, order) each.
  struct Sums {
    std::vector<Vd> carried, pole, R, D;
  };
  void backward(int64_t thread) const {
    each(thread, [&](int64_t b, int64_t first, int64_t stop) {
      const Parameters p = parameters(first, stop);
      const std::vector<Vd> final = read_states(s.dfinal_state, b, first, stop);
      Sums sums{final, std::vector<Vd>(final.size()), std::vector<Vd>(final.size()), std::vector<Vd>(stop - first)};
      std::vector<Vd> inputs(s.segment), cotangents(s.segment), leaving(s.segment), before(s.segment * BACKWARD_MODES);
      Vd *x = inputs.data(), *dy = cotangents.data(), *du = leaving.data();
      const std::vector<int64_t> next = s.window ? next_begins(b) : std::vector<int64_t>();
      for (int64_t segment = segments() - 1; segment >= 0; segment--) {
        const int64_t begin = segment * s.segment, tokens = std::min(s.segment, s.seqlen - begin);
        const int64_t own = std::max<int64_t>(0, std::min(tokens, s.seqlen - s.halo - begin));
        for (int64_t block = first; block < stop; block++) {
          const int64_t c = block * LANES, row = (block - first) * s.order;
          const int width = width_of(block);
          for (int64_t i = 0; i < tokens; i++) {
            x[i] = load_wide<T>(u_of(b, begin + i) + c, width);
            dy[i] = load_wide<T>(dy_of(b, begin + i) + c, width);
            du[i] = s.D && i < own ? p.D[block - first] * dy[i] : Vd{};
            if (i < own) sums.D[block - first] += dy[i] * x[i];
          }
          each_modes<BACKWARD_MODES>(s.order, [&](auto modes, int64_t n) {
            run_back(modes, b, segment, tokens, own, n, c, width, p, sums, final.data() + row + n, row + n, next, x, dy, du, before.data());
          });
          for (int64_t i = 0; i < tokens; i++) store_narrow<T>((T*)s.du + (b * s.seqlen + begin + i) * s.channels + c, du[i], width);
        }
      }
      write_states(s.dinitial_state, sums.carried, b, first, stop);
      for (int64_t block = first; block < stop; block++) {
        const int64_t c = block * LANES;
        for (int64_t n = 0; n < s.order; n++) {
          const int64_t to = (b * s.order + n) * s.channels + c, from = (block - first) * s.order + n;
          store<double>(s.dpole + to, sums.pole[from], width_of(block));
          store<double>(s.dR + to, sums.R[from], width_of(block));
        }
        if (s.dD) store<double>(s.dD + b * s.channels + c, sums.D[block - first], width_of(block));
      }
    });
  }
  // For each token the first one behind it at which a document begins.
  std::vector<int64_t> next_begins(int64_t b) const {
    std::vector<int64_t> next(s.seqlen + 1, s.seqlen);
    for (int64_t t = s.seqlen - 1; t >= 0; t--) next[t] = begins(b, t) ? t : next[t + 1];
    return next;  // at or behind t
  }
  // One segment of M modes: the states before its tokens, then from its last token to its first.
  template <int M>
  NEVER_INLINE void run_back(std::integral_constant<int, M>, int64_t b, int64_t segment, int64_t tokens, int64_t own, int64_t n, int64_t c,
                             int width, const Parameters& p, Sums& sums, const Vd* final, int64_t row, const std::vector<int64_t>& next,
                             const Vd* x, const Vd* dy, Vd* du, Vd* before) const {
    const int64_t begin = segment * s.segment, W = s.window;
    Vd h[M], pole[M], R[M], mu[M], dpole[M], dR[M], left[M];  // left: a pole's power of W
    for (int m = 0; m < M; m++) {
      h[m] = load_wide<T>(saved(b, segment, n + m) + c, width);
      pole[m] = p.pole[row + m], R[m] = p.R[row + m], mu[m] = sums.carried[row + m];
      dpole[m] = sums.pole[row + m], dR[m] = sums.R[row + m];
      left[m] = splat<double>(1);
      Vd square = pole[m];
      for (int64_t k = W; k; k >>= 1, square *= square)
        if (k & 1) left[m] *= square;
    }
    for (int64_t i = 0; i < tokens; i++) {
      if (begins(b, begin + i))
        for (int m = 0; m < M; m++) h[m] = Vd{};
      for (int m = 0; m < M; m++) {
        before[i * M + m] = h[m];
        h[m] = pole[m] * h[m] + x[i];
      }
    }
    for (int64_t i = tokens - 1; i >= 0; i--) {
      const bool is_own = i < own;
      Vd out{};
      for (int m = 0; m < M; m++) {
        const Vd h_before = before[i * M + m];
        mu[m] += R[m] * dy[i];
        if (is_own) {
          out += mu[m];
          dpole[m] += mu[m] * h_before;
          dR[m] += dy[i] * (pole[m] * h_before + x[i]);
        }
      }
      du[i] += out;
      if (begins(b, begin + i)) {
        for (int m = 0; m < M; m++) mu[m] = Vd{};
        continue;
      }
      for (int m = 0; m < M; m++) mu[m] *= pole[m];
      // the window of the token before ends before token `last`
      const int64_t last = begin + i - 1 + W;
      if (W && last < s.seqlen && last < next[begin + i]) {
        const Vd dropped = load_wide<T>(dy_of(b, last) + c, width);
        for (int m = 0; m < M; m++) mu[m] -= left[m] * (R[m] * dropped + (last == s.seqlen - 1 ? final[m] : Vd{}));
      }
    }
    for (int m = 0; m < M; m++) sums.carried[row + m] = mu[m], sums.pole[row + m] = dpole[m], sums.R[row + m] = dR[m];
  }
};

template <class T> void run_modal(const ModalArgs& s, bool backward) {
  Modal<T> scan{s};
  parallel(s.threads, [&](int64_t i) { backward ? scan.backward(i) : scan.forward(i); });
}
}  // namespace

extern "C" {
void adjoint_modal_f32(const ModalArgs* s, int backward) { run_modal<float>(*s, backward); }
void adjoint_modal_f64(const ModalArgs* s, int backward) { run_modal<double>(*s, backward); }
}
