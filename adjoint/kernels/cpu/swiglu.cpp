// A gated product, forward and backward, with p = sigmoid(z):
//   y = silu(z) v,   dz = d v p (1 + z (1 - p)),   dv = d z p
#include "lanes.h"

struct SwigluArgs {
  int64_t rows, width, threads;
  void *gate, *value, *d, *y, *d_gate, *d_value;  // d_gate may be d
  int64_t gate_stride, value_stride, d_stride;    // from row to row; y, d_gate and d_value are contiguous
};

namespace {
template <class T> void rows_of(const SwigluArgs& s, bool backward, int64_t thread) {
  for (int64_t i = s.rows * thread / s.threads; i < s.rows * (thread + 1) / s.threads; i++) {
    const T *gate = (const T*)s.gate + i * s.gate_stride, *value = (const T*)s.value + i * s.value_stride;
    each_vector<T>(s.width, 0, (s.width + Vec<T>::L - 1) / Vec<T>::L, [&](int64_t, int64_t c, int n) {
      const V<T> z = load<T>(gate + c, n), v = load<T>(value + c, n), p = sigmoidv<T>(z);
      if (!backward) {
        store<T>((T*)s.y + i * s.width + c, z * p * v, n);
        return;
      }
      const V<T> d = load<T>((const T*)s.d + i * s.d_stride + c, n);
      store<T>((T*)s.d_value + i * s.width + c, d * z * p, n);
      store<T>((T*)s.d_gate + i * s.width + c, d * v * p * (1 + z * (1 - p)), n);
    });
  }
}

template <class T> void run_swiglu(const SwigluArgs& s, bool backward) {
  parallel(s.threads, [&](int64_t i) { rows_of<T>(s, backward, i); });
}
}  // namespace

extern "C" {
void adjoint_swiglu_f32(const SwigluArgs* s, int backward) { run_swiglu<float>(*s, backward); }
void adjoint_swiglu_f64(const SwigluArgs* s, int backward) { run_swiglu<double>(*s, backward); }
}
