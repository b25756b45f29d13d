// The equations are in cpu/verify_kernel.h. One block works on one item: a row of the step, a head,
// and a tile of 32 rows of its state. The tile is read once, into registers: a warp holds four
// state rows, a lane every 128th group of four elements. Sums run in one order that depends on the
// row alone; no result depends on the grid, the batch, or (scalar decays) on how many drafts came
// with a token.
//
//   LoadState, LoadDrafts   the tile; q and k to shared memory; the drafts' records appended
//   Weigh...                W, A and the decayed vectors, per decay kind
//   ReadState               S x~
//   Rederive                u of the committed records from HP (two precisions, delta rules)
//   AddRecords              + W u, A u of the committed records
//   SolveDrafts             u of the drafts, rounded and appended (delta rules)
//   WriteOutputs
//   Fold                    S' from the tile in registers (rows that fold)
#include "kernels/cuda/codec.cuh"
#include "kernels/cuda/verify_general.h"

namespace ssmd::cuda {
namespace {

constexpr uint32_t kWarps = 8;
constexpr uint32_t kThreads = 32 * kWarps;
constexpr uint32_t kRowsPerWarp = 4;
constexpr uint32_t kTileRows = kWarps * kRowsPerWarp;
static_assert(kTileRows == 32, "a lane per state row of a tile");
static_assert(kThreads >= kDimMax, "a thread per key channel");
constexpr uint32_t kKeyChunk = 16;  // KDA: decayed keys in shared memory at a time
constexpr uint32_t kBlocksPerSm = 8;

// Rows that read HP then get u of the committed records from it: what was recorded was computed
// against LP.
__host__ __device__ inline bool Rederives(const LayerShape& shape, const Formats& formats) {
  return shape.family != Family::kMamba2 && formats.checkpoint_lp != Dtype::kNone;
}

// Offsets into dynamic shared memory, in bytes. h + T never exceeds R.
struct SharedLayout {
  uint32_t log_decay, x, decayed_x, weight, sum, draft_u, keys, record_u, record_weight, bytes;

  __host__ __device__ static SharedLayout Make(const LayerShape& shape, const Formats& formats,
                                               uint32_t ring_records, uint32_t draft_tokens) {
    const bool rederives = Rederives(shape, formats);
    const bool channelwise = shape.family == Family::kKda;
    const uint32_t vectors = shape.family == Family::kMamba2 ? draft_tokens : 2 * draft_tokens;
    SharedLayout at{};
    auto place = [&](uint32_t bytes) {
      const uint32_t offset = at.bytes;
      at.bytes += (bytes + 15) / 16 * 16;
      return offset;
    };
    at.log_decay = place(channelwise ? 0 : ring_records * 8);
    at.x = place(vectors * shape.d_k * 4);
    at.decayed_x = place(channelwise ? vectors * shape.d_k * 4 : 0);
    at.weight = place(vectors * ring_records * 4);
    at.sum = place(vectors * kTileRows * 4);
    at.draft_u = place(draft_tokens * kTileRows * 4);
    at.keys = place(channelwise ? kKeyChunk * shape.d_k * 4 : 0);
    at.record_u = place(rederives ? ring_records * kTileRows * 4 : 0);
    at.record_weight = place(rederives ? kWarps * ring_records * 4 : 0);
    return at;
  }
};

// The records of one slot and layer, as a block of one head sees them.
struct Records {
  const LayerShape& shape;
  const DeviceRingLayout& ring;
  std::byte* slot;
  Dtype activation, value_dtype;
  uint32_t head, group, lane_head;  // lane_head: of the group
  uint64_t base;
  uint32_t tile;
  const float* rederived = nullptr;  // [record][row of the tile]: u in place of the recorded ones

