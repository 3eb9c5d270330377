// Whether subnormal numbers (in float32 below 1.2e-38) are computed with, or replaced by zero. Processors compute with
// them by microcode, tens of times slower, and a cotangent that decays gets stuck there: 0.9 times the smallest
// number is rounded back to it, at every token before.
#include <cstdint>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

#if defined(__SSE2__)
constexpr int64_t FLUSH = 0x8040;  // results (FTZ) and operands (DAZ)
int64_t control() { return _mm_getcsr(); }
void set_control(int64_t word) { _mm_setcsr(static_cast<unsigned>(word)); }
#elif defined(__aarch64__)
constexpr int64_t FLUSH = 1 << 24;  // FZ
int64_t control() {
  int64_t word;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}
void set_control(int64_t word) { asm volatile("msr fpcr, %0" ::"r"(word)); }
#else
constexpr int64_t FLUSH = 0;
int64_t control() { return 0; }
void set_control(int64_t) {}
#endif

}  // namespace

extern "C" {
// Sets these bits of the calling thread and of its team of OpenMP threads, which is PyTorch's where both have loaded
// the same libgomp; -1 sets all that flush. Returns those that were set in the calling thread.
int adjoint_set_subnormals(int bits, int threads) {
  const int64_t before = control() & FLUSH;
#pragma omp parallel num_threads(threads)
  set_control((control() & ~FLUSH) | (bits & FLUSH));
  return static_cast<int>(before);
}
}
