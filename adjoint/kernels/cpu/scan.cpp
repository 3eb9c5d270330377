// Selective scan (Mamba-1) and SSD scan (Mamba-2) on the CPU: forward and adjoint.
//
//   h_t = a_t h_{t-1} + delta_t u_t B_t,   y_t = C_t . h_t + D u_t,   out_t = y_t silu(z_t)
//
// Mamba-1 has a_t = exp(delta_t A) for every channel and state; in Mamba-2 a_t and delta_t are one number a
// head, computed by the caller. Lanes are channels, so every load of u, delta, z is contiguous and nothing is
// summed across lanes in the inner loop. Time is cut into segments of `interval` tokens: forward saves
// the state before each segment, backward recomputes a segment's states into cache and sweeps it in reverse.
//
// A segment is computed for BATCH vectors of channels: first what is the same for all states (step sizes, gates),
// token by token, so that memory is read by rows; then, for STATES of the d_state states at a time, the recurrence
// over the whole segment, with states in registers; then what is left for each token. Outputs and the sums over states
// are added up between the passes over the states.
//
// Adjoint (mu is the accumulated adjoint state, g_t = dy_t C_t):   mu_t = g_t + a_{t+1} mu_{t+1}.
// With a window W, mu_t sums only g_t .. g_{t+W-1}: blocks of W tokens, a suffix scan (R, S) inside the block
// and a prefix scan (P) in the next one, joined as mu_t = R_t + S_t P_{t+W-1}. No subtraction, no division.
#include "scan.h"

#include <algorithm>