  __device__ uint32_t Row(uint64_t j) const {
    return static_cast<uint32_t>((base + j) % ring.ring_records);
  }
  __device__ std::byte* At(const RingRuns& runs, uint32_t run, uint64_t j) const {
    return slot + runs.offset_bytes + (uint64_t{run} * ring.ring_records + Row(j)) * runs.row_bytes;
  }
  __device__ std::byte* Key(uint64_t j) const { return At(ring.key, group, j); }
  __device__ std::byte* Value(uint64_t j) const { return At(ring.value, head, j); }
  __device__ std::byte* Target(uint64_t j) const { return At(ring.target, head, j); }
  __device__ float* Beta(uint64_t j) const {
    return reinterpret_cast<float*>(At(ring.beta, group, j)) + lane_head;
  }
  __device__ float* LogAlpha(uint64_t j) const {
    if (shape.family == Family::kKda) return reinterpret_cast<float*>(At(ring.log_alpha, head, j));
    return reinterpret_cast<float*>(At(ring.log_alpha, group, j)) + lane_head;
  }
  __device__ float* ValueScale(uint64_t j) const {
    return reinterpret_cast<float*>(At(ring.value_scale, group, j)) + lane_head;
  }
  // u of a committed record; Mamba-2: dt * x. v is in the tile.
  __device__ float U(uint64_t j, uint32_t v) const {
    if (rederived != nullptr) return rederived[j * kTileRows + v % kTileRows];
    const float value = LoadAs(value_dtype, Value(j), v);
    return shape.family == Family::kMamba2 ? *ValueScale(j) * value : value;
  }
};

__device__ Records MakeRecords(const LayerShape& shape, const Formats& formats,
                               const DeviceRingLayout& ring, const std::byte* rings, uint32_t slot,
                               uint32_t head, uint32_t tile, uint64_t base) {
  const uint32_t heads_per_group = shape.head_count / shape.key_group_count;
  return {.shape = shape,
          .ring = ring,
          .slot = const_cast<std::byte*>(rings) + uint64_t{slot} * ring.slot_bytes,
          .activation = formats.activation,
          .value_dtype = shape.family == Family::kMamba2 ? formats.activation : formats.correction,
          .head = head,
          .group = head / heads_per_group,
          .lane_head = head % heads_per_group,
          .base = base,
          .tile = tile};
}

__device__ float WarpSum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

__device__ float Dot(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

__device__ float DecayOf(double log_sum) { return expf(fminf(static_cast<float>(log_sum), 0.0f)); }

// Four state rows of a warp. Lane l holds elements 4 (l + 32 i) .. + 3 of each.
template <uint32_t kVectors>
struct StateRows {
  float4 value[kRowsPerWarp][kVectors];
};

__device__ inline uint32_t Element(uint32_t i) { return 4 * (threadIdx.x % 32 + 32 * i); }
__device__ inline uint32_t FirstRow(uint32_t tile) {
  return tile * kTileRows + threadIdx.x / 32 * kRowsPerWarp;
}

template <uint32_t kVectors>
__device__ void LoadState(const LayerShape& shape, const CheckpointSource& source, uint32_t head,
                          uint32_t tile, StateRows<kVectors>& state) {
  const uint32_t d_k = shape.d_k, first = FirstRow(tile);
#pragma unroll
  for (uint32_t r = 0; r < kRowsPerWarp; ++r) {
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) {
      const bool inside = first + r < shape.d_v && Element(i) < d_k;
      state.value[r][i] =
          inside ? source.Four((uint64_t{head} * shape.d_v + first + r) * d_k + Element(i))
                 : float4{0, 0, 0, 0};
    }
  }
}

// Sums of logs up to and including each record, scalar decays; `values` are they themselves.
__device__ void SumLogDecays(const Records& records, uint32_t committed, uint32_t total,
                             const float* draft_log_alpha, uint32_t draft_stride,
                             double* log_decay) {
  for (uint32_t j = threadIdx.x; j < total; j += kThreads) {
    double sum = 0;
    for (uint32_t i = 0; i <= j; ++i) {
      sum += i < committed ? *records.LogAlpha(i)
                           : draft_log_alpha[uint64_t{i - committed} * draft_stride];
    }
    log_decay[j] = sum;
  }
}

// keys[j - first] := gamma_{j+1:end} * k_j for j in [first, first + kKeyChunk), channelwise, by the
// thread of each channel, whose `suffix` is the sum of logs behind the chunk, and then behind what
// is before it. Chunks come last first.
__device__ void DecayKeys(const Records& records, uint32_t first, uint32_t end, double& suffix,
                          float* keys) {
  const uint32_t d_k = records.shape.d_k, c = threadIdx.x;
  if (c >= d_k) return;
  for (uint32_t j = min(first + kKeyChunk, end); j-- > first;) {
    keys[(j - first) * d_k + c] = LoadAs(records.activation, records.Key(j), c) * DecayOf(suffix);
    suffix += records.LogAlpha(j)[c];
  }
}

// The sum of all logs of one channel: what DecayKeys ends with.
__device__ double SumOfChannel(const Records& records, uint32_t count, uint32_t c) {
  double sum = 0;
  for (uint32_t j = count; j-- > 0;) sum += records.LogAlpha(j)[c];
  return sum;
}

// The dot product of a warp.
template <uint32_t kVectors>
__device__ float DotOf(const float4 (&a)[kVectors], const float4 (&b)[kVectors]) {
  float sum = 0;
#pragma unroll
  for (uint32_t i = 0; i < kVectors; ++i) sum = Dot(a[i], b[i], sum);
  return WarpSum(sum);
}

template <uint32_t kVectors>
__device__ void LoadKey(const Records& records, uint32_t j, float4 (&key)[kVectors]) {
#pragma unroll
  for (uint32_t i = 0; i < kVectors; ++i)
    key[i] = Element(i) < records.shape.d_k
                 ? LoadFourAs(records.activation, records.Key(j), Element(i))
                 : float4{0, 0, 0, 0};
}

__device__ float4 DecayFour(const float4& a, const float* log_alpha) {
  return {a.x * DecayOf(log_alpha[0]), a.y * DecayOf(log_alpha[1]), a.z * DecayOf(log_alpha[2]),
          a.w * DecayOf(log_alpha[3])};
}

// u_j = beta_j (v_j - S k~_j - sum_{i < j} u_i A_ij) for the first `count` records, into
// u[j][row of the tile]; FP32, never rounded. `weight`: kWarps rows of R. Called by the whole
// block.
template <uint32_t kVectors>
__device__ void Rederive(const Records& records, uint32_t count, const double* log_decay,
                         float* keys, const StateRows<kVectors>& state, float* u, float* weight) {
  const LayerShape& shape = records.shape;
  const uint32_t d_k = shape.d_k, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool channelwise = shape.family == Family::kKda;
  double prefix = 0;                                             // of the thread's channel
  for (uint32_t first = 0; first < count; first += kKeyChunk) {  // S k~_j
    const uint32_t end = min(first + kKeyChunk, count);
    __syncthreads();
    for (uint32_t j = first; channelwise && threadIdx.x < d_k && j < end; ++j) {
      prefix += records.LogAlpha(j)[threadIdx.x];
      keys[(j - first) * d_k + threadIdx.x] =
          LoadAs(records.activation, records.Key(j), threadIdx.x) * DecayOf(prefix);
    }
    __syncthreads();
    for (uint32_t j = first; j < end; ++j) {
      float4 key[kVectors];
      LoadKey(records, j, key);
#pragma unroll
      for (uint32_t i = 0; i < kVectors; ++i) {
        if (channelwise && Element(i) < d_k)
          key[i] = *reinterpret_cast<const float4*>(keys + (j - first) * d_k + Element(i));
      }
      const float decay = channelwise ? 1.0f : DecayOf(log_decay[j]);
#pragma unroll
      for (uint32_t r = 0; r < kRowsPerWarp; ++r) {
        const float dot = DotOf(state.value[r], key);
        if (lane == 0) u[j * kTileRows + warp * kRowsPerWarp + r] = dot * decay;
      }
    }
  }
  const uint32_t v = records.tile * kTileRows + lane, stride = records.ring.ring_records;
  for (uint32_t first = 0; first < count; first += kWarps) {
    const uint32_t j = first + warp;
    if (j < count) {  // A_ij of one j
      float4 walked[kVectors];
      LoadKey(records, j, walked);
      for (uint32_t i = j; i-- > 0;) {
#pragma unroll
        for (uint32_t e = 0; e < kVectors; ++e) {
          if (channelwise && Element(e) < d_k)
            walked[e] = DecayFour(walked[e], records.LogAlpha(i + 1) + Element(e));
        }
        float4 key[kVectors];
        LoadKey(records, i, key);
        const float dot = DotOf(walked, key);
        const float decay = channelwise ? 1.0f : DecayOf(log_decay[j] - log_decay[i]);
        if (lane == 0) weight[warp * stride + i] = dot * decay;
      }
    }
    __syncthreads();
    for (uint32_t at = first; warp == 0 && v < shape.d_v && at < min(first + kWarps, count); ++at) {
      float read = u[at * kTileRows + lane];
      for (uint32_t i = 0; i < at; ++i)
        read = fmaf(weight[(at - first) * stride + i], u[i * kTileRows + lane], read);
      u[at * kTileRows + lane] =
          *records.Beta(at) * (LoadAs(records.activation, records.Target(at), v) - read);
    }
    __syncthreads();
  }
}

// S' = gamma S + sum_{j < count} (gamma_{j+1:count} u_j) k_j^T, in place. log_decay: scalar decays.
// `keys`: kKeyChunk rows of shared memory, channelwise decays. Returns false when a value left its
// format's range. Called by the whole block.
template <uint32_t kVectors>
__device__ bool FoldAndStore(const Records& records, uint32_t count, const double* log_decay,
                             float* keys, StateRows<kVectors>& state,
                             const CheckpointTarget& target) {
  const LayerShape& shape = records.shape;
  const uint32_t d_k = shape.d_k, first_row = FirstRow(records.tile);
  auto fold_record = [&](uint32_t j, float decay, auto&& key_at) {
    float4 key[kVectors];
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i)
      key[i] = Element(i) < d_k ? key_at(Element(i)) : float4{0, 0, 0, 0};
#pragma unroll
    for (uint32_t r = 0; r < kRowsPerWarp; ++r) {
      if (first_row + r >= shape.d_v) continue;
      const float u = records.U(j, first_row + r) * decay;
#pragma unroll
      for (uint32_t i = 0; i < kVectors; ++i) {
        float4& s = state.value[r][i];
        s = {fmaf(u, key[i].x, s.x), fmaf(u, key[i].y, s.y), fmaf(u, key[i].z, s.z),
             fmaf(u, key[i].w, s.w)};
      }
    }
  };
  auto decay_state = [&](auto&& gamma_at) {
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) {
      if (Element(i) >= d_k) continue;
      const float4 gamma = gamma_at(Element(i));
#pragma unroll
      for (uint32_t r = 0; r < kRowsPerWarp; ++r) {
        float4& s = state.value[r][i];
        s = {gamma.x * s.x, gamma.y * s.y, gamma.z * s.z, gamma.w * s.w};
      }
    }
  };
  if (shape.family == Family::kKda) {
    __syncthreads();  // keys may hold another chunk
    if (threadIdx.x < d_k) keys[threadIdx.x] = DecayOf(SumOfChannel(records, count, threadIdx.x));
    __syncthreads();
    decay_state([&](uint32_t e) { return *reinterpret_cast<const float4*>(keys + e); });
    double suffix = 0;
    for (uint32_t chunk = (count + kKeyChunk - 1) / kKeyChunk; chunk-- > 0;) {
      const uint32_t first = chunk * kKeyChunk;
      __syncthreads();
      DecayKeys(records, first, count, suffix, keys);
      __syncthreads();
      for (uint32_t j = first; j < min(first + kKeyChunk, count); ++j) {
        const float* key = keys + (j - first) * d_k;
        fold_record(j, 1.0f, [&](uint32_t e) { return *reinterpret_cast<const float4*>(key + e); });
      }
    }
  } else {
    const double total = count == 0 ? 0.0 : log_decay[count - 1];
    const float gamma = DecayOf(total);
    decay_state([&](uint32_t) { return float4{gamma, gamma, gamma, gamma}; });
    for (uint32_t j = 0; j < count; ++j) {
      const std::byte* key = records.Key(j);
      fold_record(j, DecayOf(total - log_decay[j]),
                  [&](uint32_t e) { return LoadFourAs(records.activation, key, e); });
    }
  }
  bool good = true;
#pragma unroll
  for (uint32_t r = 0; r < kRowsPerWarp; ++r) {
    if (first_row + r >= shape.d_v) continue;
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) {
      if (Element(i) >= d_k) continue;
      const uint64_t element =
          (uint64_t{records.head} * shape.d_v + first_row + r) * d_k + Element(i);
      good = target.StoreFour(element, state.value[r][i]) && good;
    }
  }
  return good;
}

