// The consumer warps of the T = 1 kernels (kernel.cuh): all arithmetic, every result.
#pragma once

#include <cfloat>

#include "kernels/cuda/sm90/config.cuh"

namespace ssmd::cuda::sm90 {

// ---- The consumers. Lane 8 r + c of a warp works on rows r, r + 4, ... of the warp's rows and on
// channels 4 c .. 4 c + 3 of every 32. Lane j also stands for record j (the new token's is j = h).
template <class C, class Output>
class DecodeConsumer {
 public:
  __device__ DecodeConsumer(const VerifyLaunch& launch, SharedStorage<C>& shared)
      : launch_(launch), shared_(shared) {}

  __device__ void Run() {
    for (uint32_t n = 0;; ++n) {
      ChunkStage<C>& chunk = shared_.chunks[n % 2];
      ptx::Wait(&shared_.chunk_full[n % 2], (n / 2) & 1);
      if (chunk.kind == ChunkKind::kEnd) return;
      const auto& row = *reinterpret_cast<const DeviceRow*>(chunk.row_words);
      if (chunk.kind == ChunkKind::kZero) {
        WriteZeros(chunk, row);
      } else {
        BeginChunk(chunk, row);
        for (uint32_t i = 0; i < chunk.item_count; ++i) Item(chunk, row, chunk.first_item + i);
        if (flags_ != kPoisonNone) atomicOr(launch_.poison + chunk.row, flags_);
        flags_ = kPoisonNone;
        if (C::kChannelwise) ptx::FenceSharedForBulk();  // log_alpha was written over
      }
      __syncwarp();
      if (lane_ == 0) ptx::Arrive(&shared_.chunk_empty[n % 2]);
    }
  }

 private:
  static constexpr int kVectors = kDk / 32;  // float4 of a row in one lane
  // Records of a row in one lane; with the new token's.
  static constexpr int kFoldSlots = (C::kRecordsMax + 7) / 8;
  static constexpr int kSlots = (C::kRecordsMax + 8) / 8;