namespace {

constexpr int64_t BATCH = 8;  // their rows fit the second-level cache
constexpr int STATES = 4;     // their decays, states and sums over a segment fit the first-level cache

struct Block { int64_t index, channel, head, group; int width; };  // up to L channels of one head

template <class T, bool SSD> struct Scan {
  typedef V<T> Vt;
  static constexpr int L = Vec<T>::L;
  const ScanArgs& s;
  const int64_t N, K, segments;
  std::vector<Block> block;
  const int64_t blocks;

  static std::vector<Block> blocks_of(const ScanArgs& s) {
    std::vector<Block> all;
    for (int64_t head = 0; head < s.nheads; head++)
      for (int64_t first = 0; first < s.headdim; first += L)
        all.push_back({int64_t(all.size()), head * s.headdim + first, head, head / (s.nheads / s.ngroups),
                       int(s.headdim - first < L ? s.headdim - first : L)});
    return all;
  }
  explicit Scan(const ScanArgs& args)
      : s(args), N(args.d_state), K(args.interval), segments((args.seqlen + args.interval - 1) / args.interval),
        block(blocks_of(args)), blocks(block.size()) {}

  int64_t segment_end(int64_t segment) const {
    return (segment + 1) * K < s.seqlen ? (segment + 1) * K : s.seqlen;
  }
  Vt* checkpoint(int64_t b, int64_t segment, int64_t i) const {
    return (Vt*)s.checkpoints + ((b * segments + segment) * blocks + i) * N;
  }
  // (channels, d_state) rows <-> one vector of channels for each state
  void gather(const void* rows, Vt* out, int64_t b, const Block& k, T factor) const {
    const T* p = (const T*)rows + (b * s.nheads * s.headdim + k.channel) * N;
    for (int64_t n = 0; n < N; n++) {
      out[n] = Vt{};
      for (int l = 0; l < k.width; l++) out[n][l] = p[l * N + n] * factor;
    }
  }
  void scatter(void* rows, const Vt* in, int64_t b, const Block& k) const {
    T* p = (T*)rows + (b * s.nheads * s.headdim + k.channel) * N;
    for (int64_t n = 0; n < N; n++)
      for (int l = 0; l < k.width; l++) p[l * N + n] = in[n][l];
  }
  ALWAYS_INLINE Vt channels(const void* p, int64_t b, const Block& k) const {
    return p ? load<T>((const T*)p + b * s.nheads * s.headdim + k.channel, k.width) : Vt{};
  }
  ALWAYS_INLINE Vt channels(const Rows& rows, int64_t b, int64_t t, const Block& k) const {
    return load<T>(row<T>(rows, b, t) + k.channel, k.width);
  }
  ALWAYS_INLINE const T* states(const Rows& rows, int64_t b, int64_t t, const Block& k) const {  // of B or C
    return row<T>(rows, b, t) + k.group * N;
  }
  // Whether nothing is carried to token t: there a NaN before it must not be multiplied by 0, but left out. Mamba-2's
  // caller says it by a decay of 0.
  ALWAYS_INLINE bool dropped(int64_t b, int64_t t, T head_decay) const {
    return SSD ? head_decay == 0 : s.reset && s.reset[b * s.seqlen + t];
  }
  ALWAYS_INLINE void step_size(int64_t b, int64_t t, const Block& k, Vt bias, Vt& delta, Vt& slope) const {
    slope = splat<T>(1);
    if (SSD) {
      delta = splat<T>(row<T>(s.delta, b, t)[k.head]);
      return;
    }
    delta = channels(s.delta, b, t, k) + bias;
    if (s.softplus) softplusv<T>(delta, delta, slope);
  }
  ALWAYS_INLINE T head_decay(int64_t b, int64_t t, const Block& k) const {
    return SSD ? row<T>(s.decay, b, t)[k.head] : T(0);
  }
  // body(first block, block behind the last) for batches of the blocks [first, last), each of one group of B and C
  template <class F> void each_batch(int64_t first, int64_t last, F body) const {
    for (int64_t i = first, stop; i < last; i = stop) {
      const int64_t group = block[i].group;
      for (stop = i; stop < last && stop < i + BATCH && block[stop].group == group;) stop++;
      body(i, stop);
    }
  }
  // body(b, first, last) for the part of each row of the batch that is this thread's: its blocks [first, last)
  template <class F> void each_row(int64_t thread, F body) const {
    const int64_t units = s.batch * blocks;
    const int64_t lo = units * thread / s.threads, hi = units * (thread + 1) / s.threads;
    for (int64_t b = lo / blocks; b < s.batch && b * blocks < hi; b++)
      body(b, b * blocks < lo ? lo - b * blocks : 0, hi - b * blocks < blocks ? hi - b * blocks : blocks);
  }
  // body(first state, std::integral_constant of their number)
  template <class F> ALWAYS_INLINE void each_states(F body) const {
    int64_t n = 0;
    for (; n + STATES <= N; n += STATES) body(n, std::integral_constant<int, STATES>());
    for (; n < N; n++) body(n, std::integral_constant<int, 1>());
  }

  // What a token of one block of channels has in common for all states; from `slope` on only in the backward.
  struct Token {
    Vt delta, du, y, slope, dy, gate, from_B, from_a;
    T decay;  // Mamba-2's
    bool dropped;
  };
  // How far the next batch of channels is from the batch [first, stop) of a thread's blocks [begin, last): behind the
  // last batch the next segment's first, `step` tokens away.
  struct Distance { int64_t channels, tokens; };
  Distance to_next(int64_t first, int64_t stop, int64_t begin, int64_t last, int64_t step) const {
    return stop < last ? Distance{(stop - first) * L, 0} : Distance{(begin - first) * L, step};
  }
  // Asks for the rows that the next batch of channels reads, and for those that this one will write: the processor
  // cannot foresee them, as a batch reads a short part of each row.
  template <class... R>
  ALWAYS_INLINE void prefetch_next(int64_t b, int64_t t, const Block& k, Distance next, const R&... read) const {
    const int64_t token = t + next.tokens, channel = k.channel + next.channels;
    if (SSD || token < 0 || token >= s.seqlen) return;
    ((read.data ? __builtin_prefetch(row<T>(read, b, token) + channel, 0, 2) : void()), ...);
  }
  template <class... R>
  ALWAYS_INLINE void prefetch_written(int64_t b, int64_t t, const Block& k, const R&... written) const {
    if (!SSD) ((written.data ? __builtin_prefetch(row<T>(written, b, t) + k.channel, 1, 2) : void()), ...);
  }
  // What the states' recurrence needs of token t; leaves y = D u.
  ALWAYS_INLINE void prepare(int64_t b, int64_t t, const Block& k, Token& x) const {
    const Vt bias = channels(s.delta_bias, 0, k), D = channels(s.D, 0, k), u = channels(s.u, b, t, k);
    step_size(b, t, k, bias, x.delta, x.slope);
    x.du = x.delta * u, x.y = D * u;
    x.decay = head_decay(b, t, k), x.dropped = dropped(b, t, x.decay);
  }
  // How states take their steps. Where decays are so near 1 that a state is the sum of many thousand tokens, in float32's
  // rounding of its own, they are exact. step: a typical step size of the segment, or in Mamba-2 a decay.
  static ALWAYS_INLINE Vt typical_step(const Token* x, int64_t tokens) {  // of all, four are enough
    const int64_t at[] = {0, tokens / 4, tokens / 2, tokens * 3 / 4};
    Vt sum{};
    for (int64_t t : at) sum += SSD ? splat<T>(x[t].decay) : x[t].delta;
    return sum * T(0.25);
  }
  // In Mamba-1 with softplus no decay exceeds 1 if no entry of A does.
  enum class Steps { ROUNDED, OF_DECAYS, EXACT };
  template <Steps STEPS> using With = std::integral_constant<Steps, STEPS>;
  template <int NS, class F> ALWAYS_INLINE void with_steps(const Block& k, Vt step, const Vt* A2, F run) const {
    if (SSD) {
      const bool near_1 = step[0] > T(1 - 1.0 / 2048) && step[0] <= 1;
      return near_1 ? run(With<Steps::EXACT>()) : run(With<Steps::ROUNDED>());
    }
    Vt nearest = A2[0];
    for (int n = 1; n < NS; n++) nearest = A2[n] > nearest ? A2[n] : nearest;
    VI<T> lane;
    for (int l = 0; l < L; l++) lane[l] = l;
    const Vt exponents = lane < typename Bits<T>::Int(k.width) ? step * nearest : splat<T>(-1);
    if (lane_sum(exponents > T(-1.0 / 2048) ? splat<T>(1) : Vt{}) > 0) run(With<Steps::EXACT>());
    else if (s.softplus && lane_sum(nearest > 0 ? splat<T>(1) : Vt{}) == 0) run(With<Steps::OF_DECAYS>());
    else run(With<Steps::ROUNDED>());
  }
  // What is added to the exponent of token t's decays in Mamba-1: less than half of what rounding moves a decay, so that
  // equal decays near 1 are not all rounded to the same side. Offsets of few tokens add up to little.
  static ALWAYS_INLINE Vt offset(int64_t t) {
    static constexpr T ULP = sizeof(T) == 4 ? T(5.9604645e-8 * LOG2E / 15) : T(1.1102230246251565e-16 * LOG2E / 15);
    static constexpr T offsets[16] = {0, 4 * ULP, -4 * ULP, 6 * ULP, -6 * ULP, 2 * ULP, -2 * ULP, 7 * ULP,
                                      0, -7 * ULP, 3 * ULP, -3 * ULP, 5 * ULP, -5 * ULP, 1 * ULP, -1 * ULP};
    return splat<T>(offsets[t & 15]);
  }
  // main h + rest h + input, with what rounding leaves in `low`; main is 1 where a decay is near 1.
  static ALWAYS_INLINE Vt exact_step(Vt main, Vt rest, Vt h, Vt input, Vt& low) {
    const Vt first = main * h, second = rest * h + (input + low), sum = first + second;
    low = second - (sum - first);
    return sum;
  }
  static ALWAYS_INLINE void decay_parts(T decay, Vt& main, Vt& rest) {  // of Mamba-2
    main = splat<T>(decay > T(0.5) ? T(1) : decay), rest = splat<T>(decay > T(0.5) ? decay - 1 : T(0));
  }
  // Runs NS states through a segment and adds C h to y. KEEPS: leaves in `kept` the states before the segment, then
  // each token's decays and states; else the last states are left, and what rounding has left of them in `rounded_off`.
  // In exact steps Mamba-1's decays are in two parts, both of which are left.
  template <int NS, bool KEEPS, bool ADDS_Y, Steps STEPS>
  NEVER_INLINE void run_states(int64_t b, int64_t segment, const Block& k, int64_t n0, Token* x, const Vt* A2,
                               Vt* state, Vt* kept, Vt* rounded_off) const {
    constexpr bool EXACT = STEPS == Steps::EXACT;
    const int64_t begin = segment * K, end = segment_end(segment);
    const T *B = states(s.B, b, begin, k) + n0, *C = states(s.C, b, begin, k) + n0;
    Vt now[NS], low[NS] = {}, rate[NS];
    for (int n = 0; n < NS; n++) now[n] = state[n], rate[n] = SSD ? Vt{} : A2[n];
    if (EXACT && !KEEPS) for (int n = 0; n < NS; n++) low[n] = rounded_off[n];
    if (KEEPS) for (int n = 0; n < NS; n++) kept[n] = now[n];
    for (int64_t t = begin; t < end; t++, x++, B += s.B.time_stride, C += s.C.time_stride) {
      if (x->dropped) for (int n = 0; n < NS; n++) now[n] = low[n] = Vt{};
      const Vt delta = x->delta, du = x->du, to_either_side = SSD ? Vt{} : offset(t);
      Vt y = ADDS_Y ? x->y : Vt{};
#pragma GCC unroll 8
      for (int n = 0; n < NS; n++) {
        Vt decay = splat<T>(x->decay), rest;
        if (EXACT) {
          if (SSD) decay_parts(x->decay, decay, rest);
          else exp2_parts(delta * rate[n], decay, rest);
          now[n] = exact_step(decay, rest, now[n], du * B[n], low[n]);
        } else {
          const Vt exponent = delta * rate[n] + to_either_side;
          if (!SSD) decay = STEPS == Steps::OF_DECAYS ? exp2v_of_decay<T>(exponent) : exp2v<T>(exponent);
          now[n] = decay * now[n] + du * B[n];
        }
        if (ADDS_Y) y += now[n] * C[n];
        if (KEEPS && !SSD) kept[NS + n] = decay;
        if (KEEPS && EXACT) kept[2 * NS + n] = rest;
        if (KEEPS) kept[(2 + EXACT) * NS + n] = now[n];
      }
      if (ADDS_Y) x->y = y;
      if (KEEPS) kept += (2 + EXACT) * NS;
    }
    if (!KEEPS) for (int n = 0; n < NS; n++) state[n] = now[n], rounded_off[n] = low[n];
  }

  // ------------------------------------------------------------------------------------------- forward
  void forward(int64_t thread) const {
    std::vector<Vt> state(blocks * N), rounded_off(blocks * N), A2(blocks * N);
    std::vector<Token> tokens(BATCH * K);
    each_row(thread, [&](int64_t b, int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        const Block& k = block[i];
        if (!SSD) gather(s.A, &A2[i * N], 0, k, T(LOG2E));
        if (s.initial_state) gather(s.initial_state, &state[i * N], b, k, T(1));
        else for (int64_t n = 0; n < N; n++) state[i * N + n] = Vt{};
        for (int64_t n = 0; n < N; n++) rounded_off[i * N + n] = Vt{};
      }
      for (int64_t segment = 0; segment < segments; segment++)
        each_batch(first, last, [&](int64_t i0, int64_t stop) {
          for (int64_t i = i0; s.checkpoints && i < stop; i++)
            std::memcpy((void*)checkpoint(b, segment, i), (void*)&state[i * N], N * sizeof(Vt));
          const Distance next = to_next(i0, stop, first, last, K);
          forward_segment(b, segment, i0, stop, next, A2.data(), state.data(), rounded_off.data(), tokens.data());
        });
      if (s.final_state)
        for (int64_t i = first; i < last; i++) scatter(s.final_state, &state[i * N], b, block[i]);
    });
  }
  void forward_segment(int64_t b, int64_t segment, int64_t first, int64_t last, Distance next, const Vt* A2, Vt* state,
                       Vt* rounded_off, Token* tokens) const {
    const int64_t begin = segment * K, end = segment_end(segment);
    for (int64_t t = begin; t < end; t++)
      for (int64_t i = first; i < last; i++) {
        prepare(b, t, block[i], tokens[(i - first) * K + t - begin]);
        prefetch_next(b, t, block[i], next, s.u, s.delta, s.z);
        prefetch_written(b, t, block[i], s.y);
      }
    for (int64_t i = first; i < last; i++) {
      const Vt step = typical_step(tokens + (i - first) * K, end - begin);
      each_states([&](int64_t n, auto count) {
        with_steps<count.value>(block[i], step, A2 + i * N + n, [&](auto steps) {
          run_states<count.value, false, true, steps.value>(b, segment, block[i], n, tokens + (i - first) * K,
                                                            A2 + i * N + n, state + i * N + n, nullptr,
                                                            rounded_off + i * N + n);
        });
      });
    }
    for (int64_t t = begin; t < end; t++)
      for (int64_t i = first; i < last; i++) {
        const Block& k = block[i];
        Vt y = tokens[(i - first) * K + t - begin].y;
        if (s.z.data) {
          const Vt z = channels(s.z, b, t, k);
          y *= z * sigmoidv<T>(z);
        }
        store<T>(row<T>(s.y, b, t) + k.channel, y, k.width);
      }
  }