__device__ CheckpointTarget MakeTarget(const LayerShape& shape, const Formats& formats,
                                       const PageLayout& layout, std::byte* page,
                                       const RoundingKey& key) {
  const bool two = formats.checkpoint_lp != Dtype::kNone;
  CheckpointTarget target{.hp = page,
                          .lp = two ? page + layout.lp_offset_bytes : nullptr,
                          .hp_dtype = formats.checkpoint_hp,
                          .lp_dtype = formats.checkpoint_lp,
                          .rounding = {},
                          .elements_per_head = shape.d_v * shape.d_k};
  if (target.hp_dtype != Dtype::kFp32) target.rounding = MakeRoundingStream(key);
  return target;
}

// One item of a verify, and what its block shares.
template <uint32_t kVectors>
struct VerifyItem {
  const VerifyLaunch& launch;
  const DeviceRow& row;
  const Records& records;
  const uint32_t head, tile;
  const uint32_t T, h;
  std::byte* const shared;
  const SharedLayout& at;

  const LayerShape& shape = launch.shape;
  const Formats& formats = launch.formats;
  const uint32_t d_k = shape.d_k, d_v = shape.d_v;
  const bool delta_rule = shape.family != Family::kMamba2;
  const bool channelwise = shape.family == Family::kKda;
  const bool records_targets = Rederives(shape, formats);
  const uint32_t vectors = delta_rule ? 2 * T : T;   // q_1..q_T, k_1..k_T
  const uint32_t stride = launch.ring.ring_records;  // of `weight`
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t flags = kPoisonNone;