  __device__ void FlagUnless(bool good, PoisonFlags flag) {
    if (!good) flags_ |= flag;
  }
  __device__ static bool Finite(float value) { return fabsf(value) <= FLT_MAX; }
  __device__ static float ReadValue(uint16_t bits) {
    return C::kDeltaRule ? ptx::WidenFp16(bits) : ptx::WidenBf16(bits);
  }
  __device__ static float4 WidenKeys(const uint16_t* keys) {
    const uint2 words = *reinterpret_cast<const uint2*>(keys);
    const float2 low = ptx::WidenBf16(words.x), high = ptx::WidenBf16(words.y);
    return {low.x, low.y, high.x, high.y};
  }
  __device__ static float Dot(float4 a, float4 b, float sum) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    return fmaf(a.w, b.w, sum);
  }
  __device__ static float4 Multiply(float4 a, float4 b) {
    return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w};
  }
  __device__ std::byte* Ring(const DeviceRow& row, const RingRuns& runs, uint32_t run,
                             uint32_t record_row) const {
    return launch_.rings + row.slot * launch_.ring.slot_bytes + runs.offset_bytes +
           (uint64_t{run} * launch_.ring.ring_records + record_row) * runs.row_bytes;
  }

  // Lane j gets the sum over lanes i > j of log decays, and lane 0's own sum over all as `total`.
  __device__ float SumAfter(float log_alpha, float& total) const {
    float sum = log_alpha;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_down_sync(~0u, sum, offset);
      if (lane_ + offset < 32) sum += other;
    }
    total = __shfl_sync(~0u, sum, 0);
    const float after = __shfl_down_sync(~0u, sum, 1);
    return lane_ == 31 ? 0.0f : after;
  }

  __device__ void WriteZeros(const ChunkStage<C>& chunk, const DeviceRow& row) {
    auto* output = static_cast<Output*>(launch_.output) +
                   uint64_t{row.first_token} * launch_.shape.head_count * C::kDv +
                   chunk.first_item * C::kBlockRows;
    for (uint32_t i = threadIdx.x; i < chunk.item_count * C::kBlockRows; i += C::kConsumerThreads)
      output[i] = Output(0.0f);
  }

  // What the chunk's items share: q and k in registers, k_j . q and k_j . k_new of all records, and
  // the new token's key and decays appended by whoever has the group's first item.
  __device__ void BeginChunk(ChunkStage<C>& chunk, const DeviceRow& row) {
    committed_ = static_cast<uint32_t>(row.tail - row.base);
    folds_ = row.target_page != ToInt(kNoPage);
    folded_ = folds_ ? static_cast<uint32_t>(row.fold_to - row.base) : 0;
    if constexpr (C::kChannelwise) {
      DecayKeys(chunk);
      ptx::SyncThreads<1>(C::kConsumerThreads);
    }
    DotKeys(chunk);
    AppendShared(chunk, row);
    ptx::SyncThreads<1>(C::kConsumerThreads);
    const float* dots_q = chunk.dots[0];
    const float* dots_k = chunk.dots[1];
    dot_q_ = lane_ <= committed_ ? dots_q[lane_] : 0.0f;
    dot_k_ = C::kDeltaRule && lane_ < committed_ ? dots_k[lane_] : 0.0f;
    new_dot_ = dots_q[committed_];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint32_t channel = 4 * column_ + 32 * i;
      query_[i] = WidenKeys(chunk.query + channel);
      if (C::kDeltaRule) key_[i] = WidenKeys(chunk.keys + committed_ * kDk + channel);
      if constexpr (C::kChannelwise) {
        const float4 decay = Multiply(*reinterpret_cast<const float4*>(chunk.alpha + channel),
                                      *reinterpret_cast<const float4*>(chunk.gamma + channel));
        query_[i] = Multiply(query_[i], decay);
        key_[i] = Multiply(key_[i], decay);
      }
    }
  }

  // Channelwise decays: k_j becomes gamma_{j+1:h} * k_j, in FP32 over the logs it used. One thread
  // per channel.
  __device__ void DecayKeys(ChunkStage<C>& chunk) {
    if (threadIdx.x >= kDk) return;
    const uint32_t channel = threadIdx.x;
    float* logs = chunk.log_alpha + channel;
    const uint16_t* keys = chunk.keys + channel;
    constexpr int kBatch = 8;  // loads that are under way together
    float sum = 0;
#pragma unroll
    for (int first = (C::kRecordsMax - 1) / kBatch * kBatch; first >= 0; first -= kBatch) {
      if (first >= committed_) continue;
      float log_alpha[kBatch], key[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool live = first + i < committed_;
        log_alpha[i] = live ? logs[(first + i) * kDk] : 0.0f;
        key[i] = live ? ptx::WidenBf16(keys[(first + i) * kDk]) : 0.0f;
      }
#pragma unroll
      for (int i = kBatch - 1; i >= 0; --i) {
        const float decayed = key[i] * __expf(sum);
        sum += log_alpha[i];
        if (first + i < committed_) logs[(first + i) * kDk] = decayed;
      }
    }
    const float log_alpha = chunk.new_log_alpha[channel];
    FlagUnless(Finite(log_alpha), kPoisonInput);
    FlagUnless(!(log_alpha > 0), kPoisonDecay);
    chunk.gamma[channel] = __expf(sum);
    chunk.alpha[channel] = __expf(log_alpha);
  }

  // Half a warp per record; a lane takes channels 4 c .. 4 c + 3 of both halves of the row.
  __device__ void DotKeys(ChunkStage<C>& chunk) {
    const uint32_t channel = 4 * (lane_ % 16);
    const uint16_t* new_key = chunk.keys + committed_ * kDk;
    float4 q[2], k[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      q[half] = WidenKeys(chunk.query + channel + 64 * half);
      k[half] = WidenKeys(new_key + channel + 64 * half);
      const float4 x = q[half], y = k[half];
      FlagUnless(Finite(x.x) && Finite(x.y) && Finite(x.z) && Finite(x.w) && Finite(y.x) &&
                     Finite(y.y) && Finite(y.z) && Finite(y.w),
                 kPoisonInput);
    }
    for (uint32_t first = 2 * warp_; first <= committed_; first += 2 * C::kConsumerWarps) {
      const uint32_t j = first + lane_ / 16;
      float dot_q = 0, dot_k = 0;
      if (j <= committed_) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t at = j * kDk + channel + 64 * half;
          float4 record = WidenKeys(chunk.keys + at);
          if constexpr (C::kChannelwise) {
            if (j < committed_) {
              record =
                  Multiply(*reinterpret_cast<const float4*>(chunk.log_alpha + at),
                           *reinterpret_cast<const float4*>(chunk.alpha + channel + 64 * half));
            }
          }
          dot_q = Dot(record, q[half], dot_q);
          if (C::kDeltaRule) dot_k = Dot(record, k[half], dot_k);
        }
      }
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) {
        dot_q += __shfl_xor_sync(~0u, dot_q, offset);
        if (C::kDeltaRule) dot_k += __shfl_xor_sync(~0u, dot_k, offset);
      }
      if (lane_ % 16 == 0) {
        chunk.dots[0][j] = dot_q;
        chunk.dots[1][j] = dot_k;
      }
    }
  }

  // The parts of the new record that the group's heads share, by the group's first item.
  __device__ void AppendShared(const ChunkStage<C>& chunk, const DeviceRow& row) {
    if (chunk.first_item % C::kItemsPerGroup != 0 || warp_ != C::kConsumerWarps - 1) return;
    const uint32_t group = chunk.first_item / C::kItemsPerGroup;
    if (lane_ < C::kKeyBytes / 16) {
      const uint4 key = *reinterpret_cast<const uint4*>(chunk.keys + committed_ * kDk + 8 * lane_);
      ptx::StoreThrough(Ring(row, launch_.ring.key, group, chunk.append_row) + 16 * lane_, key);
    }
    std::byte* decays = Ring(row, launch_.ring.log_alpha, group, chunk.append_row);
    if constexpr (C::kChannelwise) {
      const uint4 logs = *reinterpret_cast<const uint4*>(chunk.new_log_alpha + 4 * lane_);
      ptx::StoreThrough(decays + 16 * lane_, logs);
    } else if (lane_ < C::kHeadsPerGroup) {
      reinterpret_cast<float*>(decays)[lane_] = chunk.new_log_alpha[chunk.new_scalar + lane_];
      if constexpr (!C::kDeltaRule) {
        std::byte* scales = Ring(row, launch_.ring.value_scale, group, chunk.append_row);
        reinterpret_cast<float*>(scales)[lane_] = NewValueScale(chunk, lane_);
      }
    }
  }
  __device__ float NewValueScale(const ChunkStage<C>& chunk, uint32_t head_in_group) const {
    return launch_.inputs.value_scale == nullptr
               ? 1.0f
               : chunk.new_scale[chunk.new_scalar + head_in_group];
  }

  // One item. Mamba-2: o = gamma S q + sum_{j <= h} w_j dt_j x_j.
  // GDN, KDA: u = beta (v - gamma S k - sum_{j < h} a_j u_j), o = gamma S q + sum w_j u_j + (k.q)
  // u.
  __device__ void Item(const ChunkStage<C>& chunk, const DeviceRow& row, uint32_t item) {
    const uint32_t head = item / C::kBlocksPerHead, block = item % C::kBlocksPerHead;
    const uint32_t head_in_group = head % C::kHeadsPerGroup;
    const uint32_t first_row = warp_ * C::kRowsPerWarp;           // of the tile
    const uint32_t head_row = block * C::kBlockRows + first_row;  // of the head

    // Lane j: the weights of record j.
    const float scale = ValueScale(chunk, head_in_group);
    float gamma = 1, weight_q = dot_q_, weight_k = dot_k_;
    if constexpr (!C::kChannelwise) {
      float total;
      const float decay = __expf(SumAfter(LogAlpha(chunk, head_in_group, committed_, true), total));
      gamma = __expf(total);
      weight_q *= decay * scale;
      weight_k *= decay;
    }
    if (C::kDeltaRule && lane_ >= committed_) weight_q = 0;

    const uint32_t stage_index = consumed_ % kStages;
    ItemStage<C>& stage = shared_.items[stage_index];
    ptx::Wait(&shared_.item_full[stage_index], (consumed_ / kStages) & 1);
    ++consumed_;

    float4 tile[C::kRowsPerThread][kVectors];
#pragma unroll
    for (int r = 0; r < C::kRowsPerThread; ++r) {
      const float* source = stage.tile + (first_row + 4 * r + row_in_four_) * kDk + 4 * column_;
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        tile[r][i] = *reinterpret_cast<const float4*>(source + 32 * i);
    }
    float value[kFoldSlots][C::kRowsPerThread];  // of committed records, for a fold
    float new_value[C::kRowsPerThread], output[C::kRowsPerThread], read[C::kRowsPerThread];
    const uint32_t records = C::kDeltaRule ? committed_ : committed_ + 1;
#pragma unroll
    for (int r = 0; r < C::kRowsPerThread; ++r) {
      output[r] = read[r] = 0;
      new_value[r] =
          ptx::WidenBf16(stage.values[committed_ * C::kDv + head_row + 4 * r + row_in_four_]);
      FlagUnless(Finite(new_value[r]), kPoisonInput);
    }
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (8 * slot >= records) break;
      const uint32_t j = 8 * slot + column_;
      const float w = __shfl_sync(~0u, weight_q, j);
      const float a = C::kDeltaRule ? __shfl_sync(~0u, weight_k, j) : 0.0f;
#pragma unroll
      for (int r = 0; r < C::kRowsPerThread; ++r) {
        const uint32_t at = j * C::kDv + head_row + 4 * r + row_in_four_;
        const float x = j < records ? ReadValue(stage.values[at]) : 0.0f;
        if (slot < kFoldSlots) value[slot][r] = x;
        output[r] = fmaf(w, x, output[r]);
        if (C::kDeltaRule) read[r] = fmaf(a, x, read[r]);
      }
    }
    uint4 new_values{};  // Mamba-2: the item's part of the new record
    if (!C::kDeltaRule && warp_ == 0 && lane_ < C::kBlockRows / 8) {
      new_values = *reinterpret_cast<const uint4*>(stage.values + committed_ * C::kDv +
                                                   block * C::kBlockRows + 8 * lane_);
    }
    __syncwarp();
    if (lane_ == 0) ptx::Arrive(&shared_.item_empty[stage_index]);

    const float beta = C::kDeltaRule ? chunk.new_scale[chunk.new_scalar + head_in_group] : 0.0f;
    if (C::kDeltaRule) FlagUnless(Finite(beta), kPoisonInput);
