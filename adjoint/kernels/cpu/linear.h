// What the linear scans are called with, shared by linear.cpp (scalar, diagonal) and dense.cpp.
#pragma once
#include "lanes.h"

struct LinearArgs {
  int64_t batch, seqlen, d_state, a_width, threads, window, halo;  // a_width: d_state, 1, or d_state^2 (dense)
  void *a, *b, *initial_state, *h;  // contiguous; the caller has zeroed a at resets
  void *dh, *da, *db, *dinitial_state;
  uint8_t* reset;  // (batch, seqlen) or null, for matrices
};
