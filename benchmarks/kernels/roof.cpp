// How fast this processor multiplies and exponentiates: nothing but registers, on every thread given.
// The exponential is the scans' own, so that their share of this roof says what everything else costs.
#include "lanes.h"

constexpr int CHAINS = 12;  // enough independent ones to hide a fused multiply-add's latency on two ports

template <class T> static double multiply(int64_t threads, int64_t rounds) {
  std::vector<double> sums(threads);
  parallel(threads, [&](int64_t thread) {
    V<T> x[CHAINS];
    for (int i = 0; i < CHAINS; i++) x[i] = splat<T>(T(i + thread));
    const V<T> a = splat<T>(T(0.999)), b = splat<T>(T(0.001));
    for (int64_t k = 0; k < rounds; k++)
      _Pragma("GCC unroll 12")  // or the chains would live in memory
      for (int i = 0; i < CHAINS; i++) x[i] = x[i] * a + b;
    V<T> sum = x[0];
    for (int i = 1; i < CHAINS; i++) sum += x[i];
    sums[thread] = lane_sum(sum);
  });
  double total = 0;
  for (double s : sums) total += s;
  return total;
}

template <class T> static double exponentiate(int64_t threads, int64_t rounds) {
  std::vector<double> sums(threads);
  parallel(threads, [&](int64_t thread) {
    V<T> x[CHAINS];
    for (int i = 0; i < CHAINS; i++) x[i] = splat<T>(T(-0.01) * T(i + thread + 1));
    for (int64_t k = 0; k < rounds; k++)
      _Pragma("GCC unroll 12")
      for (int i = 0; i < CHAINS; i++) x[i] = -exp2v<T>(x[i]);  // stays between -1 and 0
    V<T> sum = x[0];
    for (int i = 1; i < CHAINS; i++) sum += x[i];
    sums[thread] = lane_sum(sum);
  });
  double total = 0;
  for (double s : sums) total += s;
  return total;
}

extern "C" {
int64_t elements_a_round(int is_double) { return CHAINS * (is_double ? Vec<double>::L : Vec<float>::L); }
double multiply_f32(int64_t threads, int64_t rounds) { return multiply<float>(threads, rounds); }
double multiply_f64(int64_t threads, int64_t rounds) { return multiply<double>(threads, rounds); }
double exponentiate_f32(int64_t threads, int64_t rounds) { return exponentiate<float>(threads, rounds); }
double exponentiate_f64(int64_t threads, int64_t rounds) { return exponentiate<double>(threads, rounds); }
}
