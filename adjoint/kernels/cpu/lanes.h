// One 512-bit vector of channels ("lanes") and the three functions the scans need on it.
// GCC/Clang vector extensions: the compiler lowers them to AVX-512, AVX2 or NEON. The exponential alone has an AVX-512 form of its own.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

template <class T> struct Bits;
template <> struct Bits<float> { typedef int32_t Int; };
template <> struct Bits<double> { typedef int64_t Int; };

template <class T> struct Vec {
  static constexpr int L = 64 / sizeof(T);
  typedef T V __attribute__((vector_size(64)));
  typedef typename Bits<T>::Int I __attribute__((vector_size(64)));
};
template <class T> using V = typename Vec<T>::V;
template <class T> using VI = typename Vec<T>::I;

template <class T> ALWAYS_INLINE V<T> splat(T x) { return x - V<T>{}; }

// Channels past `width` (the tail of d_inner) read as zero and are never written.
template <class T> ALWAYS_INLINE V<T> load(const T* p, int width) {
  V<T> v{};
  if (width == Vec<T>::L) std::memcpy(&v, p, 64);
  else std::memcpy(&v, p, width * sizeof(T));
  return v;
}
template <class T> ALWAYS_INLINE void store(T* p, V<T> v, int width) {
  if (width == Vec<T>::L) std::memcpy(p, &v, 64);
  else std::memcpy(p, &v, width * sizeof(T));
}
// Halving sums: a serial one would cost as much as the arithmetic it follows.
ALWAYS_INLINE float lane_sum(V<float> v) {
  typedef float V8 __attribute__((vector_size(32)));
  typedef float V4 __attribute__((vector_size(16)));
  V8 a[2];
  std::memcpy(a, &v, 64);
  a[0] += a[1];
  V4 b[2];
  std::memcpy(b, a, 32);
  b[0] += b[1];
  return (b[0][0] + b[0][2]) + (b[0][1] + b[0][3]);
}
ALWAYS_INLINE double lane_sum(V<double> v) {
  typedef double V4 __attribute__((vector_size(32)));
  V4 a[2];
  std::memcpy(a, &v, 64);
  a[0] += a[1];
  return (a[0][0] + a[0][2]) + (a[0][1] + a[0][3]);
}