  __device__ float* x() const { return reinterpret_cast<float*>(shared + at.x); }
  __device__ float* decayed_x() const { return reinterpret_cast<float*>(shared + at.decayed_x); }
  __device__ float* weight() const { return reinterpret_cast<float*>(shared + at.weight); }
  __device__ float* sum() const { return reinterpret_cast<float*>(shared + at.sum); }
  __device__ float* draft_u() const { return reinterpret_cast<float*>(shared + at.draft_u); }
  __device__ float* keys() const { return reinterpret_cast<float*>(shared + at.keys); }
  __device__ double* log_decay() const { return reinterpret_cast<double*>(shared + at.log_decay); }

  __device__ void FlagUnless(bool good, PoisonFlags flag) {
    if (!good) flags |= flag;
  }
  __device__ uint64_t Token(uint32_t s) const { return uint64_t{row.first_token} + s; }
  __device__ uint64_t TokenHead(uint32_t s) const { return Token(s) * shape.head_count + head; }
  __device__ uint64_t TokenKey(uint32_t s) const {
    return (Token(s) * shape.key_group_count + records.group) * d_k;
  }
  __device__ const float* DraftLogAlpha(uint32_t s) const {
    return launch.inputs.log_alpha + TokenHead(s) * (channelwise ? d_k : 1);
  }
  __device__ float DraftValueScale(uint32_t s) const {
    return launch.inputs.value_scale == nullptr ? 1.0f : launch.inputs.value_scale[TokenHead(s)];
  }

