// Products of small matrices that stay in the first two caches: a tile of the result is held in registers, a row of it
// for each number of the left factor and vectors of the right one. And transposition, by which a product's right factor
// gets its lanes.
#pragma once
#include <utility>

#include "lanes.h"

// A left factor: number (i, k) is data[i * row + k * column].
template <class T> struct Left { const T* data; int64_t row, column; };
// A right factor: vector v of row k is at data + k * row + v * vector, on a vector's boundary.
template <class T> struct Right { const T* data; int64_t row, vector; };

// sum[i][v] += sum over k < depth of left(i, k) right(k, v)
template <class T, int M, int W> ALWAYS_INLINE void add_product(V<T> (&sum)[M][W], int64_t depth, Left<T> left, Right<T> right) {
  for (int64_t k = 0; k < depth; k++) {
    V<T> x[W];
    for (int v = 0; v < W; v++) x[v] = *(const V<T>*)(right.data + k * right.row + v * right.vector);
    for (int i = 0; i < M; i++) {
      const V<T> factor = splat<T>(left.data[i * left.row + k * left.column]);
      for (int v = 0; v < W; v++) sum[i][v] += factor * x[v];
    }
  }
}

// Rows of a tile of two vectors each: as many as registers hold beside the factors. With fewer sums at a time than
// multiply-adds are under way (2 x 4), a product would wait for itself.
constexpr int TILE_HEIGHT = REGISTERS == 32 ? 8 : 6;

// body(sum, first row, first vector) for tiles of a result of `rows` x `vectors`, whose sums begin at zero; at the
// edges tiles are smaller.
template <class T, int M, int W, class F> ALWAYS_INLINE void one_tile(int64_t i, int64_t v, F& body) {
  V<T> sum[M][W] = {};
  body(sum, i, v);
}
template <class T, int M, class F> ALWAYS_INLINE void tile_row(int64_t i, int64_t vectors, F& body) {
  int64_t v = 0;
  for (; v + 2 <= vectors; v += 2) one_tile<T, M, 2>(i, v, body);
  if (v < vectors) one_tile<T, M, 1>(i, v, body);
}
template <class T, class F> ALWAYS_INLINE void in_tiles(int64_t rows, int64_t vectors, F body) {
  int64_t i = 0;
  for (; i + TILE_HEIGHT <= rows; i += TILE_HEIGHT) tile_row<T, TILE_HEIGHT>(i, vectors, body);
  for (; i + 4 <= rows; i += 4) tile_row<T, 4>(i, vectors, body);
  for (; i + 2 <= rows; i += 2) tile_row<T, 2>(i, vectors, body);
  if (i < rows) tile_row<T, 1>(i, vectors, body);
}
// f(x, row, vector) for each vector x of a tile that begins at row i and vector v. Unrolled by GCC itself, later, the loop
// takes more instructions.
template <class Vt, int R, int W, class F> ALWAYS_INLINE void each_of_tile(Vt (&sum)[R][W], int64_t i, int64_t v, F f) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int w = 0; w < W; w++) f(sum[r][w], i + r, v + w);
}

#if defined(__GNUC__) && !defined(__clang__)
// Exchanges the off-diagonal squares of STEP x STEP numbers of a square of vectors. The lanes are lists of constants:
// computed in a loop, they would be computed again for every square.
template <class T, int STEP, int... LANE> ALWAYS_INLINE void exchange_squares(V<T> (&x)[Vec<T>::L], std::integer_sequence<int, LANE...>) {
  constexpr int L = Vec<T>::L;
  constexpr VI<T> low = {(LANE & STEP ? L + LANE - STEP : LANE)...}, high = {(LANE & STEP ? L + LANE : LANE + STEP)...};
#pragma GCC unroll 16
  for (int i = 0; i < L; i++) {
    if (i & STEP) continue;
    const V<T> a = x[i], b = x[i + STEP];
    x[i] = __builtin_shuffle(a, b, low);
    x[i + STEP] = __builtin_shuffle(a, b, high);
  }
}
#endif
// The rows of a square of vectors become its columns.
template <class T> ALWAYS_INLINE void transpose_square(V<T> (&x)[Vec<T>::L]) {
  constexpr int L = Vec<T>::L;
#if defined(__GNUC__) && !defined(__clang__)
  const auto lanes = std::make_integer_sequence<int, L>();
  if constexpr (L > 1) exchange_squares<T, 1>(x, lanes);
  if constexpr (L > 2) exchange_squares<T, 2>(x, lanes);
  if constexpr (L > 4) exchange_squares<T, 4>(x, lanes);
  if constexpr (L > 8) exchange_squares<T, 8>(x, lanes);
#else
  for (int i = 0; i < L; i++)
    for (int l = 0; l < i; l++) {
      const T a = x[i][l];
      x[i][l] = x[l][i];
      x[l][i] = a;
    }
#endif
}

// Transpose `rows` rows of one vector each, at source + i * from: lane l becomes the row at target + l * to, in which
// row i is element i. Elements up to the next whole vector are zero.
template <class T> ALWAYS_INLINE void transpose_column(const T* source, int64_t from, int64_t rows, T* target, int64_t to) {
  constexpr int L = Vec<T>::L;
  for (int64_t first = 0; first < rows; first += L) {
    V<T> square[L];
    for (int64_t i = 0; i < L; i++)
      square[i] = first + i < rows ? *(const V<T>*)(source + (first + i) * from) : V<T>{};
    transpose_square<T>(square);
    for (int64_t l = 0; l < L; l++) *(V<T>*)(target + l * to + first) = square[l];
  }
}
