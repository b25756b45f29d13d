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
#include "kernels/cuda/launch_general.cuh"
#include "kernels/cuda/state_tile.cuh"
#include "kernels/cuda/verify_general.h"

namespace ssmd::cuda {
namespace general {
namespace {

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
    if (row.draft_tokens < launch.tokens_min) continue;
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

}  // namespace
}  // namespace general

using namespace general;  // NOLINT: of this file alone

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

cudaError_t ProbeKernels() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, VerifyKernel<1>);
}

}  // namespace ssmd::cuda
