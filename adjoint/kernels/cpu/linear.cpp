// h_t = a_t h_{t-1} + b_t with a diagonal a, or one number a token, on the CPU: forward and adjoint.
// The caller keeps all states: they are as small as the inputs. A thread takes a range of states and walks token by
// token over all of them: tensors are read and written in their order, and the states between are in cache. Where decays
// are near 1, the state that goes on, and its cotangent, are in double: the rounding of floats would add up over all tokens.
#include "linear.h"

#include <algorithm>

namespace {
constexpr int64_t STRETCH = 64;  // tokens of which one's decays say whether states last

template <class T> struct Linear {
  typedef V<T> Vt;
  static constexpr int L = Vec<T>::L;
  const LinearArgs& s;
  int64_t blocks() const { return (s.d_state + L - 1) / L; }
  T* at(void* p, int64_t b, int64_t t, int64_t width) const { return (T*)p + (b * s.seqlen + t) * width; }

  // Rows are found once a token: a store might change `s`, for all that the compiler knows.
  struct Decay {
    const T* a;
    const bool scalar;
    ALWAYS_INLINE Vt operator()(int64_t n, int width) const { return scalar ? splat<T>(*a) : load<T>(a + n, width); }
  };
  Decay decay(int64_t b, int64_t t) const { return {at(s.a, b, t, s.a_width), s.a_width == 1}; }
  // a x, but 0 where a is: nothing is carried to where a document begins, no NaN either.
  static ALWAYS_INLINE Vt times(Vt a, Vt x) { return a == 0 ? Vt{} : a * x; }
  static ALWAYS_INLINE Vt add_decayed(Vt a, Vt x, Vt y) { return a * (a == 0 ? Vt{} : x) + y; }
  static ALWAYS_INLINE void decay_and_add(InDouble<T>& x, Vt a, Vt y) {
    const InDouble<T> decay = in_double<T>(a), input = in_double<T>(y);
    for (int i = 0; i < InDouble<T>::PARTS; i++) {
      const V<double> factor = decay.part[i];
      x.part[i] = factor * (factor == 0 ? V<double>{} : x.part[i]) + input.part[i];
    }
  }
  // body(b, first block, end) for this thread's share of (batch, blocks)
  template <class F> void each(int64_t thread, F body) const {
    const int64_t units = s.batch * blocks(), end = units * (thread + 1) / s.threads;
    for (int64_t i = units * thread / s.threads; i < end;) {
      const int64_t b = i / blocks(), first = i % blocks(), stop = std::min(first + end - i, blocks());
      body(b, first, stop);
      i += stop - first;
    }
  }
  // body(block, counted from the first, its first state, how many)
  template <class F> ALWAYS_INLINE void row(int64_t first, int64_t stop, F body) const {
    each_vector<T>(s.d_state, first, stop, [=](int64_t i, int64_t n, int width) { body(i - first, n, width); });
  }
  // Whether a state may be the sum of thousands of tokens, by token t's decays.
  bool states_last(int64_t b, int64_t t, int64_t first, int64_t stop) const {
    if (sizeof(T) == sizeof(double)) return false;
    VI<T> near_1{}, *all = &near_1;
    row(first, stop, [=, a = decay(b, t)](int64_t, int64_t n, int width) {
      const Vt x = a(n, width), size = x < 0 ? -x : x;
      *all |= (size > T(1 - 1.0 / 2048)) & (size <= 1);
    });
    for (int l = 0; l < L; l++)
      if (near_1[l]) return true;
    return false;
  }
  void forward(int64_t thread) const {
    const std::vector<T> zeros(s.initial_state ? 0 : s.d_state);
    each(thread, [&](int64_t b, int64_t first, int64_t stop) {
      const T* before = s.initial_state ? (const T*)s.initial_state + b * s.d_state : zeros.data();
      std::vector<InDouble<T>> carried(stop - first);
      InDouble<T>* state = carried.data();
      bool last = false;
      for (int64_t t = 0; t < s.seqlen; t++) {
        const bool lasted = last;
        if (t % STRETCH == 0) last = states_last(b, t, first, stop);
        if (last && !lasted)
          row(first, stop, [=](int64_t i, int64_t n, int width) { state[i] = in_double<T>(load<T>(before + n, width)); });
        T *h = at(s.h, b, t, s.d_state), *x = at(s.b, b, t, s.d_state);
        if (last)
          row(first, stop, [=, a = decay(b, t)](int64_t i, int64_t n, int width) {
            decay_and_add(state[i], a(n, width), load<T>(x + n, width));
            store<T>(h + n, rounded<T>(state[i]), width);
          });
        else
          row(first, stop, [=, a = decay(b, t)](int64_t, int64_t n, int width) {
            store<T>(h + n, add_decayed(a(n, width), load<T>(before + n, width), load<T>(x + n, width)), width);
          });
        before = h;
      }
    });
  }
  template <bool WINDOWED> void backward(int64_t thread) const {
    const int64_t T_ = s.seqlen, W = s.window, owned = T_ - s.halo;
    const std::vector<T> zeros(s.initial_state ? 0 : s.d_state);
    each(thread, [&](int64_t b, int64_t first, int64_t stop) {
      const int64_t count = stop - first;
      // prefix sums inside each block of W tokens
      std::vector<Vt> carried(count), cuts(WINDOWED ? count : 0), prefix(WINDOWED ? T_ * count : 0);
      std::vector<InDouble<T>> carried_in_double(count);
      Vt *R = carried.data(), *S = cuts.data();  // mu of the next token without what joins it
      InDouble<T>* wide = carried_in_double.data();
      bool last = false;
      const auto sums = [&](int64_t t) { return prefix.data() + std::max<int64_t>(std::min(t, T_ - 1), 0) * count; };
      for (int64_t t = 0; t < T_ && WINDOWED; t++)
        row(first, stop, [=, opens = t % W == 0, dh = at(s.dh, b, t, s.d_state), a = decay(b, t), sum = sums(t)](
                             int64_t i, int64_t n, int width) {
          const Vt g = load<T>(dh + n, width);
          S[i] = opens ? splat<T>(1) : S[i] == 0 ? Vt{} : times(a(n, width), S[i]);
          sum[i] = opens ? g : sum[i - count] + times(S[i], g);
        });
      std::fill(cuts.begin(), cuts.end(), Vt{});
      for (int64_t t = T_ - 1; t >= 0; t--) {
        const bool lasted = last;
        if (t == T_ - 1 || t % STRETCH == STRETCH - 1) last = states_last(b, t, first, stop);
        if (last && !lasted) row(first, stop, [=](int64_t i, int64_t, int) { wide[i] = in_double<T>(R[i]); });
        const bool opens = WINDOWED && t % W == 0, closes = t == T_ - 1 || (WINDOWED && t % W == W - 1);
        const bool joined = WINDOWED && !opens && (t / W + 1) * W < T_, own = t < owned, scalar = s.a_width == 1;
        const int64_t ahead = t > 1 ? s.d_state : 0;  // to the next row: the processor does not expect rows in reverse
        const T *dh = at(s.dh, b, t, s.d_state), *before = zeros.data();
        if (t) before = at(s.h, b, t - 1, s.d_state);
        else if (s.initial_state) before = (const T*)s.initial_state + b * s.d_state;
        T *db = at(s.db, b, t, s.d_state), *da = at(s.da, b, t, scalar ? blocks() : s.d_state) + (scalar ? first : 0);
        const auto token = [&](auto lasts) { row(first, stop, [=, decay = decay(b, t), next = decay(b, t + !closes), sum = sums(t + W - 1)](int64_t i, int64_t n, int width) {
          const Vt g = load<T>(dh + n, width), a = decay(n, width);
          __builtin_prefetch(dh + n - ahead), __builtin_prefetch(before + n - ahead);
          if (scalar) __builtin_prefetch(db + n - ahead, 1);
          else __builtin_prefetch(decay.a + n);
          if (!lasts) R[i] = closes ? g : add_decayed(next(n, width), R[i], g);
          else if (closes) wide[i] = in_double<T>(g), R[i] = g;
          else decay_and_add(wide[i], next(n, width), g), R[i] = rounded<T>(wide[i]);
          Vt mu = R[i];
          if (WINDOWED) {
            if (joined) mu += times(S[i], sum[i]);
            S[i] = opens ? a : times(a, S[i]);
          }
          if (!own) mu = Vt{};
          store<T>(db + n, mu, width);
          if (scalar) da[i] = lane_sum(mu * load<T>(before + n, width));
          else store<T>(da + n, mu * load<T>(before + n, width), width);
        }); };
        if (last) token(std::true_type());
        else token(std::false_type());
      }
      row(first, stop, [=, a = decay(b, 0), sum = sums(W - 2), to = (T*)s.dinitial_state + b * s.d_state](int64_t i, int64_t n, int width) {
        store<T>(to + n, !WINDOWED ? times(a(n, width), R[i]) : W == 1 ? Vt{} : times(S[i], sum[i]), width);
      });
    });
  }
};

template <class T> void run_linear(const LinearArgs& s, bool backward) {
  Linear<T> scan{s};
  parallel(s.threads, [&](int64_t i) {
    if (!backward) scan.forward(i);
    else if (s.window) scan.template backward<true>(i);
    else scan.template backward<false>(i);
  });
}
}  // namespace

extern "C" {
void adjoint_linear_f32(const LinearArgs* s, int backward) { run_linear<float>(*s, backward); }
void adjoint_linear_f64(const LinearArgs* s, int backward) { run_linear<double>(*s, backward); }
}