#pragma unroll
    for (int r = 0; r < C::kRowsPerThread; ++r) {
      float with_q[2] = {0, 0}, with_k[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        with_q[i % 2] = Dot(tile[r][i], query_[i], with_q[i % 2]);
        if (C::kDeltaRule) with_k[i % 2] = Dot(tile[r][i], key_[i], with_k[i % 2]);
      }
      output[r] = fmaf(gamma, with_q[0] + with_q[1], output[r]);
      if (C::kDeltaRule) read[r] = fmaf(gamma, with_k[0] + with_k[1], read[r]);
#pragma unroll
      for (int offset = 4; offset > 0; offset /= 2) {
        output[r] += __shfl_xor_sync(~0u, output[r], offset);
        if (C::kDeltaRule) read[r] += __shfl_xor_sync(~0u, read[r], offset);
      }
    }
    std::byte* record =
        Ring(row, launch_.ring.value, head, chunk.append_row) + block * (C::kBlockRows * 2);
    if constexpr (C::kDeltaRule) {
      // A correction is rounded as its record is before anything uses it.
      float u[C::kRowsPerThread];
#pragma unroll
      for (int r = 0; r < C::kRowsPerThread; ++r) u[r] = beta * (new_value[r] - read[r]);
      uint32_t pairs[C::kRowsPerThread / 2];
#pragma unroll
      for (int r = 0; r < C::kRowsPerThread; r += 2) {
        const uint32_t pair = ptx::NarrowFp16(u[r], u[r + 1]);
        pairs[r / 2] = pair;
        u[r] = ptx::WidenFp16(static_cast<uint16_t>(pair));
        u[r + 1] = ptx::WidenFp16(static_cast<uint16_t>(pair >> 16));
        FlagUnless(Finite(u[r]) && Finite(u[r + 1]), kPoisonOverflow);
        output[r] = fmaf(new_dot_, u[r], output[r]);
        output[r + 1] = fmaf(new_dot_, u[r + 1], output[r + 1]);
      }
      StorePairs(record + first_row * 2, pairs);
    } else if (warp_ == 0 && lane_ < C::kBlockRows / 8) {
      ptx::StoreThrough(record + 16 * lane_, new_values);
    }
    StoreOutput(row, head, head_row, output);
    if (folds_) Fold(chunk, row, head, head_row, tile, value, scale);
  }

  // Lane j: log alpha of record j < `end`, of the new token at j = end if it counts; else 0.
  __device__ float LogAlpha(const ChunkStage<C>& chunk, uint32_t head_in_group, uint32_t end,
                            bool with_new) {
    if (lane_ < end) return chunk.log_alpha[lane_ * (C::kDecayBytes / 4) + head_in_group];
    if (!with_new || lane_ != end) return 0;
    const float log_alpha = chunk.new_log_alpha[chunk.new_scalar + head_in_group];
    FlagUnless(Finite(log_alpha), kPoisonInput);
    FlagUnless(!(log_alpha > 0), kPoisonDecay);
    return log_alpha;
  }
  // Lane j: dt of record j, the new token's at j = h; 1 without such.
  __device__ float ValueScale(const ChunkStage<C>& chunk, uint32_t head_in_group) {
    if constexpr (C::kDeltaRule) return 1;
    if (lane_ < committed_) return chunk.value_scale[lane_ * (C::kScalarBytes / 4) + head_in_group];
    if (lane_ != committed_) return 0;
    const float scale = NewValueScale(chunk, head_in_group);
    FlagUnless(Finite(scale), kPoisonInput);
    return scale;
  }

  // S' = gamma_{1:n} S + sum_{j < n} u_j (gamma_{j+1:n} k_j)^T, in the registers that hold S.
  __device__ void Fold(const ChunkStage<C>& chunk, const DeviceRow& row, uint32_t head,
                       uint32_t first_row, float4 (&tile)[C::kRowsPerThread][kVectors],
                       float (&value)[kFoldSlots][C::kRowsPerThread], float scale) {
    float4 gamma[kVectors];
    float weight = 1;
    if constexpr (C::kChannelwise) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        gamma[i] = *reinterpret_cast<const float4*>(chunk.gamma + 4 * column_ + 32 * i);
    } else {
      float total;
      weight = scale *
               __expf(SumAfter(LogAlpha(chunk, head % C::kHeadsPerGroup, folded_, false), total));
      const float all = __expf(total);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) gamma[i] = {all, all, all, all};
    }
