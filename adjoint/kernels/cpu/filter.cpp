// Causal depthwise convolution with long filters, (batch, seqlen, channels) layout:
//   y_t = sum_j weight[:, j] x_{t - width + 1 + j}
// Inputs before the chunk come from `initial_state` (batch, channels, width - 1), oldest first.
//
// A thread takes tiles of tokens. For a vector of channels it copies a tile's rows, and those that its taps reach, next to each
// other: rows in memory are a power of two apart, and would push each other out of the cache. Outputs, and both gradients, are
// then the same correlation of two short arrays, by blocks of 8 outputs and 4 taps in registers.
#include "lanes.h"

#include <algorithm>

struct FilterArgs {
  int64_t batch, seqlen, channels, width, threads;
  void* x;
  int64_t x_batch_stride, x_time_stride;
  void *weight, *initial_state, *y;  // (channels, width); y contiguous
  uint8_t* reset;                    // (batch, seqlen) or null: no tap reaches before such a token
  void* dy;
  int64_t dy_batch_stride, dy_time_stride;
  void *dx, *dweight, *dinitial_state;  // dweight (threads, channels, width): double, zeroed; dinitial_state zeroed
};

namespace {
constexpr int64_t TILE = 256;      // tokens
constexpr int OUTPUTS = 8, TAPS = 4;

// out_i += sum_k a_k b_{i+k} for k < n and i < m; out and b have room for m rounded up to a multiple of 8.
template <class Vt> NEVER_INLINE void correlate(const Vt* a, int64_t n, const Vt* b, Vt* out, int64_t m) {
  for (int64_t i = 0; i < m; i += OUTPUTS) {
    Vt sums[OUTPUTS];
    for (int o = 0; o < OUTPUTS; o++) sums[o] = out[i + o];
    const Vt* row = b + i;
    int64_t k = 0;
    for (; k + TAPS <= n; k += TAPS) {
      Vt in[OUTPUTS + TAPS - 1], tap[TAPS];
      for (int r = 0; r < OUTPUTS + TAPS - 1; r++) in[r] = row[k + r];
      for (int j = 0; j < TAPS; j++) tap[j] = a[k + j];
      for (int j = 0; j < TAPS; j++)
        for (int o = 0; o < OUTPUTS; o++) sums[o] += tap[j] * in[o + j];
    }
    for (; k < n; k++)
      for (int o = 0; o < OUTPUTS; o++) sums[o] += a[k] * row[k + o];
    for (int o = 0; o < OUTPUTS; o++) out[i + o] = sums[o];
  }
}

template <class T> struct Filter {
  typedef V<T> Vt;
  static constexpr int L = Vec<T>::L;
  const FilterArgs& s;
  int64_t reach() const { return s.width - 1; }
  int64_t blocks() const { return (s.channels + L - 1) / L; }
  int64_t tiles() const { return (s.seqlen + TILE - 1) / TILE; }
  int width_of(int64_t block) const { return int(std::min<int64_t>(L, s.channels - block * L)); }
  bool begins(int64_t b, int64_t t) const { return s.reset && s.reset[b * s.seqlen + t]; }

  // Tokens [first, end) of one document in one tile. Taps reach tokens from `low` on, negative ones in the initial state;
  // tokens before `high` read these.
  struct Run {
    int64_t b, first, end, low, high;
  };
  template <class F> void each_run(int64_t thread, F body) const {
    const int64_t units = s.batch * tiles();
    for (int64_t i = units * thread / s.threads; i < units * (thread + 1) / s.threads; i++) {
      const int64_t b = i / tiles(), stop = std::min(s.seqlen, (i % tiles() + 1) * TILE);
      for (int64_t first = i % tiles() * TILE, end; first < stop; first = end) {
        for (end = first + 1; end < stop && !begins(b, end);) end++;
        int64_t low = first, high = end;
        while (low > first - reach() && low > 0 && !begins(b, low)) low--;
        if (low == 0 && !begins(b, 0)) low = -reach();
        while (high < end + reach() && high < s.seqlen && !begins(b, high)) high++;
        body(Run{b, first, end, std::max(low, first - reach()), high});
      }
    }
  }
  // Copies the inputs of tokens [first - reach, end) of a vector of channels.
  void copy_inputs(const Run& run, int64_t block, Vt* to) const {
    const int width = width_of(block);
    for (int64_t t = run.first - reach(); t < run.end; t++, to++) {
      *to = Vt{};
      if (t >= 0 && t >= run.low) *to = load<T>((const T*)s.x + run.b * s.x_batch_stride + t * s.x_time_stride + block * L, width);
      else if (t >= run.low && s.initial_state)
        for (int l = 0; l < width; l++)
          (*to)[l] = ((const T*)s.initial_state)[(run.b * s.channels + block * L + l) * reach() + t + reach()];
    }
  }
  std::vector<Vt> taps(int64_t block, bool newest_first) const {
    std::vector<Vt> w(s.width);
    for (int64_t j = 0; j < s.width; j++)
      for (int l = 0; l < width_of(block); l++)
        w[newest_first ? s.width - 1 - j : j][l] = ((const T*)s.weight)[(block * L + l) * s.width + j];
    return w;
  }
  std::vector<Vt> room(int64_t tokens) const { return std::vector<Vt>(tokens + OUTPUTS + TAPS); }

  void forward(int64_t thread) const {
    std::vector<std::vector<Vt>> weights;
    for (int64_t block = 0; block < blocks(); block++) weights.push_back(taps(block, false));
    std::vector<Vt> inputs = room(TILE + reach()), outputs = room(TILE);
    each_run(thread, [&](const Run& run) {
      const int64_t tokens = run.end - run.first;
      for (int64_t block = 0; block < blocks(); block++) {
        copy_inputs(run, block, inputs.data());
        std::fill(outputs.begin(), outputs.end(), Vt{});
        correlate(weights[block].data(), s.width, inputs.data(), outputs.data(), tokens);
        for (int64_t i = 0; i < tokens; i++)
          store<T>((T*)s.y + (run.b * s.seqlen + run.first + i) * s.channels + block * L, outputs[i], width_of(block));
      }
    });
  }
  void backward(int64_t thread) const {
    std::vector<std::vector<Vt>> weights;
    for (int64_t block = 0; block < blocks(); block++) weights.push_back(taps(block, true));
    std::vector<Vt> inputs = room(TILE + reach()), cotangents = room(TILE + 2 * reach()), leaving = room(TILE + reach());
    std::vector<Vt> to_weight = room(s.width);
    each_run(thread, [&](const Run& run) {
      const int64_t tokens = run.end - run.first;
      // with the first tokens go those of the state, whose inputs get their gradients like any other
      const int64_t earlier = run.first == 0 && run.low < 0 ? reach() : 0;
      for (int64_t block = 0; block < blocks(); block++) {
        const int width = width_of(block);
        copy_inputs(run, block, inputs.data());
        Vt* dy = cotangents.data() + earlier;
        std::fill(cotangents.begin(), cotangents.end(), Vt{});
        for (int64_t i = 0; i < run.high - run.first; i++)
          dy[i] = load<T>((const T*)s.dy + run.b * s.dy_batch_stride + (run.first + i) * s.dy_time_stride + block * L, width);
        std::fill(leaving.begin(), leaving.end(), Vt{});
        correlate(weights[block].data(), s.width, cotangents.data(), leaving.data(), earlier + tokens);
        for (int64_t i = 0; i < tokens; i++)
          store<T>((T*)s.dx + (run.b * s.seqlen + run.first + i) * s.channels + block * L, leaving[earlier + i], width);
        for (int64_t i = 0; i < earlier; i++)
          for (int l = 0; l < width; l++)
            ((T*)s.dinitial_state)[(run.b * s.channels + block * L + l) * reach() + i] = leaving[i][l];
        std::fill(to_weight.begin(), to_weight.end(), Vt{});
        correlate(dy, tokens, inputs.data(), to_weight.data(), s.width);
        double* sums = (double*)s.dweight + (thread * s.channels + block * L) * s.width;
        for (int64_t j = 0; j < s.width; j++)
          for (int l = 0; l < width; l++) sums[l * s.width + j] += double(to_weight[j][l]);
      }
    });
  }
};

template <class T> void run_filter(const FilterArgs& s, bool backward) {
  Filter<T> filter{s};
  parallel(s.threads, [&](int64_t i) { backward ? filter.backward(i) : filter.forward(i); });
}
}  // namespace

extern "C" {
void adjoint_filter_f32(const FilterArgs* s, int backward) { run_filter<float>(*s, backward); }
void adjoint_filter_f64(const FilterArgs* s, int backward) { run_filter<double>(*s, backward); }
}
