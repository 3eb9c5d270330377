// One vector of channels ("lanes"), as wide as the target's registers, and the three functions the scans need on it.
// GCC/Clang vector extensions: the compiler lowers them to AVX-512, AVX2, SSE or NEON. Wider ones than the registers
// would work, but GCC lowers their comparisons and selections one element at a time. Rounding and scaling in the
// exponential have forms of their own where the target has instructions for them.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <vector>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define ALWAYS_INLINE_LAMBDA __attribute__((always_inline))
#define NEVER_INLINE __attribute__((noinline))  // for a loop that needs all registers

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16, REGISTERS = 32;
#else
constexpr int VECTOR_BYTES = 16, REGISTERS = 16;
#endif

template <class T> struct Bits;
template <> struct Bits<float> { typedef int32_t Int; };
template <> struct Bits<double> { typedef int64_t Int; };

template <class T> struct Vec {
  static constexpr int L = VECTOR_BYTES / sizeof(T);
  typedef T V __attribute__((vector_size(VECTOR_BYTES)));
  typedef typename Bits<T>::Int I __attribute__((vector_size(VECTOR_BYTES)));
};
template <class T> using V = typename Vec<T>::V;
template <class T> using VI = typename Vec<T>::I;

template <class T> ALWAYS_INLINE V<T> splat(T x) { return x - V<T>{}; }

// A vector's numbers in double, and back.
template <class T> struct InDouble {
  static constexpr int PARTS = sizeof(double) / sizeof(T);
  V<double> part[PARTS];
};
template <class T> ALWAYS_INLINE InDouble<T> in_double(V<T> x) {
  typedef T Part __attribute__((vector_size(VECTOR_BYTES / InDouble<T>::PARTS)));
  Part parts[InDouble<T>::PARTS];
  InDouble<T> wide;
  std::memcpy(parts, &x, VECTOR_BYTES);
  for (int i = 0; i < InDouble<T>::PARTS; i++) wide.part[i] = __builtin_convertvector(parts[i], V<double>);
  return wide;
}
template <class T> ALWAYS_INLINE V<T> rounded(const InDouble<T>& wide) {
  typedef T Part __attribute__((vector_size(VECTOR_BYTES / InDouble<T>::PARTS)));
  Part parts[InDouble<T>::PARTS];
  V<T> x;
  for (int i = 0; i < InDouble<T>::PARTS; i++) parts[i] = __builtin_convertvector(wide.part[i], Part);
  std::memcpy(&x, parts, VECTOR_BYTES);
  return x;
}

// Channels past `width` (the tail of d_inner) read as zero and are never written.
template <class T> ALWAYS_INLINE V<T> load(const T* p, int width) {
  V<T> v;
  if (width == Vec<T>::L) {
    std::memcpy(&v, p, VECTOR_BYTES);
    return v;
  }
  V<T> tail{};
  std::memcpy(&tail, p, width * sizeof(T));
  return tail;
}
template <class T> ALWAYS_INLINE void store(T* p, V<T> v, int width) {
  if (width == Vec<T>::L) std::memcpy(p, &v, VECTOR_BYTES);
  else std::memcpy(p, &v, width * sizeof(T));
}
// body(i, first channel, how many) for the vectors [first, stop) of `size` channels; the last may be shorter.
template <class T, class F> ALWAYS_INLINE void each_vector(int64_t size, int64_t first, int64_t stop, F body) {
  constexpr int L = Vec<T>::L;
  const int64_t whole = stop * L <= size ? stop : stop - 1;
  for (int64_t i = first; i < whole; i++) body(i, i * L, L);
  if (whole < stop) body(whole, whole * L, int(size - whole * L));
}
// Halving sums: a serial one would cost as much as the arithmetic it follows.
template <class T, int BYTES> struct Halves {
  typedef T W __attribute__((vector_size(BYTES)));
  static ALWAYS_INLINE T sum(W v) {
    typedef typename Halves<T, BYTES / 2>::W H;
    H half[2];
    std::memcpy(half, &v, BYTES);
    return Halves<T, BYTES / 2>::sum(half[0] + half[1]);
  }
};
template <> struct Halves<float, 16> {
  typedef float W __attribute__((vector_size(16)));
  static ALWAYS_INLINE float sum(W v) { return (v[0] + v[2]) + (v[1] + v[3]); }
};
template <> struct Halves<double, 16> {
  typedef double W __attribute__((vector_size(16)));
  static ALWAYS_INLINE double sum(W v) { return v[0] + v[1]; }
};
ALWAYS_INLINE float lane_sum(V<float> v) { return Halves<float, VECTOR_BYTES>::sum(v); }
ALWAYS_INLINE double lane_sum(V<double> v) { return Halves<double, VECTOR_BYTES>::sum(v); }