#pragma unroll
    for (int r = 0; r < C::kRowsPerThread; ++r) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) tile[r][i] = Multiply(tile[r][i], gamma[i]);
    }
#pragma unroll
    for (int slot = 0; slot < kFoldSlots; ++slot) {
      if (8 * slot >= folded_) break;
      const float w = __shfl_sync(~0u, weight, 8 * slot + column_);
#pragma unroll
      for (int r = 0; r < C::kRowsPerThread; ++r) value[slot][r] *= w;
      const uint32_t end = min(8u, folded_ - 8 * slot);
#pragma unroll 2
      for (uint32_t j = 0; j < end; ++j) {
        const uint32_t at = (8 * slot + j) * kDk + 4 * column_;
        float4 key[kVectors];
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          if constexpr (C::kChannelwise) {
            key[i] = *reinterpret_cast<const float4*>(chunk.log_alpha + at + 32 * i);
          } else {
            key[i] = WidenKeys(chunk.keys + at + 32 * i);
          }
        }
#pragma unroll
        for (int r = 0; r < C::kRowsPerThread; ++r) {
          const float u = __shfl_sync(~0u, value[slot][r], j, 8);
#pragma unroll
          for (int i = 0; i < kVectors; ++i) {
            float4& s = tile[r][i];
            s = {fmaf(u, key[i].x, s.x), fmaf(u, key[i].y, s.y), fmaf(u, key[i].z, s.z),
                 fmaf(u, key[i].w, s.w)};
          }
        }
      }
    }
    float probe = 0;  // NaN if an element is not finite
    auto* target = reinterpret_cast<float4*>(
        launch_.pages + row.target_page * launch_.page.page_bytes +
        (uint64_t{head} * C::kDv + first_row + row_in_four_) * (kDk * sizeof(float)));
