// RMSNorm over groups of channels, optionally of a sum and gated, forward and backward:
//   s = x + residual or x,   v = s silu(gate) or s,   y = weight v r,   r = 1 / sqrt(mean(v^2) + eps)
//   with e = dy weight and n = v r:   dv = r (e - n mean(e n)),   dweight = sum over rows of dy n
#include <cmath>

#include "lanes.h"

struct NormArgs {
  int64_t rows, width, group, threads;
  double eps;
  // x is s in the backward; rstd (rows, groups); residual and, with it, s may be null; so may gate
  void *x, *residual, *gate, *weight, *y, *s, *rstd;
  int64_t x_stride, residual_stride, gate_stride;  // from row to row; y and s are contiguous
  void *dy, *ds, *dx, *dgate, *dweight;            // ds may be null; dweight (threads, width), double, zeroed by the caller
  int64_t dy_stride, ds_stride, dx_stride, dgate_stride;
};

namespace {
template <class T> struct Norm {
  typedef V<T> Vt;
  static constexpr int L = Vec<T>::L;
  const NormArgs& s;

  // body(channel, lanes): the channels of one group, a vector at a time
  template <class F> ALWAYS_INLINE void each(int64_t group, F body) const {
    const int64_t begin = group * s.group, end = begin + s.group;
    for (int64_t c = begin; c < end; c += L) body(c, int(end - c < L ? end - c : L));
  }
  ALWAYS_INLINE const T* at(const void* p, int64_t row, int64_t stride) const { return (const T*)p + row * stride; }
  ALWAYS_INLINE Vt gated(Vt v, const T* gate, int64_t c, int n) const {
    if (gate) {
      const Vt g = load<T>(gate + c, n);
      v *= g * sigmoidv<T>(g);
    }
    return v;
  }

  void forward(int64_t thread) const {
    const int64_t groups = s.width / s.group;
    for (int64_t i = s.rows * thread / s.threads; i < s.rows * (thread + 1) / s.threads; i++) {
      const T *x = at(s.x, i, s.x_stride), *gate = s.gate ? at(s.gate, i, s.gate_stride) : nullptr;
      const T* residual = s.residual ? at(s.residual, i, s.residual_stride) : nullptr;
      T *y = (T*)s.y + i * s.width, *total = residual ? (T*)s.s + i * s.width : nullptr;
      // where the second loop finds v: the gate is computed once, and kept where the result goes
      const T* kept = gate ? y : residual ? total : x;
      for (int64_t g = 0; g < groups; g++) {
        Vt sum{};
        each(g, [&](int64_t c, int n) {
          Vt v = load<T>(x + c, n);
          if (residual) {
            v += load<T>(residual + c, n);
            store<T>(total + c, v, n);
          }
          v = gated(v, gate, c, n);
          sum += v * v;
          if (gate) store<T>(y + c, v, n);
        });
        const T r = T(1 / std::sqrt(double(lane_sum(sum)) / s.group + s.eps));
        ((T*)s.rstd)[i * groups + g] = r;
        each(g, [&](int64_t c, int n) {
          const Vt v = load<T>(kept + c, n);
          store<T>(y + c, load<T>((const T*)s.weight + c, n) * (v * r), n);
        });
      }
    }
  }
  void backward(int64_t thread) const {
    const int64_t groups = s.width / s.group;
    std::vector<T> dweight(s.width);                 // of the last rows
    std::vector<T> sigmoids(s.gate ? s.width : 0);  // of a row's gates
    const int64_t first = s.rows * thread / s.threads, end = s.rows * (thread + 1) / s.threads;
    for (int64_t i = first; i < end; i++) {
      const T *x = at(s.x, i, s.x_stride), *gate = s.gate ? at(s.gate, i, s.gate_stride) : nullptr;
      const T *dy = at(s.dy, i, s.dy_stride), *weight = (const T*)s.weight;
      const T* ds = s.ds ? at(s.ds, i, s.ds_stride) : nullptr;
      T *dx = (T*)s.dx + i * s.dx_stride, *dgate = gate ? (T*)s.dgate + i * s.dgate_stride : nullptr;
      for (int64_t g = 0; g < groups; g++) {
        const T r = ((const T*)s.rstd)[i * groups + g];
        Vt sum{};
        each(g, [&](int64_t c, int n) {
          Vt v = load<T>(x + c, n);
          if (gate) {
            const Vt z = load<T>(gate + c, n), sig = sigmoidv<T>(z);
            store<T>(&sigmoids[c], sig, n);
            v *= z * sig;
          }
          const Vt d = load<T>(dy + c, n);
          sum += d * load<T>(weight + c, n) * v;
          store<T>(&dweight[c], load<T>(&dweight[c], n) + d * (v * r), n);
        });
        const T mean = lane_sum(sum) * r / s.group;
        each(g, [&](int64_t c, int n) {
          const Vt a = load<T>(x + c, n), e = load<T>(dy + c, n) * load<T>(weight + c, n);
          const Vt further = ds ? load<T>(ds + c, n) : Vt{};
          if (!gate) {
            store<T>(dx + c, r * (e - a * (r * mean)) + further, n);
            return;
          }
          const Vt z = load<T>(gate + c, n), sig = load<T>(&sigmoids[c], n), silu = z * sig;
          const Vt dv = r * (e - a * silu * (r * mean));
          store<T>(dx + c, dv * silu + further, n);
          store<T>(dgate + c, dv * a * sig * (1 + z * (1 - sig)), n);
        });
      }
      if ((i + 1 - first) % SUMMED_TOGETHER && i + 1 < end) continue;
      each_vector<T>(s.width, 0, (s.width + L - 1) / L, [&](int64_t, int64_t c, int n) {
        add_to<T>((double*)s.dweight + thread * s.width + c, load<T>(&dweight[c], n), n);
        store<T>(&dweight[c], Vt{}, n);
      });
    }
  }
};

template <class T> void run_norm(const NormArgs& s, bool backward) {
  Norm<T> norm{s};
  parallel(s.threads, [&](int64_t i) { backward ? norm.backward(i) : norm.forward(i); });
}
}  // namespace

extern "C" {
void adjoint_norm_f32(const NormArgs* s, int backward) { run_norm<float>(*s, backward); }
void adjoint_norm_f64(const NormArgs* s, int backward) { run_norm<double>(*s, backward); }
}
