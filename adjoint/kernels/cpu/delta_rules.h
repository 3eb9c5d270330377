// What delta rules share: a thread's memory for one head of one sequence, the state of shape (d_k, d_v), and tokens' rows
// that are read into it and written from it.
//
// Where float would lose digits, a rule in float has one in double compute a block (`narrow`): it reads and writes the same
// float tensors, and what rounding leaves of the state goes on beside the state.
#pragma once
#include "lanes.h"

struct TokenRows { void* data; int64_t batch_stride, time_stride; };  // the heads' rows of a token follow each other

template <class T> struct Matrix {  // rows of whole vectors
  T* data;
  int64_t width;
  T* row(int64_t i) const { return data + i * width; }
  Matrix from(int64_t i) const { return {row(i), width}; }  // the rows from i on
};
// A row of a few vectors: for so little a call of memcpy takes longer than the copy.
template <class T> ALWAYS_INLINE void copy_row(T* to, const T* from, int64_t count) {
  constexpr int64_t L = Vec<T>::L;
  int64_t i = 0;
  for (; i + L <= count; i += L) store<T>(to + i, load<T>(from + i, L), L);
  if (i < count) std::memcpy(to + i, from + i, (count - i) * sizeof(T));
}
inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Args has batch, seqlen, nheads, d_k, d_v; reset (batch, seqlen) bool, or null; and checkpoints (batch, nheads, slots, d_k,
// d_v), the state before each slot of tokens. Other tensors are contiguous.
template <class T, class Args> class DeltaRule {
 protected:
  // Vectors between two matrices: without them the same rows of all would be whole pages apart, in the same lines
  // of the first-level cache.
  static constexpr int64_t SKEW = 5, MOST_MATRICES = 64;
  const Args& s;
  const bool narrow;          // whether tensors are of float, for T = double
  const int64_t K, W, slots;  // d_k and d_v in whole vectors or strips
  std::vector<V<T>> memory;
  T* free = nullptr;
  int64_t b = 0, h = 0, t = 0, n = 0;  // sequence, head, first token and tokens of what is in memory

  DeltaRule(const Args& args, int64_t k_to, int64_t v_to, int64_t slot, bool narrow)
      : s(args), narrow(narrow), K(padded(args.d_k, k_to)), W(padded(args.d_v, v_to)), slots((args.seqlen + slot - 1) / slot) {}

  void allocate(int64_t elements) {
    memory.resize(elements / Vec<T>::L + 1 + SKEW * MOST_MATRICES);
    free = (T*)memory.data();
  }
  Matrix<T> take(int64_t height, int64_t width) {
    Matrix<T> m{free, width};
    free += height * width + SKEW * Vec<T>::L;
    return m;
  }
  void go_to(int64_t unit) { b = unit / s.nheads, h = unit % s.nheads; }
  bool resets(int64_t token) const { return s.reset && ((const bool*)s.reset)[b * s.seqlen + token]; }
  int64_t state_offset() const { return (b * s.nheads + h) * s.d_k * s.d_v; }
  int64_t saved_offset(int64_t slot) const { return ((b * s.nheads + h) * slots + slot) * s.d_k * s.d_v; }
  bool is_narrow() const { return sizeof(T) > sizeof(float) && narrow; }
  // Numbers of a tensor, from the one at `offset` on.
  ALWAYS_INLINE void get(const void* tensor, int64_t offset, T* to, int64_t count) const {
    if (is_narrow()) {
      for (int64_t i = 0; i < count; i++) to[i] = ((const float*)tensor + offset)[i];
      return;
    }
    copy_row(to, (const T*)tensor + offset, count);
  }
  ALWAYS_INLINE void put(void* tensor, int64_t offset, const T* from, int64_t count) const {
    if (is_narrow()) {
      for (int64_t i = 0; i < count; i++) ((float*)tensor + offset)[i] = float(from[i]);
      return;
    }
    copy_row((T*)tensor + offset, from, count);
  }
  ALWAYS_INLINE T number(const void* tensor, int64_t offset) const {
    return is_narrow() ? ((const float*)tensor)[offset] : ((const T*)tensor)[offset];
  }
  void get_state(const void* states, int64_t offset, Matrix<T> to) const {
    if (W > s.d_v || K > s.d_k) std::memset(to.data, 0, K * W * sizeof(T));
    for (int64_t i = 0; i < s.d_k; i++) get(states, offset + i * s.d_v, to.row(i), s.d_v);
  }
  void state_from(const void* states, Matrix<T> to) const {
    if (states) get_state(states, state_offset(), to);
    else std::memset(to.data, 0, K * W * sizeof(T));
  }
  void state_to(void* states, int64_t offset, Matrix<T> from) const {
    for (int64_t i = 0; i < s.d_k; i++) put(states, offset + i * s.d_v, from.row(i), s.d_v);
  }
  // A state, perhaps transposed, in double: this one and, unless null, what rounding has left of it. And back.
  void widen(Matrix<T> state, const T* rest, Matrix<double> to, int64_t height, int64_t width) const {
    for (int64_t i = 0; i < height; i++)
      for (int64_t j = 0; j < width; j++)
        to.row(i)[j] = double(state.row(i)[j]) + (rest ? double(rest[i * state.width + j]) : 0);
  }
  void split(Matrix<double> from, Matrix<T> state, T* rest, int64_t height, int64_t width) const {
    for (int64_t i = 0; i < height; i++)
      for (int64_t j = 0; j < width; j++) {
        const double x = from.row(i)[j];
        state.row(i)[j] = T(x);
        rest[i * state.width + j] = T(x - double(T(x)));
      }
  }
  // The tokens' rows of a tensor, zeros behind their channels and, up to `rows`, behind the tokens.
  void read_rows(const TokenRows& from, int64_t width, Matrix<T> to, int64_t rows) const {
    for (int64_t i = 0; i < rows; i++) {
      const int64_t used = i < n ? width : 0;
      if (used) get(from.data, b * from.batch_stride + (t + i) * from.time_stride + h * width, to.row(i), used);
      if (used < to.width) std::memset(to.row(i) + used, 0, (to.width - used) * sizeof(T));
    }
  }
  void write(void* to, int64_t width, Matrix<T> from) const {
    for (int64_t i = 0; i < n; i++) put(to, ((b * s.seqlen + t + i) * s.nheads + h) * width, from.row(i), width);
  }
  void write(const TokenRows& to, int64_t width, Matrix<T> from) const {
    for (int64_t i = 0; i < n; i++) put(to.data, b * to.batch_stride + (t + i) * to.time_stride + h * width, from.row(i), width);
  }
};