  // ------------------------------------------------------------------------------------------ backward
  // What the prefix sums P of a block of W tokens need of the decays since the block's first token: in Mamba-2 their
  // product; in Mamba-1, where a product of exp(delta A) is the exp of a sum, the sum of delta (with Kahan's
  // correction). And whether a document has begun, which ends the block's sums.
  struct Since { Vt total, low; bool cut; };
  struct Work {  // one thread's scratch
    std::vector<Vt> kept;          // (STATES), then (interval, decays, perhaps their rests, and states, STATES)
    std::vector<Vt> P;             // (interval, STATES)
    std::vector<Vt> dB_dC;         // (d_state / STATES, interval, dB and dC, STATES): sums over the channels
    std::vector<Vt> A2, R, S;      // (blocks, d_state); R and S carry over from segment to segment
    std::vector<Vt> dfinal;        // (blocks, d_state), with a window
    std::vector<Vt> dD, dbias;     // (blocks): sums over a segment
    std::vector<double> sums;      // (blocks, d_state of dA, dD and dbias, lanes): over all segments
    std::vector<Vt> prefix;        // (segments, blocks, d_state): P before the segment's first need
    std::vector<Since> since;      // (segments, blocks)
    std::vector<Token> tokens;     // (BATCH, interval)
    struct Ahead { Vt since, dy; bool joins; };  // of the token W - 1 later; joins: P sums it
    std::vector<Ahead> ahead;      // (BATCH, interval)
  };

