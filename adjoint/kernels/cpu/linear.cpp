// h_t = a_t h_{t-1} + b_t with a diagonal a, or one number a token, on the CPU: forward and adjoint.
// The caller keeps all states: they are as small as the inputs.
#include "linear.h"

namespace {
template <class T> struct Linear {
  typedef V<T> Vt;
  static constexpr int L = Vec<T>::L;
  const LinearArgs& s;
  T* at(void* p, int64_t b, int64_t t, int64_t width) const { return (T*)p + (b * s.seqlen + t) * width; }

  ALWAYS_INLINE Vt decay(int64_t b, int64_t t, int64_t n, int width) const {
    const T* a = at(s.a, b, t, s.a_width);
    return s.a_width == 1 ? splat<T>(*a) : load<T>(a + n, width);
  }
  // a x, but 0 where a is: nothing is carried to where a document begins, no NaN either.
  static ALWAYS_INLINE Vt times(Vt a, Vt x) { return a == 0 ? Vt{} : a * x; }
  template <class F> void each(int64_t thread, F body) const {  // (batch, lanes) units of this thread
    const int64_t blocks = (s.d_state + L - 1) / L, units = s.batch * blocks;
    for (int64_t i = units * thread / s.threads; i < units * (thread + 1) / s.threads; i++) {
      const int64_t n = i % blocks * L;
      body(i / blocks, i % blocks, n, int(s.d_state - n < L ? s.d_state - n : L));
    }
  }
  void forward(int64_t thread) const {
    each(thread, [&](int64_t b, int64_t, int64_t n, int width) {
      Vt h = s.initial_state ? load<T>((T*)s.initial_state + b * s.d_state + n, width) : Vt{};
      for (int64_t t = 0; t < s.seqlen; t++) {
        h = times(decay(b, t, n, width), h) + load<T>(at(s.b, b, t, s.d_state) + n, width);
        store<T>(at(s.h, b, t, s.d_state) + n, h, width);
      }
    });
  }
  void backward(int64_t thread) const {
    const int64_t T_ = s.seqlen, W = s.window, owned = T_ - s.halo;
    each(thread, [&](int64_t b, int64_t block, int64_t n, int width) {
      std::vector<Vt> prefix(W ? T_ : 0);  // prefix sums inside each block of W tokens
      Vt P{}, Q{};
      if (W)
        for (int64_t t = 0; t < T_; t++) {
          const Vt g = load<T>(at(s.dh, b, t, s.d_state) + n, width);
          if (t % W == 0) { Q = splat<T>(1); P = g; }
          else { Q = Q == 0 ? Vt{} : times(decay(b, t, n, width), Q); P += times(Q, g); }
          prefix[t] = P;
        }
      Vt R{}, S{};
      for (int64_t t = T_ - 1; t >= 0; t--) {
        const Vt g = load<T>(at(s.dh, b, t, s.d_state) + n, width), a = decay(b, t, n, width);
        const bool closes = W && (t % W == W - 1 || t == T_ - 1), opens = W && t % W == 0;
        Vt mu = closes ? g : R + g;
        R = times(a, mu);
        if (W) {
          if (!opens && (t / W + 1) * W < T_) mu += times(S, prefix[t + W - 1 < T_ ? t + W - 1 : T_ - 1]);
          S = opens ? a : times(a, S);
        }
        if (t >= owned) mu = Vt{};
        Vt before{};
        if (t) before = load<T>(at(s.h, b, t - 1, s.d_state) + n, width);
        else if (s.initial_state) before = load<T>((T*)s.initial_state + b * s.d_state + n, width);
        store<T>(at(s.db, b, t, s.d_state) + n, mu, width);
        if (s.a_width == 1) at(s.da, b, t, (s.d_state + L - 1) / L)[block] = lane_sum(mu * before);
        else store<T>(at(s.da, b, t, s.d_state) + n, mu * before, width);
      }
      if (W) R = W == 1 ? Vt{} : times(S, prefix[W - 2 < T_ ? W - 2 : T_ - 1]);
      store<T>((T*)s.dinitial_state + b * s.d_state + n, R, width);
    });
  }
};

template <class T> void run_linear(const LinearArgs& s, bool backward) {
  Linear<T> scan{s};
  parallel(s.threads, [&](int64_t i) { backward ? scan.backward(i) : scan.forward(i); });
}
}  // namespace

extern "C" {
void adjoint_linear_f32(const LinearArgs* s, int backward) { run_linear<float>(*s, backward); }
void adjoint_linear_f64(const LinearArgs* s, int backward) { run_linear<double>(*s, backward); }
}
