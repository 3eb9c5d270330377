// Causal depthwise conv1d with state, optionally followed by SiLU, in (batch, seqlen, channels) layout.
//   p_t = bias + sum_j weight[:, j] x_{t - width + 1 + j},   y_t = silu(p_t) or p_t
// Inputs before the chunk come from `initial_state` (batch, channels, width - 1), oldest first.
#include "cpu_lanes.h"

struct ConvArgs {
  int64_t batch, seqlen, channels, width, threads, silu;
  void* x;
  int64_t x_batch_stride, x_time_stride;
  void *weight, *bias, *initial_state, *y;  // y: forward's output; contiguous
  uint8_t* reset;                           // (batch, seqlen) or null: no tap reaches before such a token
  void* dy;
  int64_t dy_batch_stride, dy_time_stride;
  void *dx, *dweight, *dbias, *dinitial_state;  // dweight (batch, channels, width), dbias (batch, channels)
};

namespace {
constexpr int MAX_WIDTH = 16;

template <class T> struct Conv {
  typedef V<T> Vt;
  static constexpr int L = Vec<T>::L;
  const ConvArgs& s;
  int64_t blocks() const { return (s.channels + L - 1) / L; }

  struct Lane {
    int64_t channel;
    int width;
    Vt weight[MAX_WIDTH], bias;
  };
  Lane lane(int64_t i) const {
    Lane k;
    k.channel = i * L;
    k.width = int(s.channels - k.channel < L ? s.channels - k.channel : L);
    for (int64_t j = 0; j < s.width; j++) {
      k.weight[j] = Vt{};
      for (int l = 0; l < k.width; l++) k.weight[j][l] = ((const T*)s.weight)[(k.channel + l) * s.width + j];
    }
    k.bias = s.bias ? load<T>((const T*)s.bias + k.channel, k.width) : Vt{};
    return k;
  }
  ALWAYS_INLINE Vt input(int64_t b, int64_t t, const Lane& k) const {
    if (t >= 0) return load<T>((const T*)s.x + b * s.x_batch_stride + t * s.x_time_stride + k.channel, k.width);
    Vt v{};
    if (s.initial_state)
      for (int l = 0; l < k.width; l++)
        v[l] = ((const T*)s.initial_state)[(b * s.channels + k.channel + l) * (s.width - 1) + s.width - 1 + t];
    return v;
  }
  // how many of the taps of token t count: fewer behind the beginning of a document
  ALWAYS_INLINE int64_t reach(int64_t b, int64_t t) const {
    if (!s.reset) return s.width;
    int64_t n = 1;
    while (n < s.width && (t - n + 1 < 0 || !s.reset[b * s.seqlen + t - n + 1])) n++;
    return n;
  }
  ALWAYS_INLINE Vt preactivation(int64_t b, int64_t t, const Lane& k) const {
    Vt p = k.bias;
    const int64_t n = reach(b, t);
    for (int64_t i = 0; i < n; i++) p += k.weight[s.width - 1 - i] * input(b, t - i, k);
    return p;
  }
  template <class F> void each_tile(int64_t thread, F body) const {  // blocks of lanes, split among the threads
    const int64_t units = s.batch * blocks();
    for (int64_t i = units * thread / s.threads; i < units * (thread + 1) / s.threads; i++)
      body(i / blocks(), lane(i % blocks()));
  }

  void forward(int64_t thread) const {
    each_tile(thread, [&](int64_t b, const Lane& k) {
      for (int64_t t = 0; t < s.seqlen; t++) {
        Vt p = preactivation(b, t, k);
        if (s.silu) p *= sigmoidv<T>(p);
        store<T>((T*)s.y + (b * s.seqlen + t) * s.channels + k.channel, p, k.width);
      }
    });
  }
  void backward(int64_t thread) const {
    each_tile(thread, [&](int64_t b, const Lane& k) {
      Vt dweight[MAX_WIDTH] = {}, dbias{}, pending[MAX_WIDTH] = {};  // pending[i]: dx of token t - i so far
      for (int64_t t = s.seqlen - 1; t >= 0; t--) {
        Vt dp = load<T>((const T*)s.dy + b * s.dy_batch_stride + t * s.dy_time_stride + k.channel, k.width);
        if (s.silu) {
          const Vt p = preactivation(b, t, k), sig = sigmoidv<T>(p);
          dp *= sig * (1 + p * (1 - sig));
        }
        dbias += dp;
        const int64_t n = reach(b, t);
        for (int64_t i = 0; i < n; i++) {
          dweight[s.width - 1 - i] += dp * input(b, t - i, k);
          pending[i] += dp * k.weight[s.width - 1 - i];
        }
        store<T>((T*)s.dx + (b * s.seqlen + t) * s.channels + k.channel, pending[0], k.width);
        for (int64_t i = 0; i + 1 < s.width; i++) pending[i] = pending[i + 1];
        pending[s.width - 1] = Vt{};
      }
      const int64_t at = b * s.channels + k.channel;
      for (int l = 0; l < k.width; l++) {
        for (int64_t j = 0; j < s.width; j++) ((T*)s.dweight)[(at + l) * s.width + j] = dweight[j][l];
        if (s.dinitial_state)
          for (int64_t i = 0; i + 1 < s.width; i++)
            ((T*)s.dinitial_state)[(at + l) * (s.width - 1) + s.width - 2 - i] = pending[i][l];
      }
      if (s.dbias) store<T>((T*)s.dbias + at, dbias, k.width);
    });
  }
};

template <class T> void run_conv(const ConvArgs& s, bool backward) {
  Conv<T> conv{s};
  parallel(s.threads, [&](int64_t i) { backward ? conv.backward(i) : conv.forward(i); });
}
}  // namespace

extern "C" {
void adjoint_conv1d_f32(const ConvArgs* s, int backward) { run_conv<float>(*s, backward); }
void adjoint_conv1d_f64(const ConvArgs* s, int backward) { run_conv<double>(*s, backward); }
}
