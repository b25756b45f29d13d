// A tile of the state in the registers of a block, and what is done to it: re-derivation of u, and
// the fold. The equations are in cpu/verify_kernel.h.
#pragma once

#include "kernels/cuda/records.cuh"

namespace ssmd::cuda::general {

// Rows that read HP then get u of the committed records from it: what was recorded was computed
// against LP.
__host__ __device__ inline bool Rederives(const LayerShape& shape, const Formats& formats) {
  return shape.family != Family::kMamba2 && formats.checkpoint_lp != Dtype::kNone;
}

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

__device__ inline float4 DecayFour(const float4& a, const float* log_alpha) {
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

__device__ inline CheckpointTarget MakeTarget(const LayerShape& shape, const Formats& formats,
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

}  // namespace ssmd::cuda::general