// Tokens whose parameters' gradients are summed in T: longer sums, over all tokens of a call, are in double. In float they
// would lose a digit every ten or hundred thousand tokens.
constexpr int64_t SUMMED_TOGETHER = 64;
template <class T> ALWAYS_INLINE void add_to(double* sums, V<T> x, int width = Vec<T>::L) {
  T numbers[Vec<T>::L];
  std::memcpy(numbers, &x, VECTOR_BYTES);
  for (int l = 0; l < width; l++) sums[l] += double(numbers[l]);
}
template <class T> ALWAYS_INLINE V<T> rounded(const double* sums) {
  T numbers[Vec<T>::L];
  for (int l = 0; l < Vec<T>::L; l++) numbers[l] = T(sums[l]);
  V<T> x;
  std::memcpy(&x, numbers, VECTOR_BYTES);
  return x;
}

// 2^r - 1 on [-1/2, 1/2]: Chebyshev interpolation; error relative to 2^r 2.5e-9 (float), 6e-20 (double).
ALWAYS_INLINE V<float> exp2m1_poly(V<float> r) {
  V<float> p = splat<float>(1.54614446985691e-4f);
  p = p * r + 1.34004281776158379e-3f;
  p = p * r + 9.61805667852463808e-3f;
  p = p * r + 5.55032722667030206e-2f;
  p = p * r + 2.40226509222887581e-1f;
  p = p * r + 6.93147206702832596e-1f;
  return p * r;
}
ALWAYS_INLINE V<double> exp2m1_poly(V<double> r) {
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
  return p * r;
}
template <class W> ALWAYS_INLINE W exp2_poly(W r) { return exp2m1_poly(r) + 1; }
#ifdef __AVX512F__
// 2^x; the hardware's round and scale take care of overflow, underflow and NaN. In float x = n + r, where n is a
// multiple of 1/16: the power of n's fraction comes from a register's 16 lanes, chosen by n's lowest bits once
// 1.5 * 2^19 is added, and a polynomial in r needs half the terms. Multiplications bound the scans: here are 4, with
// exp2_poly 6.
// exp2m1_lanes leaves n and that power, and returns their rest.
ALWAYS_INLINE V<float> exp2m1_lanes(V<float> x, V<float>& n, V<float>& power) {
  constexpr int SIXTEENTHS = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC | 4 << 4;
  const V<float> powers = {1.0f,        1.04427378f, 1.09050773f, 1.13878863f, 1.18920712f, 1.24185781f,
                           1.29683955f, 1.35425555f, 1.41421356f, 1.47682615f, 1.54221083f, 1.61049033f,
                           1.68179283f, 1.75625216f, 1.83400809f, 1.91520656f};
  n = (V<float>)_mm512_roundscale_ps((__m512)x, SIXTEENTHS);
  const V<float> r = x - n, lane = n + 786432.0f;
  power = (V<float>)_mm512_permutexvar_ps((__m512i)lane, (__m512)powers);
  V<float> p = splat<float>(0.0555054108f);
  p = p * r + 0.240233552f;
  p = p * r + 0.69314718f;
  return power * r * p;
}
ALWAYS_INLINE V<float> exp2_lanes(V<float> x) {
  V<float> n, power;
  const V<float> less_one = exp2m1_lanes(x, n, power);
  return (V<float>)_mm512_scalef_ps((__m512)(less_one + power), (__m512)n);
}
ALWAYS_INLINE V<double> exp2_lanes(V<double> x) {
  const __m512d n = _mm512_roundscale_pd((__m512d)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return (V<double>)_mm512_scalef_pd((__m512d)exp2_poly(x - (V<double>)n), n);
}
#else
// x, but no less than `lo` or no more than `hi`; NaN stays NaN. (The hardware's minimum and maximum give their second
// operand then.)
template <class W, class T> ALWAYS_INLINE W at_least(T lo, W x) {
  const W low = lo - W{};
#if defined(__AVX__)
  if constexpr (sizeof(T) == 4) return (W)_mm256_max_ps((__m256)low, (__m256)x);
  else return (W)_mm256_max_pd((__m256d)low, (__m256d)x);
#elif defined(__SSE2__)
  if constexpr (sizeof(T) == 4) return (W)_mm_max_ps((__m128)low, (__m128)x);
  else return (W)_mm_max_pd((__m128d)low, (__m128d)x);
#else
  return x < low ? low : x;
#endif
}
template <class W, class T> ALWAYS_INLINE W at_most(T hi, W x) {
  const W high = hi - W{};
#if defined(__AVX__)
  if constexpr (sizeof(T) == 4) return (W)_mm256_min_ps((__m256)high, (__m256)x);
  else return (W)_mm256_min_pd((__m256d)high, (__m256d)x);
#elif defined(__SSE2__)
  if constexpr (sizeof(T) == 4) return (W)_mm_min_ps((__m128)high, (__m128)x);
  else return (W)_mm_min_pd((__m128d)high, (__m128d)x);
#else
  return x > high ? high : x;
#endif
}
// Adding 1.5 * 2^mantissa + bias rounds to the nearest integer n and leaves n + bias in the lowest bits: shifted to the
// exponent's place they are 2^n, and the others are gone. 0 comes of n = -bias, infinity of n = bias + 1.
template <class T> struct Exponent;
template <> struct Exponent<float> { static constexpr float magic = 12582912.0f + 127; static constexpr int bias = 127, mantissa = 23; };
template <> struct Exponent<double> { static constexpr double magic = 6755399441055744.0 + 1023; static constexpr int bias = 1023, mantissa = 52; };
// x = n + r: leaves scale = 2^n and returns r. BOUNDED: x is at most 1, where nothing overflows.
template <bool BOUNDED = false, class W> ALWAYS_INLINE W split_power(W x, W& scale) {
  typedef typename std::remove_reference<decltype(x[0])>::type T;
  typedef Exponent<T> E;
  W c = at_least<W, T>(-E::bias, x);
  if (!BOUNDED) c = at_most<W, T>(E::bias + 1, c);
  const W shifted = c + E::magic;
  VI<T> bits;
  std::memcpy(&bits, &shifted, VECTOR_BYTES);
  bits <<= E::mantissa;
  std::memcpy(&scale, &bits, VECTOR_BYTES);
  return c - (shifted - E::magic);
}
template <bool BOUNDED = false, class W> ALWAYS_INLINE W exp2_lanes(W x) {
  W scale;
  const W r = split_power<BOUNDED>(x, scale);
  return exp2_poly(r) * scale;
}
#endif
// 2^x as main + rest, main being 1 for x close to 0: there the rest keeps the digits that 2^x rounds away.
#ifdef __AVX512F__
ALWAYS_INLINE void exp2_parts(V<float> x, V<float>& main, V<float>& rest) {
  V<float> n, power;
  const V<float> less_one = exp2m1_lanes(x, n, power);
  main = (V<float>)_mm512_scalef_ps((__m512)power, (__m512)n);
  rest = (V<float>)_mm512_scalef_ps((__m512)less_one, (__m512)n);
}
ALWAYS_INLINE void exp2_parts(V<double> x, V<double>& main, V<double>& rest) {
  const __m512d n = _mm512_roundscale_pd((__m512d)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  main = (V<double>)_mm512_scalef_pd((__m512d)splat<double>(1), n);
  rest = (V<double>)_mm512_scalef_pd((__m512d)exp2m1_poly(x - (V<double>)n), n);
}
#else
template <class W> ALWAYS_INLINE void exp2_parts(W x, W& main, W& rest) {
  const W r = split_power(x, main);
  rest = exp2m1_poly(r) * main;
}
#endif
// 2^x; 0 below the smallest normal number or half of it, infinity at 2^128 (2^1024) or half a power before; NaN stays NaN.
template <class T> ALWAYS_INLINE V<T> exp2v(V<T> x) { return exp2_lanes(x); }
// The same for x up to 1, one operation less without AVX-512.
template <class T> ALWAYS_INLINE V<T> exp2v_of_decay(V<T> x) {
#ifdef __AVX512F__
  return exp2_lanes(x);
#else
  return exp2_lanes<true>(x);
#endif
}
constexpr double LOG2E = 1.4426950408889634074, LN2 = 0.69314718055994530942;

// a / b for b from 1 to 3. With AVX-512 a division takes as long as 30 products: there from the estimated reciprocal, by
// a Newton step and the remainder, which rounds as division does but for a few last digits.
template <class T> ALWAYS_INLINE V<T> quotient(V<T> a, V<T> b) {
#ifdef __AVX512F__
  if constexpr (sizeof(T) == 4) {
    V<T> r = (V<T>)_mm512_rcp14_ps((__m512)b);
    r += r * (1 - b * r);
    const V<T> q = a * r;
    return q + r * (a - q * b);
  }
#endif
  return a / b;
}
// log1p on [0, 1] as 2 artanh(y / (2 + y)): a series in s^2 <= 1/9, accurate down to tiny y.
template <class T> ALWAYS_INLINE V<T> log1p01(V<T> y) {
  V<T> s = quotient<T>(y, 2 + y), q = s * s;
  constexpr int terms = sizeof(T) == 4 ? 8 : 17;
  V<T> p = splat<T>(T(1) / (2 * terms + 1));
#pragma GCC unroll 20  // or the coefficients would be divisions
  for (int k = terms - 1; k >= 0; k--) p = p * q + T(1) / (2 * k + 1);
  return 2 * s * p;
}
template <class T> ALWAYS_INLINE V<T> sigmoidv(V<T> x) {
  V<T> e = exp2v<T>((x < 0 ? x : -x) * T(LOG2E));
  return quotient<T>(x < 0 ? e : splat<T>(1), 1 + e);
}
// softplus and its derivative, with torch's rule that it is the identity above 20.
template <class T> ALWAYS_INLINE void softplusv(V<T> x, V<T>& value, V<T>& slope) {
  V<T> e = exp2v<T>((x < 0 ? x : -x) * T(LOG2E));
  V<T> soft = (x < 0 ? splat<T>(0) : x) + log1p01<T>(e);
  value = x > 20 ? x : soft;
  slope = x > 20 ? splat<T>(1) : quotient<T>(x < 0 ? e : splat<T>(1), 1 + e);
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
