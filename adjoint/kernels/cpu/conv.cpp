// Causal depthwise conv1d with state, optionally followed by SiLU, in (batch, seqlen, channels) layout.
//   p_t = bias + sum_j weight[:, j] x_{t - width + 1 + j},   y_t = silu(p_t) or p_t
// Inputs before the chunk come from `initial_state` (batch, channels, width - 1), oldest first.
#include "lanes.h"

struct ConvArgs {
  int64_t batch, seqlen, channels, width, threads, silu;
  void* x;
  int64_t x_batch_stride, x_time_stride;
  void *weight, *bias, *initial_state, *y;  // y: forward's output; contiguous
  uint8_t* reset;                           // (batch, seqlen) or null: no tap reaches before such a token
  void* dy;
  int64_t dy_batch_stride, dy_time_stride;
  void *dx, *dweight, *dbias, *dinitial_state;  // dweight (threads, channels, width), dbias (threads, channels): zeroed
};

namespace {
constexpr int MAX_WIDTH = 16, TILE = 64;

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
  // Tiles of tokens, all channels of one after another: rows stay in cache while their lanes are walked.
  template <class F> void each_tile(int64_t thread, F body) const {
    std::vector<Lane> lanes;
    for (int64_t i = 0; i < blocks(); i++) lanes.push_back(lane(i));
    const int64_t tiles = (s.seqlen + TILE - 1) / TILE, units = s.batch * tiles;
    for (int64_t i = units * thread / s.threads; i < units * (thread + 1) / s.threads; i++) {
      const int64_t first = i % tiles * TILE, end = first + TILE < s.seqlen ? first + TILE : s.seqlen;
      for (const Lane& k : lanes) body(i / tiles, first, end, k);
    }
  }
  // body(t, p_t, inputs), inputs[i] being x_{t-i}, for the usual width, whose inputs move through registers
  template <class F> ALWAYS_INLINE void each_token4(int64_t b, int64_t first, int64_t end, const Lane& k, F body) const {
    Vt x[4] = {Vt{}, input(b, first - 1, k), input(b, first - 2, k), input(b, first - 3, k)};
    for (int64_t t = first; t < end; t++) {
      x[0] = input(b, t, k);
      body(t, k.bias + k.weight[3] * x[0] + k.weight[2] * x[1] + k.weight[1] * x[2] + k.weight[0] * x[3], x);
      x[3] = x[2]; x[2] = x[1]; x[1] = x[0];
    }
  }
  template <class F> ALWAYS_INLINE void each_token(int64_t b, int64_t first, int64_t end, const Lane& k, F body) const {
    for (int64_t t = first; t < end; t++) {
      Vt x[MAX_WIDTH], p = k.bias;
      const int64_t n = reach(b, t);
      for (int64_t i = 0; i < s.width; i++) x[i] = i < n ? input(b, t - i, k) : Vt{};
      for (int64_t i = 0; i < n; i++) p += k.weight[s.width - 1 - i] * x[i];
      body(t, p, x);
    }
  }
  bool usual() const { return s.width == 4 && !s.reset; }

  void forward(int64_t thread) const {
    each_tile(thread, [&](int64_t b, int64_t first, int64_t end, const Lane& k) {
      auto body = [&](int64_t t, Vt p, const Vt*) {
        if (s.silu) p *= sigmoidv<T>(p);
        store<T>((T*)s.y + (b * s.seqlen + t) * s.channels + k.channel, p, k.width);
      };
      if (usual()) each_token4(b, first, end, k, body);
      else each_token(b, first, end, k, body);
    });
  }
  // A tile's dx needs the dp of up to width - 1 tokens behind it, computed twice: cheaper than waiting for them.
  void backward(int64_t thread) const {
    T* sums = (T*)s.dweight + thread * s.channels * s.width;
    T* bias_sums = s.dbias ? (T*)s.dbias + thread * s.channels : nullptr;
    each_tile(thread, [&](int64_t b, int64_t first, int64_t end, const Lane& k) {
      const int64_t ahead = end + s.width - 1 < s.seqlen ? end + s.width - 1 : s.seqlen;
      Vt dp[TILE + MAX_WIDTH], dweight[MAX_WIDTH] = {}, dbias{};
      auto body = [&](int64_t t, Vt p, const Vt* x) {
        Vt d = load<T>((const T*)s.dy + b * s.dy_batch_stride + t * s.dy_time_stride + k.channel, k.width);
        if (s.silu) {
          const Vt sig = sigmoidv<T>(p);
          d *= sig * (1 + p * (1 - sig));
        }
        dp[t - first] = d;
        if (t >= end) return;
        dbias += d;
        for (int64_t i = 0; i < s.width; i++) dweight[s.width - 1 - i] += d * x[i];
      };
      if (usual()) each_token4(b, first, ahead, k, body);
      else each_token(b, first, ahead, k, body);
      // the cotangent of x_t, also of the inputs before the sequence
      auto input_cotangent = [&](int64_t t) {
        Vt d{};
        for (int64_t i = t < 0 ? -t : 0; i < s.width && t + i < ahead; i++)
          if (!s.reset || reach(b, t + i) > i) d += dp[t + i - first] * k.weight[s.width - 1 - i];
        return d;
      };
      for (int64_t t = first; t < end; t++)
        store<T>((T*)s.dx + (b * s.seqlen + t) * s.channels + k.channel, input_cotangent(t), k.width);
      if (first == 0 && s.dinitial_state)
        for (int64_t j = 0; j + 1 < s.width; j++) {
          const Vt d = input_cotangent(j - (s.width - 1));
          for (int l = 0; l < k.width; l++)
            ((T*)s.dinitial_state)[(b * s.channels + k.channel + l) * (s.width - 1) + j] = d[l];
        }
      for (int l = 0; l < k.width; l++)
        for (int64_t j = 0; j < s.width; j++) sums[(k.channel + l) * s.width + j] += dweight[j][l];
      if (bias_sums) store<T>(bias_sums + k.channel, load<T>(bias_sums + k.channel, k.width) + dbias, k.width);
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