#pragma unroll
    for (int r = 0; r < C::kRowsPerThread; ++r) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float4 s = tile[r][i];
        probe = fmaf(0.0f, (s.x + s.y) + (s.z + s.w), probe);
        target[r * kDk + 8 * i + column_] = s;
      }
    }
    FlagUnless(probe == 0, kPoisonOverflow);
  }

  // Rows first_row + 4 r + row_in_four of a warp, 16 bits each; pairs[i] holds r = 2 i and 2 i + 1.
  __device__ void StorePairs(std::byte* target, const uint32_t (&pairs)[C::kRowsPerThread / 2]) {
#pragma unroll
    for (int i = 0; i < C::kRowsPerThread / 2; ++i) {
      uint32_t of_row[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) of_row[r] = __shfl_sync(~0u, pairs[i], 8 * r);
      const uint4 rows = {
          __byte_perm(of_row[0], of_row[1], 0x5410), __byte_perm(of_row[2], of_row[3], 0x5410),
          __byte_perm(of_row[0], of_row[1], 0x7632), __byte_perm(of_row[2], of_row[3], 0x7632)};
      if (lane_ == i) ptx::StoreThrough(target + 16 * i, rows);
    }
  }

  __device__ void StoreOutput(const DeviceRow& row, uint32_t head, uint32_t first_row,
                              const float (&output)[C::kRowsPerThread]) {
    auto* target = reinterpret_cast<std::byte*>(
        static_cast<Output*>(launch_.output) +
        (uint64_t{row.first_token} * launch_.shape.head_count + head) * C::kDv + first_row);
    if constexpr (sizeof(Output) == 2) {
      uint32_t pairs[C::kRowsPerThread / 2];
#pragma unroll
      for (int r = 0; r < C::kRowsPerThread; r += 2) {
        const uint32_t pair = ptx::NarrowBf16(output[r], output[r + 1]);
        const float2 rounded = ptx::WidenBf16(pair);
        FlagUnless(Finite(rounded.x) && Finite(rounded.y), kPoisonOverflow);
        pairs[r / 2] = pair;
      }
      StorePairs(target, pairs);
    } else {
#pragma unroll
      for (int r = 0; r < C::kRowsPerThread; ++r) {
        FlagUnless(Finite(output[r]), kPoisonOverflow);
        const uint32_t bits = __float_as_uint(output[r]);
        const uint4 rows = {__shfl_sync(~0u, bits, 0), __shfl_sync(~0u, bits, 8),
                            __shfl_sync(~0u, bits, 16), __shfl_sync(~0u, bits, 24)};
        if (lane_ == r) ptx::StoreThrough(target + 16 * r, rows);
      }
    }
  }

  const VerifyLaunch& launch_;
  SharedStorage<C>& shared_;
  const uint32_t lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32;
  const uint32_t column_ = threadIdx.x % 8, row_in_four_ = threadIdx.x % 32 / 8;
  uint32_t consumed_ = 0;  // items
  uint32_t flags_ = kPoisonNone;
  // The chunk at hand.
  uint32_t committed_ = 0, folded_ = 0;
  bool folds_ = false;
  float dot_q_ = 0, dot_k_ = 0, new_dot_ = 0;  // of record `lane`, and k_new . q
  float4 query_[kVectors], key_[kVectors];
};

}  // namespace ssmd::cuda::sm90
