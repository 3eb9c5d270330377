// Causal depthwise conv1d with state, optionally followed by SiLU, in (batch, seqlen, channels) layout.
//   p_t = bias + sum_j weight[:, j] x_{t - width + 1 + j},   y_t = silu(p_t) or p_t
// Inputs before the chunk come from `initial_state` (batch, channels, width - 1), oldest first.
#include "lanes.h"

#include <algorithm>

struct ConvArgs {
  int64_t batch, seqlen, channels, width, threads, silu;
  void* x;
  int64_t x_batch_stride, x_time_stride;
  void *weight, *bias, *initial_state, *y;  // y: forward's output; contiguous
  uint8_t* reset;                           // (batch, seqlen) or null: no tap reaches before such a token
  void* dy;
  int64_t dy_batch_stride, dy_time_stride;
  void* dx;
  int64_t dx_batch_stride, dx_time_stride;
  void *dweight, *dbias, *dinitial_state;  // dweight (threads, channels, width), dbias (threads, channels): double, zeroed
};

namespace {
constexpr int MAX_WIDTH = 16;

// A thread takes some tokens of all channels and walks token by token: rows are read and written as they lie in memory, and
// those that the next tokens read again are in cache. The tap of j tokens before is numbered j.
template <class T> struct Conv {
  typedef V<T> Vt;
  typedef std::vector<Vt> Row;  // a vector of channels after the other
  static constexpr int L = Vec<T>::L;
  const ConvArgs& s;
  int64_t blocks() const { return (s.channels + L - 1) / L; }

  // body(b, first, end) for this thread's share of the tokens
  template <class F> void each_run(int64_t thread, F body) const {
    const int64_t tokens = s.batch * s.seqlen, end = tokens * (thread + 1) / s.threads;
    for (int64_t i = tokens * thread / s.threads, stop; i < end; i = stop) {
      const int64_t b = i / s.seqlen;
      stop = end < (b + 1) * s.seqlen ? end : (b + 1) * s.seqlen;
      body(b, i - b * s.seqlen, stop - b * s.seqlen);
    }
  }
  struct Weights {
    Row tap[MAX_WIDTH], bias;
  };
  Weights weights() const {
    Weights w;
    for (int64_t j = 0; j < s.width; j++) w.tap[j].resize(blocks());
    w.bias.resize(blocks());
    for (int64_t c = 0; c < s.channels; c++) {
      for (int64_t j = 0; j < s.width; j++) w.tap[j][c / L][c % L] = ((const T*)s.weight)[(c + 1) * s.width - 1 - j];
      if (s.bias) w.bias[c / L][c % L] = ((const T*)s.bias)[c];
    }
    return w;
  }
  // The width - 1 rows of inputs before each sequence.
  std::vector<T> initial_rows() const {
    const int64_t before = s.width - 1;
    std::vector<T> rows(s.batch * before * s.channels);
    for (int64_t i = 0; s.initial_state && i < s.batch * s.channels; i++)
      for (int64_t j = 0; j < before; j++)
        rows[(i / s.channels * before + j) * s.channels + i % s.channels] = ((const T*)s.initial_state)[i * before + j];
    return rows;
  }
  // how many of the taps of token t count: fewer behind the beginning of a document
  int64_t reach(int64_t b, int64_t t) const {
    if (!s.reset) return s.width;
    int64_t n = 1;
    while (n < s.width && (t - n + 1 < 0 || !s.reset[b * s.seqlen + t - n + 1])) n++;
    return n;
  }
  // body(how many, i, channel, width, p_t, inputs, weights) for each vector of token t, n taps of which count; the usual four
  // are in registers
  template <class N, class F> ALWAYS_INLINE void row_of(N n, const Weights& w, const T* const* rows, F body) const {
    constexpr int MOST = std::is_integral<N>::value ? MAX_WIDTH : 4;
    const Vt *weights[MOST], *bias = w.bias.data();
    const T* inputs[MOST];
    for (int64_t j = 0; j < n; j++) weights[j] = w.tap[j].data(), inputs[j] = rows[j];
    each_vector<T>(s.channels, 0, blocks(), [=](int64_t i, int64_t channel, int width) {
      Vt x[MOST], weight[MOST], p = bias[i];
      for (int64_t j = 0; j < n; j++) {
        x[j] = load<T>(inputs[j] + channel, width);
        weight[j] = weights[j][i];
        p += weight[j] * x[j];
      }
      body(n, i, channel, width, p, x, weight);
    });
  }
  template <class F> ALWAYS_INLINE void row(const Weights& w, const std::vector<T>& initial, int64_t b, int64_t t, int64_t n, F body) const {
    const T* rows[MAX_WIDTH];
    for (int64_t j = 0; j < n; j++)
      rows[j] = t >= j ? (const T*)s.x + b * s.x_batch_stride + (t - j) * s.x_time_stride
                       : initial.data() + ((b + 1) * (s.width - 1) + t - j) * s.channels;
    if (n == 4) row_of(std::integral_constant<int, 4>{}, w, rows, body);
    else row_of(n, w, rows, body);
  }

  void forward(int64_t thread) const {
    const std::vector<T> initial = initial_rows();
    const Weights w = weights();
    each_run(thread, [&](int64_t b, int64_t first, int64_t end) {
      for (int64_t t = first; t < end; t++)
        row(w, initial, b, t, reach(b, t), [silu = s.silu, y = (T*)s.y + (b * s.seqlen + t) * s.channels](
                                               auto, int64_t, int64_t channel, int width, Vt p, const Vt*, const Vt*) {
          store<T>(y + channel, silu ? p * sigmoidv<T>(p) : p, width);
        });
    });
  }
  // The cotangent of p_t
  static ALWAYS_INLINE Vt through(bool silu, Vt dy, Vt p) {
    if (!silu) return dy;
    const Vt sig = sigmoidv<T>(p);
    return dy * sig * (1 + p * (1 - sig));
  }
  const T* dy_of(int64_t b, int64_t t) const { return (const T*)s.dy + b * s.dy_batch_stride + t * s.dy_time_stride; }
  T* dx_of(int64_t b, int64_t t) const { return (T*)s.dx + b * s.dx_batch_stride + t * s.dx_time_stride; }

  // whether all of the usual four taps of four tokens count
  bool reach4(int64_t b, int64_t t) const {
    for (int64_t i = 0; i < 4; i++)
      if (reach(b, t + i) < 4) return false;
    return true;
  }
  // The backward of four tokens with all of the usual four taps: sums are read and written once for them.
  void backward4(const Weights& w, int64_t b, int64_t t, Row* dweight, Row& dbias) const {
    const T *x[7], *dy[4];
    T* dx[7];
    const Vt *weights[4], *bias = w.bias.data();
    Vt *to_weight[4], *to_bias = dbias.data();
    for (int i = 0; i < 7; i++) x[i] = (const T*)s.x + b * s.x_batch_stride + (t - 3 + i) * s.x_time_stride, dx[i] = dx_of(b, t - 3 + i);
    for (int i = 0; i < 4; i++) dy[i] = dy_of(b, t + i), weights[i] = w.tap[i].data(), to_weight[i] = dweight[i].data();
    each_vector<T>(s.channels, 0, blocks(), [=, silu = s.silu](int64_t i, int64_t channel, int width) {
      Vt in[7], d[4], weight[4];
      for (int j = 0; j < 4; j++) weight[j] = weights[j][i];
      for (int m = 0; m < 7; m++) in[m] = load<T>(x[m] + channel, width);
      Vt sum = to_bias[i];
      for (int m = 0; m < 4; m++) {
        Vt p = bias[i];
        for (int j = 0; j < 4; j++) p += weight[j] * in[3 + m - j];
        sum += d[m] = through(silu, load<T>(dy[m] + channel, width), p);
      }
      to_bias[i] = sum;
      for (int j = 0; j < 4; j++) {
        Vt of_tap = to_weight[j][i];
        for (int m = 0; m < 4; m++) of_tap += d[m] * in[3 + m - j];
        to_weight[j][i] = of_tap;
      }
      for (int row = 0; row < 7; row++) {  // the last tap's is the first to come to a token
        Vt of_row = row < 3 ? load<T>(dx[row] + channel, width) : Vt{};
        for (int j = 0; j < 4; j++) {
          const int m = row - 3 + j;
          if (m >= 0 && m < 4) of_row += d[m] * weight[j];
        }
        store<T>(dx[row] + channel, of_row, width);
      }
    });
  }
  // A token's dp is added to the cotangents of its taps. Those of another thread's tokens are left to that thread, which
  // computes the dp of up to width - 1 tokens behind its own again: cheaper than waiting for them.
  void backward(int64_t thread) const {
    const std::vector<T> initial = initial_rows();
    std::vector<T> dinitial(initial.size());
    const Weights w = weights();
    const int64_t before = s.width - 1;
    Row dweight[MAX_WIDTH], dbias(blocks());
    for (int64_t j = 0; j < s.width; j++) dweight[j].resize(blocks());
    each_run(thread, [&](int64_t b, int64_t first, int64_t end) {
      const int64_t begin = first ? first : -before, ahead = end + before < s.seqlen ? end + before : s.seqlen;
      int64_t added = first;
      for (int64_t t = first; t < ahead;) {
        if (t - added >= SUMMED_TOGETHER) add(thread, dweight, dbias), added = t;
        if (s.width == 4 && t >= first + before && t + 4 <= end && reach4(b, t)) {
          backward4(w, b, t, dweight, dbias);
          t += 4;
          continue;
        }
        const int64_t n = reach(b, t);
        const T* dy = dy_of(b, t);
        T* dx[MAX_WIDTH];
        Vt *to_weight[MAX_WIDTH], *to_bias = dbias.data();
        for (int64_t j = 0; j < n; j++) {
          dx[j] = t >= j ? dx_of(b, t - j) : dinitial.data() + ((b + 1) * before + t - j) * s.channels;
          to_weight[j] = dweight[j].data();
        }
        const int64_t from = t < end ? 0 : t - end + 1, stop = n < t - begin + 1 ? n : t - begin + 1;
        row(w, initial, b, t, n, [=, silu = s.silu](
                                     auto count, int64_t i, int64_t channel, int width, Vt p, const Vt* x, const Vt* weight) {
          const Vt d = through(silu, load<T>(dy + channel, width), p);
          const auto put = [&](int64_t j) {  // the last tap's is the first to come to its token
            const Vt sum = d * weight[j];
            store<T>(dx[j] + channel, j ? load<T>(dx[j] + channel, width) + sum : sum, width);
          };
          for (int64_t j = from; j < stop; j++) put(j);
          if (from) return;
          to_bias[i] += d;
          for (int64_t j = 0; j < count; j++) to_weight[j][i] += d * x[j];
        });
        t++;
      }
      for (int64_t i = 0; s.dinitial_state && first == 0 && i < s.channels * before; i++)
        ((T*)s.dinitial_state)[b * s.channels * before + i] = dinitial[(b * before + i % before) * s.channels + i / before];
    });
    add(thread, dweight, dbias);
  }
  // Moves sums to the thread's own.
  void add(int64_t thread, Row* dweight, Row& dbias) const {
    for (int64_t c = 0; c < s.channels; c++) {
      double* sums = (double*)s.dweight + (thread * s.channels + c) * s.width;
      for (int64_t j = 0; j < s.width; j++) sums[s.width - 1 - j] += dweight[j][c / L][c % L];
      if (s.dbias) ((double*)s.dbias)[thread * s.channels + c] += dbias[c / L][c % L];
    }
    for (int64_t j = 0; j < s.width; j++) std::fill(dweight[j].begin(), dweight[j].end(), Vt{});
    std::fill(dbias.begin(), dbias.end(), Vt{});
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