  // dL/dy_t before the gate; gate: of dz, what is to be multiplied by y
  ALWAYS_INLINE Vt output_cotangent(int64_t b, int64_t t, const Block& k, Vt& gate) const {
    const Vt dy = channels(s.dy, b, t, k);
    if (!s.z.data) return dy;
    const Vt z = channels(s.z, b, t, k), sig = sigmoidv<T>(z);
    gate = dy * sig * (1 + z * (1 - sig));
    return dy * (z * sig);
  }
  // Takes token j into `since`; false where P does not sum it, behind a document's begin.
  ALWAYS_INLINE bool advance(int64_t b, int64_t j, const Block& k, Vt bias, Since& since) const {
    if (j % s.window == 0) {
      since = {splat<T>(SSD ? 1 : 0), Vt{}, false};
      return true;
    }
    const T decay = head_decay(b, j, k);
    since.cut |= dropped(b, j, decay);
    if (since.cut) return false;
    if (SSD) {
      since.total *= decay;
    } else {
      Vt delta, slope;
      step_size(b, j, k, bias, delta, slope);
      const Vt term = delta - since.low, total = since.total + term;
      since.low = (total - since.total) - term;
      since.total = total;
    }
    return true;
  }
  // P_j of `count` states from P_{j-1}
  ALWAYS_INLINE void add_to_prefix(int64_t j, Vt total, Vt dy, const T* C, const Vt* A2, const Vt* dfinal, Vt* P,
                                   int64_t count) const {
    for (int64_t n = 0; n < count; n++) {
      const Vt through = SSD ? total : exp2v<T>(total * A2[n]);
      P[n] += through * (dy * C[n]);
      if (j == s.seqlen - 1) P[n] += through * dfinal[n];
    }
  }
  // The prefix sums that segment [s, e) starts from: after token s + W - 2 (or after the last token).
  void save_prefixes(int64_t b, const Block& k, Work& w) const {
    const int64_t W = s.window;
    const Vt *A2 = &w.A2[k.index * N], *dfinal = &w.dfinal[k.index * N], bias = channels(s.delta_bias, 0, k);
    std::vector<Vt> P(N);
    Since since{};
    int64_t j = 0;
    for (int64_t segment = 0; segment < segments; segment++) {
      const int64_t end = segment * K + W - 1 < s.seqlen ? segment * K + W - 1 : s.seqlen;
      const int64_t start = (end - 1) / W * W;  // P begins again with each block of W tokens
      for (j = start > j ? start : j; j < end; j++) {
        if (j % W == 0) std::fill(P.begin(), P.end(), Vt{});
        Vt gate;
        if (advance(b, j, k, bias, since))
          add_to_prefix(j, since.total, output_cotangent(b, j, k, gate), states(s.C, b, j, k), A2, dfinal, P.data(), N);
      }
      std::memcpy((void*)&w.prefix[(segment * blocks + k.index) * N], (void*)P.data(), N * sizeof(Vt));
      w.since[segment * blocks + k.index] = since;
    }
  }

