// h_t = a_t h_{t-1} + b_t with a diagonal (or one number a token) or dense A, on the CPU: forward and adjoint.
// The caller keeps all states: they are as small as the inputs. Unwindowed; windows take the reference path for dense A.
#include "cpu_lanes.h"

struct LinearArgs {
  int64_t batch, seqlen, d_state, a_width, threads, window, halo;  // a_width: d_state, 1, or d_state^2 (dense)
  void *a, *b, *initial_state, *h;  // contiguous; the caller has zeroed a at resets
  void *dh, *da, *db, *dinitial_state;
};

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
        h = decay(b, t, n, width) * h + load<T>(at(s.b, b, t, s.d_state) + n, width);
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
          else { Q *= decay(b, t, n, width); P += Q * g; }
          prefix[t] = P;
        }
      Vt R{}, S{};
      for (int64_t t = T_ - 1; t >= 0; t--) {
        const Vt g = load<T>(at(s.dh, b, t, s.d_state) + n, width), a = decay(b, t, n, width);
        const bool closes = W && (t % W == W - 1 || t == T_ - 1), opens = W && t % W == 0;
        Vt mu = closes ? g : R + g;
        R = a * mu;
        if (W) {
          if (!opens && (t / W + 1) * W < T_) mu += S * prefix[t + W - 1 < T_ ? t + W - 1 : T_ - 1];
          S = opens ? a : a * S;
        }
        if (t >= owned) mu = Vt{};
        Vt before{};
        if (t) before = load<T>(at(s.h, b, t - 1, s.d_state) + n, width);
        else if (s.initial_state) before = load<T>((T*)s.initial_state + b * s.d_state + n, width);
        store<T>(at(s.db, b, t, s.d_state) + n, mu, width);
        if (s.a_width == 1) at(s.da, b, t, (s.d_state + L - 1) / L)[block] = lane_sum(mu * before);
        else store<T>(at(s.da, b, t, s.d_state) + n, mu * before, width);
      }
      if (W) R = W == 1 ? Vt{} : S * prefix[W - 2 < T_ ? W - 2 : T_ - 1];
      store<T>((T*)s.dinitial_state + b * s.d_state + n, R, width);
    });
  }

  // Dense: one sequence of matrix-vector products a batch entry.
  void dense_forward(int64_t thread) const {
    const int64_t N = s.d_state;
    std::vector<T> h(N), next(N);
    for (int64_t b = thread; b < s.batch; b += s.threads) {
      for (int64_t n = 0; n < N; n++) h[n] = s.initial_state ? ((T*)s.initial_state)[b * N + n] : T(0);
      for (int64_t t = 0; t < s.seqlen; t++) {
        const T *A = at(s.a, b, t, N * N), *x = at(s.b, b, t, N);
        for (int64_t i = 0; i < N; i++) {
          T sum = 0;
          for (int64_t j = 0; j < N; j++) sum += A[i * N + j] * h[j];
          next[i] = sum + x[i];
        }
        h.swap(next);
        std::memcpy(at(s.h, b, t, N), h.data(), N * sizeof(T));
      }
    }
  }
  void dense_backward(int64_t thread) const {
    const int64_t N = s.d_state, owned = s.seqlen - s.halo;
    std::vector<T> mu(N), carry(N), zero(N);
    for (int64_t b = thread; b < s.batch; b += s.threads) {
      std::fill(carry.begin(), carry.end(), T(0));
      for (int64_t t = s.seqlen - 1; t >= 0; t--) {
        const T *A = at(s.a, b, t, N * N), *g = at(s.dh, b, t, N);
        const T* before = t ? at(s.h, b, t - 1, N) : s.initial_state ? (T*)s.initial_state + b * N : zero.data();
        T *dA = at(s.da, b, t, N * N), *db = at(s.db, b, t, N);
        for (int64_t i = 0; i < N; i++) mu[i] = carry[i] + g[i];
        std::fill(carry.begin(), carry.end(), T(0));
        for (int64_t i = 0; i < N; i++) {
          const T m = t < owned ? mu[i] : T(0);
          db[i] = m;
          for (int64_t j = 0; j < N; j++) {
            dA[i * N + j] = m * before[j];
            carry[j] += A[i * N + j] * mu[i];
          }
        }
      }
      std::memcpy((T*)s.dinitial_state + b * N, carry.data(), N * sizeof(T));
    }
  }
};

template <class T> void run_linear(const LinearArgs& s, bool dense, bool backward) {
  Linear<T> scan{s};
  parallel(s.threads, [&](int64_t i) {
    if (dense) backward ? scan.dense_backward(i) : scan.dense_forward(i);
    else backward ? scan.backward(i) : scan.forward(i);
  });
}
}  // namespace

extern "C" {
void adjoint_linear_f32(const LinearArgs* s, int dense, int backward) { run_linear<float>(*s, dense, backward); }
void adjoint_linear_f64(const LinearArgs* s, int dense, int backward) { run_linear<double>(*s, dense, backward); }
}