  // q and k to shared memory; checks of the inputs; what is known of the drafts' records appended:
  // keys and decays by the first tile (keys by the group's first head), values by every tile.
  __device__ void LoadDrafts() {
    const Dtype activation = formats.activation;
    for (uint32_t i = threadIdx.x; i < T * d_k; i += kThreads) {
      const uint32_t s = i / d_k, c = i % d_k;
      const float q = LoadAs(activation, launch.inputs.q, TokenKey(s) + c);
      const float k = LoadAs(activation, launch.inputs.k, TokenKey(s) + c);
      x()[i] = q;
      if (delta_rule) x()[T * d_k + i] = k;
      FlagUnless(IsFinite(q) && IsFinite(k), kPoisonInput);
      if (tile == 0 && records.lane_head == 0) StoreAs(activation, records.Key(h + s), c, k);
    }
    const uint32_t decays = channelwise ? d_k : 1;
    for (uint32_t i = threadIdx.x; i < T * decays; i += kThreads) {
      const uint32_t s = i / decays, c = i % decays;
      const float log_alpha = DraftLogAlpha(s)[c];
      FlagUnless(IsFinite(log_alpha), kPoisonInput);
      FlagUnless(!(log_alpha > 0), kPoisonDecay);
      if (tile == 0) records.LogAlpha(h + s)[c] = log_alpha;
    }
    if (threadIdx.x < T) {
      const uint32_t s = threadIdx.x;
      if (delta_rule) {
        const float beta = launch.inputs.beta[TokenHead(s)];
        FlagUnless(IsFinite(beta), kPoisonInput);
        if (tile == 0 && records_targets) *records.Beta(h + s) = beta;
      } else {
        FlagUnless(IsFinite(DraftValueScale(s)), kPoisonInput);
        if (tile == 0) *records.ValueScale(h + s) = DraftValueScale(s);
      }
    }
    for (uint32_t i = threadIdx.x; i < T * kTileRows; i += kThreads) {
      const uint32_t s = i / kTileRows, v = tile * kTileRows + i % kTileRows;
      if (v >= d_v) continue;
      const float value = LoadAs(activation, launch.inputs.v, TokenHead(s) * d_v + v);
      FlagUnless(IsFinite(value), kPoisonInput);
      if (records_targets) StoreAs(activation, records.Target(h + s), v, value);
      if (delta_rule) continue;
      StoreAs(activation, records.Value(h + s), v, value);
      draft_u()[i] = DraftValueScale(s) * value;
    }
    if (channelwise) return;
    SumLogDecays(records, h, h + T, DraftLogAlpha(0), shape.head_count, log_decay());
  }

  __device__ float4 KeyFour(uint32_t j, uint32_t e) const {
    return j < h ? LoadFourAs(formats.activation, records.Key(j), e)
                 : LoadFourAs(formats.activation, launch.inputs.k, TokenKey(j - h) + e);
  }

  // weight[m][j] := k_j . x_m times gamma_{j+1:h+s}, for j <= h + s.
  __device__ void WeighScalar() {
    for (uint32_t j = warp; j < h + T; j += kWarps) {
      float4 key[kVectors];
#pragma unroll
      for (uint32_t i = 0; i < kVectors; ++i)
        key[i] = Element(i) < d_k ? KeyFour(j, Element(i)) : float4{0, 0, 0, 0};
      for (uint32_t m = 0; m < vectors; ++m) {
        const uint32_t last = h + m % T;
        if (j > last) continue;
        const float dot = DotOf(key, x() + m * d_k);
        if (lane == 0) weight()[m * stride + j] = dot * DecayOf(log_decay()[last] - log_decay()[j]);
      }
    }
  }

