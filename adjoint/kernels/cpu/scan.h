// What the scans are called with, shared by scan.cpp (token by token) and ssd.cpp (block by block).
#pragma once
#include "lanes.h"

struct Rows {  // a (batch, seqlen, channels) view: the last dimension is contiguous
  void* data;
  int64_t batch_stride, time_stride;
};

struct ScanArgs {
  int64_t batch, seqlen, nheads, headdim, ngroups, d_state;  // Mamba-1: nheads 1, headdim d_inner, ngroups 1
  int64_t interval, threads, partials, softplus, window, halo;
  Rows u, delta, B, C, z;       // Mamba-2: delta is (batch, seqlen, nheads); token by token, the step sizes themselves
  Rows decay;                   // Mamba-2, token by token: delta A, in whose place comes a; (batch, seqlen, nheads), contiguous
  Rows y;                       // forward's output
  void *A, *D, *delta_bias;     // (channels, d_state), (channels), (channels); by blocks, (nheads) each
  void *initial_state, *final_state;  // (batch, channels, d_state)
  void* checkpoints;            // (batch, segments, blocks, d_state, lanes)
  uint8_t* reset;               // (batch, seqlen) or null
  Rows dy, du, ddelta, dz;      // Mamba-2, token by token: ddelta, ddecay are (batch, seqlen, blocks)
  Rows ddecay;
  void *dB, *dC;                // (partials, batch, seqlen, ngroups, d_state), zeroed by the caller if several; by blocks, of
                                // threads, with values where a thread has heads of the group; null if none share a group
  Rows dB_sum, dC_sum;          // by blocks: their sums over the threads
  void *dA, *dD, *ddelta_bias;  // (batch, channels[, d_state]); by blocks, (batch, nheads)
  void *dfinal_state, *dinitial_state;
};

template <class T> ALWAYS_INLINE T* row(const Rows& r, int64_t b, int64_t t) {
  return (T*)r.data + b * r.batch_stride + t * r.time_stride;
}
