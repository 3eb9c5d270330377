// Selective scan (Mamba-1) and SSD scan (Mamba-2) on the CPU: forward and adjoint.
//
//   h_t = a_t h_{t-1} + delta_t u_t B_t,   y_t = C_t . h_t + D u_t,   out_t = y_t silu(z_t)
//
// Mamba-1 has a_t = exp(delta_t A) for every channel and state; in Mamba-2 a_t and delta_t are one number a
// head, computed by the caller. Lanes are channels, so every load of u, delta, z is contiguous and nothing is
// summed across lanes in the inner loop. Time is cut into segments of `interval` tokens: forward saves
// the state before each segment, backward recomputes a segment's states into cache and sweeps it in reverse.
//
// Adjoint (mu is the accumulated adjoint state, g_t = dy_t C_t):   mu_t = g_t + a_{t+1} mu_{t+1}.
// With a window W, mu_t sums only g_t .. g_{t+W-1}: blocks of W tokens, a suffix scan (R, S) inside the block
// and a prefix scan (P) in the next one, joined as mu_t = R_t + S_t P_{t+W-1}. No subtraction, no division.
#include "scan.h"

namespace {

struct Block { int64_t index, channel, head, group; int width; };  // up to L channels of one head

template <class T, int NS, bool SSD> struct Scan {
  typedef V<T> Vt;
  static constexpr int L = Vec<T>::L;
  const ScanArgs& s;
  const int64_t segments, blocks_per_head, blocks;

  explicit Scan(const ScanArgs& args)
      : s(args), segments((args.seqlen + args.interval - 1) / args.interval),
        blocks_per_head((args.headdim + L - 1) / L), blocks(blocks_per_head * args.nheads) {}

  // a function, so that the compiler sees a constant and keeps states in registers
  ALWAYS_INLINE int64_t states() const { return NS ? NS : s.d_state; }
  Block block(int64_t i) const {
    int64_t head = i / blocks_per_head, first = (i % blocks_per_head) * L;
    int64_t left = s.headdim - first;
    return {i, head * s.headdim + first, head, head / (s.nheads / s.ngroups), int(left < L ? left : L)};
  }
  Vt* checkpoint(int64_t b, int64_t segment, int64_t i) const {
    const int64_t N = states();
    return (Vt*)s.checkpoints + ((b * segments + segment) * blocks + i) * N;
  }
  // (channels, d_state) rows <-> one vector of channels for each state
  void gather(const void* rows, Vt* out, int64_t b, const Block& k, T factor) const {
    const int64_t N = states();
    const T* p = (const T*)rows + (b * s.nheads * s.headdim + k.channel) * N;
    for (int64_t n = 0; n < N; n++) {
      out[n] = Vt{};
      for (int l = 0; l < k.width; l++) out[n][l] = p[l * N + n] * factor;
    }
  }
  void scatter(void* rows, const Vt* in, int64_t b, const Block& k) const {
    const int64_t N = states();
    T* p = (T*)rows + (b * s.nheads * s.headdim + k.channel) * N;
    for (int64_t n = 0; n < N; n++)
      for (int l = 0; l < k.width; l++) p[l * N + n] = in[n][l];
  }
  ALWAYS_INLINE Vt channels(const void* p, int64_t b, const Block& k) const {
    return p ? load<T>((const T*)p + b * s.nheads * s.headdim + k.channel, k.width) : Vt{};
  }
  // Whether nothing is carried to token t: there a NaN before it must not be multiplied by 0, but left out. Mamba-2's
  // caller says it by a decay of 0.
  ALWAYS_INLINE bool dropped(int64_t b, int64_t t, T head_decay) const {
    return SSD ? head_decay == 0 : s.reset && s.reset[b * s.seqlen + t];
  }

  ALWAYS_INLINE void step_size(int64_t b, int64_t t, const Block& k, Vt bias, Vt& delta, Vt& slope) const {
    if (SSD) {
      delta = splat<T>(row<T>(s.delta, b, t)[k.head]);
      slope = splat<T>(1);
      return;
    }
    Vt raw = load<T>(row<T>(s.delta, b, t) + k.channel, k.width) + bias;
    if (s.softplus) softplusv<T>(raw, delta, slope);
    else { delta = raw; slope = splat<T>(1); }
  }
  // a_t of state n: A2 holds A log2(e)
  ALWAYS_INLINE Vt decay(const Vt* A2, int64_t n, Vt delta, T head_decay) const {
    return SSD ? splat<T>(head_decay) : exp2v<T>(delta * A2[n]);
  }
  ALWAYS_INLINE T head_decay(int64_t b, int64_t t, const Block& k) const {
    return SSD ? row<T>(s.decay, b, t)[k.head] : T(0);
  }

  // ------------------------------------------------------------------------------------------- forward
  void forward(int64_t thread) const {
    const int64_t N = states();
    std::vector<Vt> state(blocks * N), A2(blocks * N);
    const int64_t units = s.batch * blocks;
    const int64_t lo = units * thread / s.threads, hi = units * (thread + 1) / s.threads;
    for (int64_t b = lo / blocks; b < s.batch && b * blocks < hi; b++) {
      const int64_t first = b * blocks < lo ? lo - b * blocks : 0;
      const int64_t last = hi - b * blocks < blocks ? hi - b * blocks : blocks;
      for (int64_t i = first; i < last; i++) {
        Block k = block(i);
        if (!SSD) gather(s.A, &A2[i * N], 0, k, T(LOG2E));
        if (s.initial_state) gather(s.initial_state, &state[i * N], b, k, T(1));
        else for (int64_t n = 0; n < N; n++) state[i * N + n] = Vt{};
      }
      for (int64_t segment = 0; segment < segments; segment++)
        for (int64_t i = first; i < last; i++) {
          if (s.checkpoints) std::memcpy((void*)checkpoint(b, segment, i), (void*)&state[i * N], N * sizeof(Vt));
          forward_segment(b, segment, block(i), &A2[i * N], &state[i * N]);
        }
      if (s.final_state)
        for (int64_t i = first; i < last; i++) scatter(s.final_state, &state[i * N], b, block(i));
    }
  }
  void forward_segment(int64_t b, int64_t segment, Block k, const Vt* A2, Vt* state) const {
    const int64_t N = states();
    Vt h[NS ? NS : 1];
    Vt* hp = NS ? h : state;
    if (NS) for (int n = 0; n < NS; n++) h[n] = state[n];
    const Vt bias = channels(s.delta_bias, 0, k), D = channels(s.D, 0, k);
    const int64_t begin = segment * s.interval;
    const int64_t end = begin + s.interval < s.seqlen ? begin + s.interval : s.seqlen;
    for (int64_t t = begin; t < end; t++) {
      Vt delta, slope;
      step_size(b, t, k, bias, delta, slope);
      const Vt u = load<T>(row<T>(s.u, b, t) + k.channel, k.width), du = delta * u;
      const T *B = row<T>(s.B, b, t) + k.group * N, *C = row<T>(s.C, b, t) + k.group * N;
      const T ha = head_decay(b, t, k);
      if (dropped(b, t, ha)) for (int64_t n = 0; n < N; n++) hp[n] = Vt{};
      Vt y = D * u, y2{};
#pragma GCC unroll 4
      for (int64_t n = 0; n < N; n++) {
        hp[n] = decay(A2, n, delta, ha) * hp[n] + du * B[n];
        if (n & 1) y2 += hp[n] * C[n]; else y += hp[n] * C[n];
      }
      y += y2;
      if (s.z.data) {
        const Vt z = load<T>(row<T>(s.z, b, t) + k.channel, k.width);
        y *= z * sigmoidv<T>(z);
      }
      store<T>(row<T>(s.y, b, t) + k.channel, y, k.width);
    }
    if (NS) for (int n = 0; n < NS; n++) state[n] = h[n];
  }

  // ------------------------------------------------------------------------------------------ backward
  // What the prefix sums P of a block of W tokens need of the decays since the block's first token: in Mamba-2 their
  // product; in Mamba-1, where a product of exp(delta A) is the exp of a sum, the sum of delta (with Kahan's
  // correction). And whether a document has begun, which ends the block's sums.
  struct Since { Vt total, low; bool cut; };
  struct Work {  // one thread's scratch
    std::vector<Vt> h, a, dB, dC, P;           // (interval + 1 | interval, d_state)
    std::vector<Vt> u, delta, slope, dy;       // (interval)
    std::vector<Vt> A2, R, S, dA;              // (blocks, d_state); R and S carry over from segment to segment
    std::vector<Vt> dD, dbias;                 // (blocks)
    std::vector<Vt> prefix;                    // (segments, blocks, d_state): P before the segment's first need
    std::vector<Since> since;                  // (segments, blocks)
    std::vector<Vt> sums;                      // (d_state): the running P where it is too large for registers
    std::vector<Vt> none;                      // (d_state): zeros, the state before a document
  };

  ALWAYS_INLINE Vt output_cotangent(int64_t b, int64_t t, const Block& k) const {  // dL/dy_t before the gate
    Vt dy = load<T>(row<T>(s.dy, b, t) + k.channel, k.width);
    if (s.z.data) {
      const Vt z = load<T>(row<T>(s.z, b, t) + k.channel, k.width);
      dy *= z * sigmoidv<T>(z);
    }
    return dy;
  }
  // P_j from P_{j-1}.
  ALWAYS_INLINE void prefix_step(int64_t b, int64_t j, const Block& k, const Vt* A2, Vt bias, const Vt* dfinal,
                                 Vt* P, Since& since) const {
    const int64_t N = states();
    const bool first = j % s.window == 0, last = j == s.seqlen - 1;
    if (first) {
      since = {splat<T>(SSD ? 1 : 0), Vt{}, false};
      for (int64_t n = 0; n < N; n++) P[n] = Vt{};
    } else if (SSD) {
      const T ha = head_decay(b, j, k);
      since.cut |= dropped(b, j, ha);
      if (since.cut) return;
      since.total *= ha;
    } else {
      since.cut |= dropped(b, j, 0);
      if (since.cut) return;
      Vt delta, slope;
      step_size(b, j, k, bias, delta, slope);
      const Vt term = delta - since.low, total = since.total + term;
      since.low = (total - since.total) - term;
      since.total = total;
    }
    const Vt dy = output_cotangent(b, j, k);
    const T* C = row<T>(s.C, b, j) + k.group * N;
    if (SSD) {
      const Vt scaled = since.total * dy;
      for (int64_t n = 0; n < N; n++) P[n] += scaled * C[n];
      if (last) for (int64_t n = 0; n < N; n++) P[n] += since.total * dfinal[n];
    } else {
      for (int64_t n = 0; n < N; n++) P[n] += exp2v<T>(since.total * A2[n]) * (dy * C[n]);
      if (last) for (int64_t n = 0; n < N; n++) P[n] += exp2v<T>(since.total * A2[n]) * dfinal[n];
    }
  }

  void backward(int64_t thread) const {
    const int64_t N = states();
    const int64_t K = s.interval;
    const bool windowed = s.window > 0;
    Work w;
    for (auto* x : {&w.a, &w.dB, &w.dC, &w.P}) x->resize(K * N);
    w.h.resize((K + 1) * N);
    w.sums.resize(N);
    w.none.resize(N);
    for (auto* x : {&w.u, &w.delta, &w.slope, &w.dy}) x->resize(K);
    for (auto* x : {&w.A2, &w.R, &w.S, &w.dA}) x->resize(blocks * N);
    for (auto* x : {&w.dD, &w.dbias}) x->resize(blocks);
    std::vector<Vt> dfinal(blocks * N);
    if (windowed) w.prefix.resize(segments * blocks * N), w.since.resize(segments * blocks);
    const int64_t units = s.batch * blocks;
    const int64_t lo = units * thread / s.threads, hi = units * (thread + 1) / s.threads;
    for (int64_t b = lo / blocks; b < s.batch && b * blocks < hi; b++) {
      const int64_t first = b * blocks < lo ? lo - b * blocks : 0;
      const int64_t last = hi - b * blocks < blocks ? hi - b * blocks : blocks;
      for (int64_t i = first; i < last; i++) {
        Block k = block(i);
        if (!SSD) gather(s.A, &w.A2[i * N], 0, k, T(LOG2E));
        for (int64_t n = 0; n < N; n++) w.dA[i * N + n] = w.R[i * N + n] = w.S[i * N + n] = dfinal[i * N + n] = Vt{};
        if (s.dfinal_state) gather(s.dfinal_state, windowed ? &dfinal[i * N] : &w.R[i * N], b, k, T(1));
        w.dD[i] = w.dbias[i] = Vt{};
        if (s.window > 1) save_prefixes(b, k, &w.A2[i * N], &dfinal[i * N], w);
      }
      for (int64_t segment = segments - 1; segment >= 0; segment--) {
        std::fill(w.dB.begin(), w.dB.end(), Vt{});
        std::fill(w.dC.begin(), w.dC.end(), Vt{});
        for (int64_t i = first; i < last; i++) {
          Block k = block(i);
          if (windowed) backward_segment<true>(b, segment, k, &dfinal[i * N], w);
          else backward_segment<false>(b, segment, k, nullptr, w);
          if (i + 1 == last || block(i + 1).group != k.group) flush(thread, b, segment, k.group, w);
        }
      }
      for (int64_t i = first; i < last; i++) {
        Block k = block(i);
        if (!SSD) scatter(s.dA, &w.dA[i * N], b, k);
        const int64_t at = b * s.nheads * s.headdim + k.channel;
        if (s.dD) store<T>((T*)s.dD + at, w.dD[i], k.width);
        if (s.ddelta_bias) store<T>((T*)s.ddelta_bias + at, w.dbias[i], k.width);
        if (s.dinitial_state) {
          Vt* out = &w.R[i * N];  // R = a_1 mu_1; with a window a_1 P_{W-2} (the virtual token 0)
          if (windowed && s.window > 1) {
            const Vt *P = &w.prefix[i * N], *S = &w.S[i * N];  // the first segment's P; S is a_1
            for (int64_t n = 0; n < N; n++) out[n] = S[SSD ? 0 : n] * P[n];
          } else if (windowed) {
            for (int64_t n = 0; n < N; n++) out[n] = Vt{};
          }
          scatter(s.dinitial_state, out, b, k);
        }
      }
    }
  }
  // The prefix sums that segment [s, e) starts from: after token s + W - 2 (or after the last token).
  void save_prefixes(int64_t b, const Block& k, const Vt* A2, const Vt* dfinal, Work& w) const {
    const int64_t N = states(), W = s.window;
    Vt sums[NS ? NS : 1];
    Vt* P = NS ? sums : w.sums.data();
    Since since;
    const Vt bias = channels(s.delta_bias, 0, k);
    int64_t j = 0;
    for (int64_t segment = 0; segment < segments; segment++) {
      const int64_t end = segment * s.interval + W - 1 < s.seqlen ? segment * s.interval + W - 1 : s.seqlen;
      const int64_t start = (end - 1) / W * W;  // P begins again with each block of W tokens
      for (j = start > j ? start : j; j < end; j++) prefix_step(b, j, k, A2, bias, dfinal, P, since);
      std::memcpy((void*)&w.prefix[(segment * blocks + k.index) * N], (void*)P, N * sizeof(Vt));
      w.since[segment * blocks + k.index] = since;
    }
  }

  template <bool WINDOWED>
  void backward_segment(int64_t b, int64_t segment, Block k, const Vt* dfinal, Work& w) const {
    const int64_t N = states();
    const int64_t K = s.interval, begin = segment * K, W = s.window;
    const int64_t end = begin + K < s.seqlen ? begin + K : s.seqlen, owned = s.seqlen - s.halo;
    const Vt bias = channels(s.delta_bias, 0, k), D = channels(s.D, 0, k);
    const Vt* A2 = &w.A2[k.index * N];
    Vt *S = &w.S[k.index * N], *dA = &w.dA[k.index * N];

    // 1. states of this segment again, and the gate's gradient
    std::memcpy((void*)w.h.data(), (void*)checkpoint(b, segment, k.index), N * sizeof(Vt));
    for (int64_t t = begin; t < end; t++) {
      const int64_t q = t - begin;
      Vt delta, slope;
      step_size(b, t, k, bias, delta, slope);
      const Vt u = load<T>(row<T>(s.u, b, t) + k.channel, k.width), du = delta * u;
      const T *B = row<T>(s.B, b, t) + k.group * N, *C = row<T>(s.C, b, t) + k.group * N;
      const T ha = head_decay(b, t, k);
      const bool drop = dropped(b, t, ha);
      const Vt* h0 = drop ? w.none.data() : &w.h[q * N];
      Vt *h = &w.h[(q + 1) * N], *a = &w.a[q * N];
      const bool gated = !SSD && s.z.data;  // only the gate's gradient needs y again
      Vt y = D * u;
      for (int64_t n = 0; n < N; n++) {
        const Vt an = !SSD && drop ? Vt{} : decay(A2, n, delta, ha);
        if (!SSD) a[n] = an;
        const Vt hn = an * h0[n] + du * B[n];
        h[n] = hn;
        if (gated) y += hn * C[n];
      }
      Vt dy = load<T>(row<T>(s.dy, b, t) + k.channel, k.width);
      if (gated) {
        const Vt z = load<T>(row<T>(s.z, b, t) + k.channel, k.width), sig = sigmoidv<T>(z);
        Vt dz = dy * y * sig * (1 + z * (1 - sig));
        if (t >= owned) dz = Vt{};
        store<T>(row<T>(s.dz, b, t) + k.channel, dz, k.width);
        dy *= z * sig;
      }
      w.u[q] = u; w.delta[q] = delta; w.slope[q] = slope; w.dy[q] = dy;
    }
    // 2. the prefix sums P_{t+W-1} that the windows of this segment end in
    if (WINDOWED && W > 1) {
      Vt sums[NS ? NS : 1];
      Vt* P = NS ? sums : w.sums.data();
      const Vt* saved = &w.prefix[(segment * blocks + k.index) * N];
      for (int64_t n = 0; n < N; n++) P[n] = saved[n];
      Since since = w.since[segment * blocks + k.index];
      for (int64_t t = begin; t < end; t++) {
        if (t + W - 1 < s.seqlen) prefix_step(b, t + W - 1, k, A2, bias, dfinal, P, since);
        for (int64_t n = 0; n < N; n++) w.P[(t - begin) * N + n] = P[n];
      }
    }
    // 3. the reverse sweep; the carry lives in registers where the state's size is known
    Vt carry[NS ? NS : 1];
    Vt* R = NS ? carry : &w.R[k.index * N];
    if (NS) for (int n = 0; n < NS; n++) carry[n] = w.R[k.index * N + n];
    for (int64_t t = end - 1; t >= begin; t--) {
      const int64_t q = t - begin;
      const Vt u = w.u[q], delta = w.delta[q], dy = w.dy[q], du = delta * u;
      const T *B = row<T>(s.B, b, t) + k.group * N, *C = row<T>(s.C, b, t) + k.group * N;
      const T ha = head_decay(b, t, k);
      const bool drop = dropped(b, t, ha);
      const Vt *h0 = drop ? w.none.data() : &w.h[q * N], *h = &w.h[(q + 1) * N], *a = &w.a[q * N];
      Vt *dB = &w.dB[q * N], *dC = &w.dC[q * N];
      Vt from_B{}, from_a{};
      const bool own = t < owned;
      const bool closes = WINDOWED && (t % W == W - 1 || t == s.seqlen - 1);        // last token of its block
      const bool opens = WINDOWED && t % W == 0;                                     // first token of its block
      const bool joined = WINDOWED && !opens && (t / W + 1) * W < s.seqlen;          // the window reaches the next block
      const Vt* P = &w.P[q * N];
      for (int64_t n = 0; n < N; n++) {
        const Vt an = SSD ? splat<T>(ha) : a[n];
        Vt g = dy * C[n];
        if (WINDOWED && t == s.seqlen - 1) g += dfinal[n];
        Vt mu = WINDOWED && closes ? g : R[n] + g;
        R[n] = an * mu;
        if (WINDOWED) {
          if (joined) mu += S[SSD ? 0 : n] == 0 ? Vt{} : S[SSD ? 0 : n] * P[n];  // P may be no number behind a cut
          if (!SSD) S[n] = opens ? an : an * S[n];
        }
        if (!own) continue;
        dC[n] += dy * h[n];
        dB[n] += mu * du;
        from_B += mu * B[n];
        if (SSD) from_a += mu * h0[n];
        else {
          const Vt through_a = mu * an * h0[n];
          dA[n] += through_a * delta;
          from_a += through_a * A2[n];
        }
      }
      if (WINDOWED && SSD) S[0] = opens ? splat<T>(ha) : ha * S[0];
      if (drop) {
        for (int64_t n = 0; n < N; n++) R[n] = Vt{};
        if (WINDOWED) for (int64_t n = 0; n < (SSD ? 1 : N); n++) S[n] = Vt{};
      }
      Vt grad_u{}, grad_delta{};
      if (own) {
        grad_u = delta * from_B + D * dy;
        w.dD[k.index] += dy * u;
        grad_delta = SSD ? u * from_B : (u * from_B + from_a * T(LN2)) * w.slope[q];
        w.dbias[k.index] += grad_delta;
      }
      store<T>(row<T>(s.du, b, t) + k.channel, grad_u, k.width);
      if (SSD) {
        row<T>(s.ddelta, b, t)[k.index] = lane_sum(grad_delta);
        row<T>(s.ddecay, b, t)[k.index] = lane_sum(from_a);
      } else {
        store<T>(row<T>(s.ddelta, b, t) + k.channel, grad_delta, k.width);
      }
    }
    if (NS) for (int n = 0; n < NS; n++) w.R[k.index * N + n] = carry[n];
  }
  // dB and dC are sums over channels: across lanes here, across threads by the caller, if there are several
  // partials; else no two threads have the same group. A thread comes to a group's tokens once.
  void flush(int64_t thread, int64_t b, int64_t segment, int64_t group, Work& w) const {
    const int64_t N = states();
    const int64_t begin = segment * s.interval;
    const int64_t end = begin + s.interval < s.seqlen ? begin + s.interval : s.seqlen;
    const int64_t part = s.partials > 1 ? thread : 0;
    for (int64_t t = begin; t < end; t++) {
      const int64_t at = (((part * s.batch + b) * s.seqlen + t) * s.ngroups + group) * N, q = (t - begin) * N;
      for (int64_t n = 0; n < N; n++) {
        ((T*)s.dB)[at + n] = lane_sum(w.dB[q + n]);
        ((T*)s.dC)[at + n] = lane_sum(w.dC[q + n]);
        w.dB[q + n] = w.dC[q + n] = Vt{};
      }
    }
  }
};

template <class T, int NS, bool SSD> void run(const ScanArgs& s, bool backward) {
  Scan<T, NS, SSD> scan(s);
  parallel(s.threads, [&](int64_t i) { backward ? scan.backward(i) : scan.forward(i); });
}
template <class T> void dispatch(const ScanArgs& s, bool ssd, bool backward) {
  if (ssd) run<T, 0, true>(s, backward);
  else if (s.d_state == 16) run<T, 16, false>(s, backward);
  else run<T, 0, false>(s, backward);
}

}  // namespace

extern "C" {
int adjoint_vector_bytes() { return VECTOR_BYTES; }
void adjoint_scan_f32(const ScanArgs* s, int ssd, int backward) { dispatch<float>(*s, ssd, backward); }
void adjoint_scan_f64(const ScanArgs* s, int ssd, int backward) { dispatch<double>(*s, ssd, backward); }
}