  __device__ float DotOf(const float4 (&a)[kVectors], const float* b) const {
    float sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) {
      if (Element(i) < d_k) sum = Dot(a[i], *reinterpret_cast<const float4*>(b + Element(i)), sum);
    }
    return WarpSum(sum);
  }

  // A committed key carries gamma_{j+1:h}, a vector gamma_{h+1:h+s}; among the drafts each vector
  // walks back, one alpha at a time. At the end decayed_x carries gamma_{1:h+s}.
  __device__ void WeighChannelwise() {
    const uint32_t c = threadIdx.x;
    if (c < d_k) {
      double log_sum = 0;
      for (uint32_t s = 0; s < T; ++s) {
        log_sum += DraftLogAlpha(s)[c];
        const float decay = DecayOf(log_sum);
        for (uint32_t m = s; m < vectors; m += T)
          decayed_x()[m * d_k + c] = x()[m * d_k + c] * decay;
      }
    }
    for (uint32_t m = warp; m < vectors; m += kWarps) {  // among the drafts
      const uint32_t s = m % T;
      float4 walked[kVectors];
#pragma unroll
      for (uint32_t i = 0; i < kVectors; ++i)
        walked[i] = Element(i) < d_k ? *reinterpret_cast<const float4*>(x() + m * d_k + Element(i))
                                     : float4{0, 0, 0, 0};
      for (uint32_t j = s + 1; j-- > 0;) {
        const float dot = DotOf(walked, x() + (T + j) * d_k);
        if (lane == 0) weight()[m * stride + h + j] = dot;
#pragma unroll
        for (uint32_t i = 0; i < kVectors; ++i) {
          if (Element(i) >= d_k) continue;
          walked[i] = DecayFour(walked[i], DraftLogAlpha(j) + Element(i));
        }
      }
    }
    double suffix = 0;
    for (uint32_t chunk = (h + kKeyChunk - 1) / kKeyChunk; chunk-- > 0;) {
      const uint32_t first = chunk * kKeyChunk;
      __syncthreads();
      DecayKeys(records, first, h, suffix, keys());
      __syncthreads();
      for (uint32_t j = first + warp; j < min(first + kKeyChunk, h); j += kWarps) {
        float4 key[kVectors];
#pragma unroll
        for (uint32_t i = 0; i < kVectors; ++i)
          key[i] = Element(i) < d_k
                       ? *reinterpret_cast<const float4*>(keys() + (j - first) * d_k + Element(i))
                       : float4{0, 0, 0, 0};
        for (uint32_t m = 0; m < vectors; ++m) {
          const float dot = DotOf(key, decayed_x() + m * d_k);
          if (lane == 0) weight()[m * stride + j] = dot;
        }
      }
    }
    __syncthreads();
    if (c < d_k) {
      const float gamma = DecayOf(suffix);
      for (uint32_t m = 0; m < vectors; ++m) decayed_x()[m * d_k + c] *= gamma;
    }
  }

  // sum[m][v] := S x~_m.
  __device__ void ReadState(const StateRows<kVectors>& state) {
    const float* from = channelwise ? decayed_x() : x();
    for (uint32_t m = 0; m < vectors; ++m) {
      const float decay = channelwise ? 1.0f : DecayOf(log_decay()[h + m % T]);
#pragma unroll
      for (uint32_t r = 0; r < kRowsPerWarp; ++r) {
        const float dot = DotOf(state.value[r], from + m * d_k);
        if (lane == 0) sum()[m * kTileRows + warp * kRowsPerWarp + r] = dot * decay;
      }
    }
  }

  // sum[m][v] += sum_{j < h} weight[m][j] u_j[v].
  __device__ void AddRecords() {
    const uint32_t v = tile * kTileRows + lane;
    if (v >= d_v) return;
    for (uint32_t m = warp; m < vectors; m += kWarps) {
      float value = sum()[m * kTileRows + lane];
      for (uint32_t j = 0; j < h; ++j)
        value = fmaf(weight()[m * stride + j], records.U(j, v), value);
      sum()[m * kTileRows + lane] = value;
    }
  }

  __device__ float WithDrafts(uint32_t m, uint32_t end) const {
    float value = sum()[m * kTileRows + lane];
    for (uint32_t j = 0; j < end; ++j)
      value = fmaf(weight()[m * stride + h + j], draft_u()[j * kTileRows + lane], value);
    return value;
  }

  // u_s = beta_s (v_s - S k~_s - sum_{j < h+s} A_js u_j), rounded as its record is. By one warp.
  __device__ void SolveDrafts() {
    const uint32_t v = tile * kTileRows + lane;
    if (v >= d_v) return;
    for (uint32_t s = 0; s < T; ++s) {
      const float error = LoadAs(formats.activation, launch.inputs.v, TokenHead(s) * d_v + v) -
                          WithDrafts(T + s, s);
      const float u = StoreAs(formats.correction, records.Value(h + s), v,
                              launch.inputs.beta[TokenHead(s)] * error);
      FlagUnless(IsFinite(u), kPoisonOverflow);
      draft_u()[s * kTileRows + lane] = u;
    }
  }

  __device__ void WriteOutputs() {
    const uint32_t v = tile * kTileRows + lane;
    if (v >= d_v) return;
    for (uint32_t s = warp; s < T; s += kWarps) {
      const float o =
          StoreAs(formats.output, launch.output, TokenHead(s) * d_v + v, WithDrafts(s, s + 1));
      FlagUnless(IsFinite(o), kPoisonOverflow);
    }
  }
};

__device__ void WriteZeros(const VerifyLaunch& launch, const DeviceRow& row, uint32_t head,
                           uint32_t tile) {
  const uint32_t v = tile * kTileRows + threadIdx.x % 32;
  if (v >= launch.shape.d_v) return;
  for (uint32_t s = threadIdx.x / 32; s < row.draft_tokens; s += kWarps) {
    const uint64_t token_head = (uint64_t{row.first_token} + s) * launch.shape.head_count + head;
    StoreAs(launch.formats.output, launch.output, token_head * launch.shape.d_v + v, 0.0f);
  }
}