// 2^r on [-1/2, 1/2]: Chebyshev interpolation; relative error 2.5e-9 (float), 6e-20 (double).
ALWAYS_INLINE V<float> exp2_poly(V<float> r) {
  V<float> p = splat<float>(1.54614446985691e-4f);
  p = p * r + 1.34004281776158379e-3f;
  p = p * r + 9.61805667852463808e-3f;
  p = p * r + 5.55032722667030206e-2f;
  p = p * r + 2.40226509222887581e-1f;
  p = p * r + 6.93147206702832596e-1f;
  return p * r + 1.0f;
}
ALWAYS_INLINE V<double> exp2_poly(V<double> r) {
  V<double> p = splat<double>(2.57335683087568912e-11);
  p = p * r + 4.45667534104920588e-10;
  p = p * r + 7.05489438634834804e-9;
  p = p * r + 1.0178051192960649e-7;
  p = p * r + 1.3215486815999977e-6;
  p = p * r + 1.52527338562934664e-5;
  p = p * r + 1.54035303933627553e-4;
  p = p * r + 1.33335581463903528e-3;
  p = p * r + 9.61812910762848305e-3;
  p = p * r + 5.5504108664821699e-2;
  p = p * r + 2.40226506959100712e-1;
  p = p * r + 6.93147180559945308e-1;
  return p * r + 1.0;
}
template <class T> struct Exp2Range;
template <> struct Exp2Range<float> {
  static constexpr float magic = 12582912.0f, lo = -126.0f, hi = 128.0f;
  static constexpr int bias = 127, mantissa = 23;
};
template <> struct Exp2Range<double> {
  static constexpr double magic = 6755399441055744.0, lo = -1022.0, hi = 1024.0;
  static constexpr int bias = 1023, mantissa = 52;
};
#ifdef __AVX512F__
// The hardware's round and scale take care of overflow, underflow and NaN.
ALWAYS_INLINE V<float> exp2v_native(V<float> x) {
  const __m512 n = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (V<float>)_mm512_scalef_ps((__m512)exp2_poly(x - (V<float>)n), n);
}
ALWAYS_INLINE V<double> exp2v_native(V<double> x) {
  const __m512d n = _mm512_roundscale_pd((__m512d)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (V<double>)_mm512_scalef_pd((__m512d)exp2_poly(x - (V<double>)n), n);
}
#endif
// 2^x; below the smallest normal number 0, at 2^128 (2^1024) infinity, NaN stays NaN.
template <class T> ALWAYS_INLINE V<T> exp2v(V<T> x) {
#ifdef __AVX512F__
  return exp2v_native(x);
#else
  typedef Exp2Range<T> R;
  V<T> c = x < R::lo ? splat<T>(R::lo) : x;
  c = c > R::hi ? splat<T>(R::hi) : c;
  V<T> shifted = c + R::magic;  // adding 1.5 * 2^mantissa rounds to the nearest integer
  V<T> rounded = shifted - R::magic;
  VI<T> n;
  std::memcpy(&n, &shifted, 64);
  const T magic = R::magic;
  typename Bits<T>::Int magic_bits;
  std::memcpy(&magic_bits, &magic, sizeof(T));
  VI<T> scale_bits = (n - magic_bits + R::bias) << R::mantissa;
  V<T> scale;
  std::memcpy(&scale, &scale_bits, 64);
  V<T> y = exp2_poly(c - rounded) * scale;
  return x < R::lo ? splat<T>(0) : y;
#endif
}
constexpr double LOG2E = 1.4426950408889634074, LN2 = 0.69314718055994530942;

// log1p on [0, 1] as 2 artanh(y / (2 + y)): a series in s^2 <= 1/9, accurate down to tiny y.
template <class T> ALWAYS_INLINE V<T> log1p01(V<T> y) {
  V<T> s = y / (2 + y), q = s * s;
  constexpr int terms = sizeof(T) == 4 ? 8 : 17;
  V<T> p = splat<T>(T(1) / (2 * terms + 1));
  for (int k = terms - 1; k >= 0; k--) p = p * q + T(1) / (2 * k + 1);
  return 2 * s * p;
}
template <class T> ALWAYS_INLINE V<T> sigmoidv(V<T> x) {
  V<T> e = exp2v<T>((x < 0 ? x : -x) * T(LOG2E));
  return (x < 0 ? e : splat<T>(1)) / (1 + e);
}
// softplus and its derivative, with torch's rule that it is the identity above 20.
template <class T> ALWAYS_INLINE void softplusv(V<T> x, V<T>& value, V<T>& slope) {
  V<T> e = exp2v<T>((x < 0 ? x : -x) * T(LOG2E));
  V<T> soft = (x < 0 ? splat<T>(0) : x) + log1p01<T>(e);
  value = x > 20 ? x : soft;
  slope = x > 20 ? splat<T>(1) : (x < 0 ? e : splat<T>(1)) / (1 + e);
}

// With OpenMP the loaded library shares torch's thread pool (same soname, so one runtime), whose workers would
// otherwise still be spinning for torch's next operation while ours want the cores. Elsewhere plain threads.
template <class F> void parallel(int64_t threads, F body) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int64_t i = 0; i < threads; i++) body(i);
#else
  std::vector<std::thread> pool;
  for (int64_t i = 1; i < threads; i++) pool.emplace_back(body, i);
  body(0);
  for (auto& t : pool) t.join();
#endif
}

// One of several phases inside a single parallel region: `units` in pieces, claimed by whichever thread comes; all
// threads leave when all pieces are done. A region of its own for each phase would wait every time for the slowest
// thread to be given a core, on a busy machine many times the work itself. Pieces are computed whole, so the numbers
// do not depend on who claims them.
struct Phase { std::atomic<int64_t> claimed{0}, finished{0}; };

template <class F> void in_pieces(Phase& phase, int64_t pieces, int64_t units, F body) {
  if (pieces > units) pieces = units;
  for (int64_t i; (i = phase.claimed++) < pieces; phase.finished++)
    body(units * i / pieces, units * (i + 1) / pieces);
  while (phase.finished < pieces) std::this_thread::yield();
}