  void backward(int64_t thread) const {
    const bool windowed = s.window > 0, joined = s.window > 1;
    Work w;
    w.kept.resize((3 * K + 1) * STATES);
    w.dB_dC.resize(2 * K * N);
    w.tokens.resize(BATCH * K);
    for (auto* x : {&w.A2, &w.R, &w.S, &w.dfinal}) x->resize(blocks * N);
    for (auto* x : {&w.dD, &w.dbias}) x->resize(blocks);
    w.sums.resize(blocks * (N + 2) * L);
    if (joined) {
      w.P.resize(K * STATES), w.ahead.resize(BATCH * K);
      w.prefix.resize(segments * blocks * N), w.since.resize(segments * blocks);
    }
    each_row(thread, [&](int64_t b, int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        const Block& k = block[i];
        if (!SSD) gather(s.A, &w.A2[i * N], 0, k, T(LOG2E));
        for (auto* x : {&w.R, &w.S, &w.dfinal}) std::fill_n(&(*x)[i * N], N, Vt{});
        if (s.dfinal_state) gather(s.dfinal_state, windowed ? &w.dfinal[i * N] : &w.R[i * N], b, k, T(1));
        std::fill_n(&w.sums[i * (N + 2) * L], (N + 2) * L, 0.0);
        if (joined) save_prefixes(b, k, w);
      }
      for (int64_t segment = segments - 1; segment >= 0; segment--)
        each_batch(first, last, [&](int64_t i0, int64_t stop) {
          const Distance next = to_next(i0, stop, first, last, -K);
          if (windowed) backward_segment<true>(b, segment, i0, stop, next, w);
          else backward_segment<false>(b, segment, i0, stop, next, w);
          const int64_t group = block[i0].group;
          if (stop == last || block[stop].group != group) flush(thread, b, segment, group, w);
        });
      for (int64_t i = first; i < last; i++) {
        const Block& k = block[i];
        const double* sums = &w.sums[i * (N + 2) * L];
        if (!SSD) {
          std::vector<Vt> dA(N);
          for (int64_t n = 0; n < N; n++) dA[n] = rounded<T>(sums + n * L);
          scatter(s.dA, dA.data(), b, k);
        }
        const int64_t at = b * s.nheads * s.headdim + k.channel;
        if (s.dD) store<T>((T*)s.dD + at, rounded<T>(sums + N * L), k.width);
        if (s.ddelta_bias) store<T>((T*)s.ddelta_bias + at, rounded<T>(sums + (N + 1) * L), k.width);
        if (s.dinitial_state) {
          Vt* out = &w.R[i * N];  // R = a_1 mu_1; with a window a_1 P_{W-2} (the virtual token 0), where S is a_1
          const Vt *S = &w.S[i * N], *P = joined ? &w.prefix[i * N] : nullptr;
          for (int64_t n = 0; windowed && n < N; n++) out[n] = joined ? times(S[n], P[n]) : Vt{};
          scatter(s.dinitial_state, out, b, k);
        }
      }
    });
  }
  static ALWAYS_INLINE Vt times(Vt S, Vt P) { return S == 0 ? Vt{} : S * P; }  // P may be no number behind a cut

  template <bool WINDOWED>
  void backward_segment(int64_t b, int64_t segment, int64_t first, int64_t last, Distance next, Work& w) const {
    const int64_t begin = segment * K, end = segment_end(segment), ahead = s.window - 1;
    for (int64_t t = begin; t < end; t++)
      for (int64_t i = first; i < last; i++) {
        const Block& k = block[i];
        const int64_t q = (i - first) * K + t - begin;
        Token& x = w.tokens[q];
        prepare(b, t, k, x);
        prefetch_next(b, t, k, next, s.u, s.delta, s.z, s.dy);
        prefetch_written(b, t, k, s.du, s.ddelta, s.dz);
        x.from_B = x.from_a = Vt{};
        x.dy = output_cotangent(b, t, k, x.gate);
        if (!WINDOWED || !ahead || t + ahead >= s.seqlen) continue;
        Vt gate;
        Since& since = w.since[segment * blocks + i];  // used in this segment only
        const bool joins = advance(b, t + ahead, k, channels(s.delta_bias, 0, k), since);
        w.ahead[q] = {since.total, output_cotangent(b, t + ahead, k, gate), joins};
      }
    Vt typical[BATCH];
    for (int64_t i = first; i < last; i++) typical[i - first] = typical_step(&w.tokens[(i - first) * K], end - begin);
    each_states([&](int64_t n, auto count) {
      constexpr int NS = count.value;
      for (int64_t i = first; i < last; i++) {
        const Block& k = block[i];
        Token* x = &w.tokens[(i - first) * K];
        const Vt* A2 = &w.A2[i * N + n];
        Vt *state = checkpoint(b, segment, i) + n, *kept = w.kept.data();
        const auto run = [&](auto steps) {
          constexpr Steps STEPS = steps.value;
          // only the gate's gradient needs y again
          if (s.z.data) run_states<NS, true, true, STEPS>(b, segment, k, n, x, A2, state, kept, nullptr);
          else run_states<NS, true, false, STEPS>(b, segment, k, n, x, A2, state, kept, nullptr);
          if (WINDOWED && ahead) run_prefixes<NS>(b, segment, k, n, &w.ahead[(i - first) * K], w);
          sweep<NS, WINDOWED, STEPS == Steps::EXACT>(b, segment, k, n, x, w);
        };
        if constexpr (WINDOWED) run(With<Steps::ROUNDED>());
        else with_steps<NS>(k, typical[i - first], A2, run);
      }
    });
    for (int64_t i = first; i < last; i++) w.dD[i] = w.dbias[i] = Vt{};
    for (int64_t t = begin; t < end; t++)
      for (int64_t i = first; i < last; i++) finish(b, t, block[i], w.tokens[(i - first) * K + t - begin], w);
    for (int64_t i = first; i < last; i++) {
      double* sums = &w.sums[i * (N + 2) * L];
      add_to<T>(sums + N * L, w.dD[i]);
      add_to<T>(sums + (N + 1) * L, w.dbias[i]);
    }
  }
  // The prefix sums P_{t+W-1} of NS states that the windows of this segment end in
  template <int NS>
  void run_prefixes(int64_t b, int64_t segment, const Block& k, int64_t n0, const typename Work::Ahead* x,
                    Work& w) const {
    const int64_t begin = segment * K, end = segment_end(segment);
    const Vt *A2 = &w.A2[k.index * N + n0], *dfinal = &w.dfinal[k.index * N + n0];
    Vt P[NS];
    for (int n = 0; n < NS; n++) P[n] = w.prefix[(segment * blocks + k.index) * N + n0 + n];
    for (int64_t t = begin; t < end; t++, x++) {
      const int64_t j = t + s.window - 1;
      if (j < s.seqlen && j % s.window == 0) for (int n = 0; n < NS; n++) P[n] = Vt{};
      if (j < s.seqlen && x->joins) add_to_prefix(j, x->since, x->dy, states(s.C, b, j, k) + n0, A2, dfinal, P, NS);
      for (int n = 0; n < NS; n++) w.P[(t - begin) * NS + n] = P[n];
    }
  }
  // The adjoint of NS states through a segment, in reverse
  template <int NS, bool WINDOWED, bool EXACT>
  NEVER_INLINE void sweep(int64_t b, int64_t segment, const Block& k, int64_t n0, Token* x, Work& w) const {
    const int64_t begin = segment * K, end = segment_end(segment), W = s.window, owned = s.seqlen - s.halo;
    const int64_t at = k.index * N + n0, B_stride = s.B.time_stride, C_stride = s.C.time_stride;
    const T *B = states(s.B, b, end - 1, k) + n0, *C = states(s.C, b, end - 1, k) + n0;
    constexpr int KEPT = (2 + EXACT) * NS;
    constexpr bool IN_TURN = (SSD || EXACT) && !WINDOWED;  // R is mu, which the next turn multiplies by its decay
    Vt main[NS], rest[NS], low[NS];                        // that decay's parts; low: in w.S between segments
    for (int n = 0; n < NS; n++) main[n] = splat<T>(1), rest[n] = Vt{}, low[n] = EXACT ? w.S[at + n] : Vt{};
    const Vt *kept = w.kept.data() + (end - begin) * KEPT, *P = w.P.data() + (end - begin) * NS;
    const Vt* dfinal = &w.dfinal[at];
    Vt* dB_dC = w.dB_dC.data() + 2 * (n0 * K + (end - begin) * NS);
    Vt R[NS], S[NS], rate[NS], dA[NS];
    for (int n = 0; n < NS; n++) R[n] = w.R[at + n], S[n] = w.S[at + n], rate[n] = w.A2[at + n], dA[n] = Vt{};
    x += end - begin;
    const auto token = [&](int64_t t, auto owns, auto drops) ALWAYS_INLINE_LAMBDA {
      const Vt delta = x->delta, dy = x->dy, du = x->du;
      const Vt *h = kept, *h0 = kept - KEPT, *decays = h0 + NS, *rests = decays + NS;  // rests: EXACT
      const bool closes = WINDOWED && (t % W == W - 1 || t == s.seqlen - 1);  // last token of its block
      const bool opens = WINDOWED && t % W == 0;                              // first token of its block
      const bool joined = WINDOWED && !opens && (t / W + 1) * W < s.seqlen;   // the window reaches the next block
      Vt from_B{}, from_a{};
#pragma GCC unroll 8
      for (int n = 0; n < NS; n++) {
        const Vt decay = SSD ? splat<T>(x->decay) : drops ? Vt{} : decays[n];
        Vt mu = dy * C[n];
        if (WINDOWED && t == s.seqlen - 1) mu += dfinal[n];
        if (EXACT) mu = exact_step(main[n], rest[n], R[n], mu, low[n]);
        else if (IN_TURN) mu += main[n] * R[n];
        else if (!(WINDOWED && closes)) mu += R[n];
        Vt pulled = EXACT && !SSD && !drops ? decay * mu + rests[n] * mu : decay * mu;
        R[n] = IN_TURN ? mu : pulled;
        if (IN_TURN) main[n] = decay, rest[n] = SSD || drops ? Vt{} : rests[n];
        if (EXACT && SSD) decay_parts(x->decay, main[n], rest[n]);
        if (WINDOWED) {
          if (joined) mu += times(S[n], P[n]), pulled = decay * mu;
          S[n] = opens ? decay : decay * S[n];
        }
        if (drops) R[n] = S[n] = low[n] = Vt{};
        if (owns) {
          dB_dC[n] += mu * du;
          dB_dC[NS + n] += dy * h[n];
          from_B += mu * B[n];
        }
        if (owns && !drops) {
          const Vt through_a = (SSD ? mu : pulled) * h0[n];
          from_a += SSD ? through_a : through_a * rate[n];
          if (!SSD) dA[n] += through_a * delta;
        }
      }
      if (owns) x->from_B += from_B, x->from_a += from_a;
    };
    typedef std::true_type Yes;
    typedef std::false_type No;
    for (int64_t t = end - 1; t >= begin; t--, kept -= KEPT, B -= B_stride, C -= C_stride) {
      x--, P -= NS, dB_dC -= 2 * NS;
      if (t >= owned) x->dropped ? token(t, No(), Yes()) : token(t, No(), No());
      else x->dropped ? token(t, Yes(), Yes()) : token(t, Yes(), No());
    }
    for (int n = 0; n < NS; n++) {
      w.R[at + n] = EXACT ? exact_step(main[n], rest[n], R[n], Vt{}, low[n]) : IN_TURN ? main[n] * R[n] : R[n];
      w.S[at + n] = EXACT ? low[n] : WINDOWED ? S[n] : Vt{};
    }
    for (int n = 0; n < NS && !SSD; n++) add_to<T>(&w.sums[(k.index * (N + 2) + n0 + n) * L], dA[n]);
  }
  // Token t's gradients, from the sums over its states
  ALWAYS_INLINE void finish(int64_t b, int64_t t, const Block& k, const Token& x, Work& w) const {
    const Vt u = channels(s.u, b, t, k), dy = x.dy;
    Vt grad_u{}, grad_delta{}, dz{};
    if (t < s.seqlen - s.halo) {
      dz = x.gate * x.y;
      grad_u = x.delta * x.from_B + channels(s.D, 0, k) * dy;
      w.dD[k.index] += dy * u;
      grad_delta = SSD ? u * x.from_B : (u * x.from_B + x.from_a * T(LN2)) * x.slope;
      w.dbias[k.index] += grad_delta;
    }
    if (!SSD && s.z.data) store<T>(row<T>(s.dz, b, t) + k.channel, dz, k.width);
    store<T>(row<T>(s.du, b, t) + k.channel, grad_u, k.width);
    if (SSD) {
      row<T>(s.ddelta, b, t)[k.index] = lane_sum(grad_delta);
      row<T>(s.ddecay, b, t)[k.index] = lane_sum(x.from_a);
    } else {
      store<T>(row<T>(s.ddelta, b, t) + k.channel, grad_delta, k.width);
    }
  }
  // dB and dC are sums over channels: across lanes here, across threads by the caller, if there are several
  // partials; else no two threads have the same group. A thread comes to a group's tokens once.
  void flush(int64_t thread, int64_t b, int64_t segment, int64_t group, Work& w) const {
    const int64_t begin = segment * K, end = segment_end(segment);
    const int64_t part = s.partials > 1 ? thread : 0;
    each_states([&](int64_t n0, auto count) {
      Vt* sums = &w.dB_dC[2 * n0 * K];
      for (int64_t t = begin; t < end; t++) {
        const int64_t at = (((part * s.batch + b) * s.seqlen + t) * s.ngroups + group) * N + n0;
        for (T* out : {(T*)s.dB, (T*)s.dC})
          for (int n = 0; n < count.value; n++, sums++) out[at + n] = lane_sum(*sums), *sums = Vt{};
      }
    });
  }
};