template <uint32_t kVectors>
__global__ void __launch_bounds__(kThreads)
    VerifyKernel(__grid_constant__ const VerifyLaunch launch) {
  extern __shared__ __align__(16) std::byte shared[];
  const LayerShape& shape = launch.shape;
  const Formats& formats = launch.formats;
  const uint32_t tiles = (shape.d_v + kTileRows - 1) / kTileRows;
  const uint32_t per_row = shape.head_count * tiles;
  const uint64_t items = uint64_t{launch.step->row_count} * per_row;
  const SharedLayout at =
      SharedLayout::Make(shape, formats, launch.ring.ring_records, launch.draft_tokens_max);
  for (uint64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const DeviceRow& row = launch.rows[i / per_row];
    const uint32_t head = i % per_row / tiles, tile = i % tiles;
    if (row.draft_tokens == 0) continue;
    if (row.slot == kNone) {
      WriteZeros(launch, row, head, tile);
      continue;
    }
    const bool folds = row.target_page != kNone;
    const bool reads_lp = !folds && formats.checkpoint_lp != Dtype::kNone;
    const std::byte* page = launch.pages + uint64_t{row.source_page} * launch.page.page_bytes;
    StateRows<kVectors> state;
    LoadState(shape,
              {page + (reads_lp ? launch.page.lp_offset_bytes : 0),
               reads_lp ? formats.checkpoint_lp : formats.checkpoint_hp},
              head, tile, state);
    Records records =
        MakeRecords(shape, formats, launch.ring, launch.rings, row.slot, head, tile, row.base);
    VerifyItem<kVectors> item{.launch = launch,
                              .row = row,
                              .records = records,
                              .head = head,
                              .tile = tile,
                              .T = row.draft_tokens,
                              .h = static_cast<uint32_t>(row.tail - row.base),
                              .shared = shared,
                              .at = at};
    item.LoadDrafts();
    __syncthreads();
    if (item.channelwise) {
      item.WeighChannelwise();
    } else {
      item.WeighScalar();
    }
    __syncthreads();
    item.ReadState(state);
    if (folds && item.records_targets) {
      auto* u = reinterpret_cast<float*>(shared + at.record_u);
      Rederive(records, item.h, item.log_decay(), item.keys(), state, u,
               reinterpret_cast<float*>(shared + at.record_weight));
      records.rederived = u;
    }
    __syncthreads();
    item.AddRecords();
    __syncthreads();
    if (item.delta_rule) {
      if (item.warp == 0) item.SolveDrafts();
      __syncthreads();
    }
    item.WriteOutputs();
    if (folds) {
      const CheckpointTarget target =
          MakeTarget(shape, formats, launch.page,
                     launch.pages + uint64_t{row.target_page} * launch.page.page_bytes,
                     {launch.rounding_seed, row.rounding_key, launch.layer, row.fold_to});
      const bool good = FoldAndStore(records, static_cast<uint32_t>(row.fold_to - row.base),
                                     item.log_decay(), item.keys(), state, target);
      item.FlagUnless(good, kPoisonOverflow);
    }
    const uint32_t flags = __reduce_or_sync(0xffffffffu, item.flags);
    if (flags != 0 && item.lane == 0) atomicOr(&launch.poison[i / per_row], flags);
    __syncthreads();  // before the next item writes shared memory
  }
}

template <uint32_t kVectors>
__global__ void __launch_bounds__(kThreads) FoldKernel(__grid_constant__ const FoldLaunch launch) {
  extern __shared__ __align__(16) std::byte shared[];
  const LayerShape& shape = launch.shape;
  const uint32_t tiles = (shape.d_v + kTileRows - 1) / kTileRows;
  const uint32_t per_fold = shape.head_count * tiles;
  const uint64_t items = uint64_t{*launch.count} * per_fold;
  const SharedLayout at = SharedLayout::Make(shape, launch.formats, launch.ring.ring_records, 0);
  auto* log_decay = reinterpret_cast<double*>(shared + at.log_decay);
  auto* keys = reinterpret_cast<float*>(shared + at.keys);
  for (uint64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const DeviceFold& fold = launch.folds[i / per_fold];
    const uint32_t head = i % per_fold / tiles, tile = i % tiles;
    const auto count = static_cast<uint32_t>(fold.to - fold.from);
    Records records = MakeRecords(shape, launch.formats, launch.ring, launch.rings, fold.slot, head,
                                  tile, fold.from);
    StateRows<kVectors> state;
    LoadState(shape,
              {launch.pages + uint64_t{fold.source_page} * launch.page.page_bytes,
               launch.formats.checkpoint_hp},
              head, tile, state);
    if (shape.family != Family::kKda) SumLogDecays(records, count, count, nullptr, 0, log_decay);
    __syncthreads();
    CheckpointTarget target;
    if (launch.replay != nullptr) {
      target = {.hp = reinterpret_cast<std::byte*>(launch.replay),
                .lp = nullptr,
                .hp_dtype = Dtype::kFp32,
                .lp_dtype = Dtype::kNone,
                .rounding = {},
                .elements_per_head = shape.d_v * shape.d_k};
    } else {
      target = MakeTarget(shape, launch.formats, launch.page,
                          launch.pages + uint64_t{fold.target_page} * launch.page.page_bytes,
                          {launch.rounding_seed, fold.rounding_key, launch.layer, fold.to});
    }
    if (Rederives(shape, launch.formats)) {
      auto* u = reinterpret_cast<float*>(shared + at.record_u);
      Rederive(records, count, log_decay, keys, state, u,
               reinterpret_cast<float*>(shared + at.record_weight));
      records.rederived = u;
    }
    // What leaves its format's range poisons the steps that read the page.
    FoldAndStore(records, count, log_decay, keys, state, target);
    __syncthreads();
  }
}

__global__ void StoreStateKernel(__grid_constant__ const StoreStateLaunch launch) {
  const CheckpointTarget target =
      MakeTarget(launch.shape, launch.formats, launch.page,
                 launch.pages + uint64_t{launch.target} * launch.page.page_bytes, launch.rounding);
  const uint64_t fours =
      uint64_t{launch.shape.head_count} * launch.shape.d_v * launch.shape.d_k / 4;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < fours;
       i += uint64_t{gridDim.x} * blockDim.x) {
    target.StoreFour(4 * i, reinterpret_cast<const float4*>(launch.state)[i]);
  }
}

// Of the current device.
struct DeviceLimits {
  cudaError_t error = cudaSuccess;
  int multiprocessors = 0, shared_bytes = 0;
};
DeviceLimits ReadLimits() {
  DeviceLimits limits;
  int device = 0;
  auto read = [&](int& to, cudaDeviceAttr attribute) {
    if (limits.error == cudaSuccess) limits.error = cudaDeviceGetAttribute(&to, attribute, device);
  };
  limits.error = cudaGetDevice(&device);
  read(limits.multiprocessors, cudaDevAttrMultiProcessorCount);
  read(limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return limits;
}

template <typename Kernel, typename Launch>
cudaError_t Start(Kernel* kernel, const Launch& launch, uint64_t items, uint32_t shared_bytes,
                  cudaStream_t stream) {
  static const DeviceLimits limits = ReadLimits();
  if (limits.error != cudaSuccess) return limits.error;
  if (shared_bytes > static_cast<uint32_t>(limits.shared_bytes)) return cudaErrorInvalidValue;
  if (const cudaError_t error = cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_bytes);
      error != cudaSuccess) {
    return error;
  }
  const uint64_t most = uint64_t{kBlocksPerSm} * static_cast<uint32_t>(limits.multiprocessors);
  const auto blocks = static_cast<uint32_t>(items < most ? items : most);
  if (blocks == 0) return cudaSuccess;
  kernel<<<blocks, kThreads, shared_bytes, stream>>>(launch);
  return cudaGetLastError();
}

uint64_t ItemsPerRow(const LayerShape& shape) {
  return uint64_t{shape.head_count} * ((shape.d_v + kTileRows - 1) / kTileRows);
}

}  // namespace

bool GeneralSupports(const LayerShape& shape, const Formats& formats, uint32_t draft_tokens_max) {
  const Dtype hp = formats.checkpoint_hp, lp = formats.checkpoint_lp;
  return (hp == Dtype::kFp32 || hp == Dtype::kFp16) && (lp == Dtype::kNone || lp == Dtype::kFp16) &&
         shape.d_k % 16 == 0 && shape.d_k <= kDimMax && shape.d_v % 8 == 0 &&
         shape.d_v <= kDimMax && draft_tokens_max <= kDraftTokensMax;
}

cudaError_t EnqueueVerifyGeneral(const VerifyLaunch& launch, cudaStream_t stream) {
  const uint32_t shared = SharedLayout::Make(launch.shape, launch.formats, launch.ring.ring_records,
                                             launch.draft_tokens_max)
                              .bytes;
  const uint64_t items = launch.rows_max * ItemsPerRow(launch.shape);
  return launch.shape.d_k <= 128 ? Start(VerifyKernel<1>, launch, items, shared, stream)
                                 : Start(VerifyKernel<2>, launch, items, shared, stream);
}

cudaError_t EnqueueFold(const FoldLaunch& launch, cudaStream_t stream) {
  const uint32_t shared =
      SharedLayout::Make(launch.shape, launch.formats, launch.ring.ring_records, 0).bytes;
  const uint64_t items = launch.folds_max * ItemsPerRow(launch.shape);
  return launch.shape.d_k <= 128 ? Start(FoldKernel<1>, launch, items, shared, stream)
                                 : Start(FoldKernel<2>, launch, items, shared, stream);
}

cudaError_t EnqueueStoreState(const StoreStateLaunch& launch, cudaStream_t stream) {
  return Start(StoreStateKernel, launch, ItemsPerRow(launch.shape) * launch.shape.d_k / 32, 0,
               stream);
}

cudaError_t ProbeKernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, VerifyKernel<1>);
}

}  // namespace ssmd::cuda