// Mamba-2's decays in place of their exponents, and 0 where a document begins. Those near 1 may round the same way at each
// token: what rounding takes from one is added to the next.
template <class T> void make_decays(const ScanArgs& s) {
  constexpr int64_t TOKENS = 64;
  std::vector<T> rounded_off(TOKENS * s.nheads), to_next(s.nheads);
  for (int64_t b = 0; b < s.batch; b++) {
    std::fill(to_next.begin(), to_next.end(), T(0));
    for (int64_t first = 0; first < s.seqlen; first += TOKENS) {
      const int64_t tokens = s.seqlen - first < TOKENS ? s.seqlen - first : TOKENS, count = tokens * s.nheads;
      T *decays = row<T>(s.decay, b, first), *off = rounded_off.data(), *next = to_next.data();
      each_vector<T>(count, 0, (count + Vec<T>::L - 1) / Vec<T>::L, [=](int64_t, int64_t i, int width) {
        V<T> main, more;
        exp2_parts(load<T>(decays + i, width) * T(LOG2E), main, more);
        const V<T> decay = main + more;
        store<T>(decays + i, decay, width);
        store<T>(off + i, more - (decay - main), width);
      });
      for (int64_t t = first; t < first + tokens; t++, decays += s.nheads, off += s.nheads) {
        if (s.reset && s.reset[b * s.seqlen + t]) {
          std::memset(decays, 0, s.nheads * sizeof(T));
          continue;
        }
        for (int64_t h = 0; h < s.nheads; h++) {
          const T decay = decays[h], left = next[h] + off[h], balanced = decay + left;
          const bool near_1 = decay > T(0.5) && decay < T(2);
          next[h] = near_1 ? left - (balanced - decay) : next[h];
          decays[h] = near_1 ? balanced : decay;
        }
      }
    }
  }
}
template <class T, bool SSD> void run(const ScanArgs& s, bool backward) {
  Scan<T, SSD> scan(s);
  parallel(s.threads, [&](int64_t i) { backward ? scan.backward(i) : scan.forward(i); });
}
template <class T> void dispatch(const ScanArgs& s, bool ssd, bool backward) {
  if (ssd) make_decays<T>(s);
  if (ssd) run<T, true>(s, backward);
  else run<T, false>(s, backward);
}

}  // namespace

extern "C" {
int adjoint_vector_bytes() { return VECTOR_BYTES; }
void adjoint_scan_f32(const ScanArgs* s, int ssd, int backward) { dispatch<float>(*s, ssd, backward); }
void adjoint_scan_f64(const ScanArgs* s, int ssd, int backward) { dispatch<double>(*s, ssd, backward); }
}
