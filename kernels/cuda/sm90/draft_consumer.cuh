// The consumer warps of the kernels for T <= 8 (kernel.cuh): the same work on tensor cores.
//
// A warp owns 16 rows of the tile: S x~ for up to 8 queries (and 8 keys) is m16n8k16, the records'
// part another. Operands are bf16, so what is not is split into parts whose sum has its value:
//   S; W and A; R and M                  two parts: relative error 2^-18 an element
//   u, which is fp16                     two parts: exact
// Sums are FP32. q, k and Mamba-2's x are bf16 as they come.
//
// GDN. U (B^-1 + A) = R with R = V - S K~ - U_c A_c, A upper triangular: M = (B^-1 + A)^-1 is one
// 8x8 matrix a head, U = R M. u is rounded as its record is before the outputs use it.
//
// Decays are differences of prefix sums in double: exp sees the sum of the logs between two tokens,
// rounded once.
#pragma once

#include <cfloat>

#include "kernels/cuda/sm90/config.cuh"

namespace ssmd::cuda::sm90 {

// Lane 4 g + t of a warp. Everywhere: g is a row of the state and g + 8 another, 2 t and 2 t + 1
// are tokens or records; channels come in an order of their own, the same for S, q and k: the tile
// is read in pieces of 16 channels of which a lane has 4 t .. 4 t + 3.
template <class C, class Output>
class DraftConsumer {
 public:
  __device__ DraftConsumer(const VerifyLaunch& launch, SharedStorage<C>& shared)
      : launch_(launch), shared_(shared), scratch_(shared.scratch[threadIdx.x / 32]) {}

  __device__ void Run() {
    for (uint32_t n = 0;; ++n) {
      ChunkStage<C>& chunk = shared_.chunks[n % 2];
      ptx::Wait(&shared_.chunk_full[n % 2], (n / 2) & 1);
      if (chunk.kind == ChunkKind::kEnd) return;
      const auto& row = *reinterpret_cast<const DeviceRow*>(chunk.row_words);
      tokens_ = row.draft_tokens;
      if (chunk.kind == ChunkKind::kZero) {
        WriteZeros(chunk, row);
      } else {
        BeginChunk(chunk, row);
        for (uint32_t i = 0; i < chunk.item_count; ++i) Item(chunk, row, chunk.first_item + i);
        if (flags_ != kPoisonNone) atomicOr(launch_.poison + chunk.row, flags_);
        flags_ = kPoisonNone;
      }
      __syncwarp();
      if (lane_ == 0) ptx::Arrive(&shared_.chunk_empty[n % 2]);
    }
  }

 private:
  static constexpr int kPieces = kDk / 16;  // of 16 channels
  static constexpr int kTiles = 4;          // of 8 records
  static constexpr int kTokens = 8;         // columns of a product
  static constexpr uint32_t kNoHead = 0xffffffffu;
  static_assert(C::kRecordsMax + C::kTokensMax <= 8 * kTiles && C::kTokensMax <= kTokens);
  static_assert(!C::kChannelwise);

  struct Pair {  // bf16 parts of two FP32 values: their sum is the value
    uint32_t high, low;
  };
  __device__ static Pair Split(float a, float b) {
    const uint32_t high = ptx::NarrowBf16(a, b);
    const float2 rounded = ptx::WidenBf16(high);
    return {high, ptx::NarrowBf16(a - rounded.x, b - rounded.y)};
  }
  __device__ void FlagUnless(bool good, PoisonFlags flag) {
    if (!good) flags_ |= flag;
  }
  __device__ static bool Finite(float value) { return fabsf(value) <= FLT_MAX; }
  __device__ static bool FiniteBf16(uint4 values) {
    bool finite = true;
#pragma unroll
    for (const uint32_t word : {values.x, values.y, values.z, values.w}) {
      const float2 pair = ptx::WidenBf16(word);
      finite = finite && Finite(pair.x) && Finite(pair.y);
    }
    return finite;
  }
  __device__ std::byte* Ring(const DeviceRow& row, const RingRuns& runs, uint32_t run,
                             uint32_t record_row) const {
    return launch_.rings + row.slot * launch_.ring.slot_bytes + runs.offset_bytes +
           (uint64_t{run} * launch_.ring.ring_records + record_row) * runs.row_bytes;
  }
  // The ring row of draft s.
  __device__ uint32_t AppendRow(const ChunkStage<C>& chunk, uint32_t s) const {
    const uint32_t row = chunk.append_row + s;
    return row < launch_.ring.ring_records ? row : row - launch_.ring.ring_records;
  }

  __device__ void WriteZeros(const ChunkStage<C>& chunk, const DeviceRow& row) {
    const uint32_t width = chunk.item_count * C::kBlockRows;
    for (uint32_t i = threadIdx.x; i < tokens_ * width; i += C::kConsumerThreads) {
      const uint64_t token = uint64_t{row.first_token} + i / width;
      static_cast<Output*>(launch_.output)[token * launch_.shape.head_count * C::kDv +
                                           chunk.first_item * C::kBlockRows + i % width] =
          Output(0.0f);
    }
  }

  // k_j . q_s and k_j . k_s of all records, and the drafts' keys and decays appended by whoever has
  // the group's first item. Every warp for itself: the products are cheaper than a barrier.
  __device__ void BeginChunk(const ChunkStage<C>& chunk, const DeviceRow& row) {
    weighed_head_ = kNoHead;
    committed_ = static_cast<uint32_t>(row.tail - row.base);
    folds_ = row.target_page != ToInt(kNoPage);
    folded_ = folds_ ? static_cast<uint32_t>(row.fold_to - row.base) : 0;
    const uint32_t r = lane_ % 8, matrix = lane_ / 8;
    // Rows of the left operand: 8 queries, then 8 keys.
    const uint16_t* left = matrix % 2 == 0 ? chunk.query + r * C::kKeyPitch
                                           : chunk.keys + (committed_ + r) * C::kKeyPitch;
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dots_[tile][i] = dots_[tile + 1][i] = 0;
      if (8 * tile >= committed_ + tokens_) continue;
      const uint32_t j = 8 * tile + r + 8 * (matrix / 2);
      const uint16_t* right = chunk.keys + j * C::kKeyPitch;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        uint32_t a[4], b[4];
        ptx::LoadMatrices(a, RowOrZeros(left + 16 * piece + 8 * (matrix / 2), r < tokens_));
        ptx::LoadMatrices(
            b, RowOrZeros(right + 16 * piece + 8 * (matrix % 2), j < committed_ + tokens_));
        ptx::MultiplyAdd(dots_[tile], a, b[0], b[1]);
        ptx::MultiplyAdd(dots_[tile + 1], a, b[2], b[3]);
      }
    }
    if (warp_ == 0) CheckInputs(chunk);
    if (chunk.first_item % C::kItemsPerGroup == 0 && warp_ == C::kConsumerWarps - 1)
      AppendShared(chunk, row);
  }
  __device__ uint32_t RowOrZeros(const uint16_t* row, bool there) const {
    return ptx::SharedAddress(there ? static_cast<const void*>(row) : shared_.zeros);
  }

  __device__ void CheckInputs(const ChunkStage<C>& chunk) {
    const uint32_t s = lane_ / 16, channel = lane_ % 16 * 8;
    for (uint32_t first = 0; first < tokens_; first += 2) {
      if (first + s >= tokens_) continue;
      const uint16_t* query = chunk.query + (first + s) * C::kKeyPitch + channel;
      const uint16_t* key = chunk.keys + (committed_ + first + s) * C::kKeyPitch + channel;
      FlagUnless(FiniteBf16(*reinterpret_cast<const uint4*>(query)) &&
                     FiniteBf16(*reinterpret_cast<const uint4*>(key)),
                 kPoisonInput);
    }
  }

  __device__ void AppendShared(const ChunkStage<C>& chunk, const DeviceRow& row) {
    const uint32_t group = chunk.first_item / C::kItemsPerGroup;
    for (uint32_t i = lane_; i < tokens_ * 16; i += 32) {
      const uint32_t s = i / 16, at = i % 16 * 8;
      *reinterpret_cast<uint4*>(Ring(row, launch_.ring.key, group, AppendRow(chunk, s)) + 2 * at) =
          *reinterpret_cast<const uint4*>(chunk.keys + (committed_ + s) * C::kKeyPitch + at);
    }
    for (uint32_t i = lane_; i < tokens_ * C::kHeadsPerGroup; i += 32) {
      const uint32_t s = i / C::kHeadsPerGroup, head = i % C::kHeadsPerGroup;
      const uint32_t record_row = AppendRow(chunk, s);
      const uint32_t at = s * (C::kScalarBytes / 4) + chunk.new_scalar + head;
      reinterpret_cast<float*>(Ring(row, launch_.ring.log_alpha, group, record_row))[head] =
          chunk.new_log_alpha[at];
      if constexpr (!C::kDeltaRule) {
        reinterpret_cast<float*>(Ring(row, launch_.ring.value_scale, group, record_row))[head] =
            launch_.inputs.value_scale == nullptr ? 1.0f : chunk.new_scale[at];
      }
    }
  }

  // Lane j: log alpha and dt (1 for the delta rule) of record j, drafts behind the committed ones;
  // neutral beyond.
  struct Record {
    float log_alpha = 0, scale = 0;
  };
  __device__ Record LoadRecord(const ChunkStage<C>& chunk, uint32_t head_in_group) {
    Record record;
    constexpr uint32_t kStride = C::kScalarBytes / 4;
    if (lane_ < committed_) {
      record.log_alpha = chunk.log_alpha[lane_ * kStride + head_in_group];
      record.scale = C::kDeltaRule ? 1.0f : chunk.value_scale[lane_ * kStride + head_in_group];
    } else if (lane_ < committed_ + tokens_) {
      const uint32_t at = (lane_ - committed_) * kStride + chunk.new_scalar + head_in_group;
      record.log_alpha = chunk.new_log_alpha[at];
      record.scale =
          C::kDeltaRule || launch_.inputs.value_scale == nullptr ? 1.0f : chunk.new_scale[at];
      FlagUnless(Finite(record.log_alpha) && Finite(record.scale), kPoisonInput);
      FlagUnless(!(record.log_alpha > 0), kPoisonDecay);
    }
    return record;
  }
  // Lane j: the sum over lanes up to and including j.
  __device__ double PrefixSum(double sum) const {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const double other = __shfl_up_sync(~0u, sum, offset);
      if (lane_ >= offset) sum += other;
    }
    return sum;
  }
  __device__ static float Decay(double log_sum) { return __expf(static_cast<float>(log_sum)); }

  // M = (B^-1 + A)^-1 = B (I + A B)^-1 in scratch: lane r < 8 computes row r by substitution.
  __device__ void Solve(const ChunkStage<C>& chunk, uint32_t head_in_group) {
    float a[kTokens][kTokens], beta[kTokens], m[kTokens];
#pragma unroll
    for (int s = 0; s < kTokens; ++s) {
#pragma unroll
      for (int j = 0; j < s; ++j) a[j][s] = scratch_.draft_weight[1][j][s];
      const uint32_t at = s * (C::kScalarBytes / 4) + chunk.new_scalar + head_in_group;
      beta[s] = s < tokens_ ? chunk.new_scale[at] : 0.0f;
      FlagUnless(Finite(beta[s]), kPoisonInput);
    }
#pragma unroll
    for (int s = 0; s < kTokens; ++s) {
      float sum = lane_ == s ? 1.0f : 0.0f;
#pragma unroll
      for (int j = 0; j < s; ++j) sum = fmaf(-a[j][s], m[j], sum);
      m[s] = s < tokens_ ? beta[s] * sum : 0.0f;  // beyond, `a` is garbage
    }
    if (lane_ < kTokens) {
#pragma unroll
      for (int s = 0; s < kTokens; ++s) scratch_.solve[lane_][s] = m[s];
    }
    __syncwarp();
  }

  // What the blocks of one head share: decays, W and A, M.
  __device__ void Weigh(const ChunkStage<C>& chunk, uint32_t head_in_group) {
    record_ = LoadRecord(chunk, head_in_group);
    log_sum_ = PrefixSum(record_.log_alpha);
    const double log_of_g = __shfl_sync(~0u, log_sum_, committed_ + g_);
    gamma_[0] = Decay(__shfl_sync(~0u, log_sum_, committed_ + 2 * t_));
    gamma_[1] = Decay(__shfl_sync(~0u, log_sum_, committed_ + 2 * t_ + 1));
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      weight_q_[tile] = {};
      if (C::kDeltaRule) weight_k_[C::kDeltaRule ? tile : 0] = {};
      if (8 * tile >= committed_ + tokens_) continue;
      float q[2], k[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t j = 8 * tile + 2 * t_ + i;
        const double log_of_j = __shfl_sync(~0u, log_sum_, j);
        const float decay = j <= committed_ + g_ ? Decay(log_of_g - log_of_j) : 0.0f;
        q[i] = dots_[tile][i] * decay;
        k[i] = dots_[tile][2 + i] * decay;
        if constexpr (!C::kDeltaRule) {
          q[i] *= __shfl_sync(~0u, record_.scale, j);
        } else if (j >= committed_) {
          if (j < committed_ + kTokens) {
            scratch_.draft_weight[0][j - committed_][g_] = q[i];
            scratch_.draft_weight[1][j - committed_][g_] = k[i];
          }
          q[i] = k[i] = 0;
        }
      }
      weight_q_[tile] = Split(q[0], q[1]);
      if (C::kDeltaRule) weight_k_[C::kDeltaRule ? tile : 0] = Split(k[0], k[1]);
    }
    if constexpr (C::kDeltaRule) {
      __syncwarp();
      Solve(chunk, head_in_group);
      solve_ = Split(scratch_.solve[2 * t_][g_], scratch_.solve[2 * t_ + 1][g_]);
      const bool there[2] = {2 * t_ <= g_ && g_ < tokens_, 2 * t_ + 1 <= g_ && g_ < tokens_};
      draft_weight_ = Split(there[0] ? scratch_.draft_weight[0][2 * t_][g_] : 0.0f,
                            there[1] ? scratch_.draft_weight[0][2 * t_ + 1][g_] : 0.0f);
      __syncwarp();
    }
  }

  __device__ void Item(const ChunkStage<C>& chunk, const DeviceRow& row, uint32_t item) {
    const uint32_t head = item / C::kBlocksPerHead, block = item % C::kBlocksPerHead;
    const uint32_t tile_row = warp_ * 16 + g_;
    const uint32_t head_row = block * C::kBlockRows + warp_ * 16;
    if (head != weighed_head_) Weigh(chunk, head % C::kHeadsPerGroup);
    weighed_head_ = head;

    const uint32_t stage_index = consumed_ % kStages;
    ItemStage<C>& stage = shared_.items[stage_index];
    ptx::Wait(&shared_.item_full[stage_index], (consumed_ / kStages) & 1);
    ++consumed_;

    float4 upper[kPieces], lower[kPieces];  // rows g and g + 8
    const float* source = stage.tile + tile_row * kDk + 4 * t_;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      upper[piece] = *reinterpret_cast<const float4*>(source + 16 * piece);
      lower[piece] = *reinterpret_cast<const float4*>(source + 8 * kDk + 16 * piece);
    }
    // Values of 16 records at a time, transposed: rows of the state by records.
    const uint32_t records = C::kDeltaRule ? committed_ : committed_ + tokens_;
    uint32_t values[kTiles / 2][4];
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      if (16 * pair >= records) continue;
      const uint32_t matrix = lane_ / 8;
      const uint32_t j = 16 * pair + lane_ % 8 + 8 * (matrix / 2);
      ptx::LoadMatricesTransposed(
          values[pair],
          RowOrZeros(stage.values + j * C::kValuePitch + head_row + 8 * (matrix % 2), j < records));
    }
    float target[4] = {};  // v of rows g, g + 8 and tokens 2 t, 2 t + 1
    if constexpr (C::kDeltaRule) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t s = 2 * t_ + i % 2;
        if (s >= tokens_) continue;
        target[i] = ptx::WidenBf16(
            stage.values[(committed_ + s) * C::kValuePitch + head_row + g_ + i / 2 * 8]);
        FlagUnless(Finite(target[i]), kPoisonInput);
      }
    } else {
      AppendValues(chunk, row, stage, head, block);
    }
    if (!folds_) Release(stage_index);

    float output[4] = {}, read[4] = {};
    const uint16_t* query = chunk.query + g_ * C::kKeyPitch + 4 * t_;
    const uint16_t* key = chunk.keys + (committed_ + g_) * C::kKeyPitch + 4 * t_;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const float4 x = upper[piece], y = lower[piece];
      const Pair x0 = Split(x.x, x.y), x1 = Split(x.z, x.w);
      const Pair y0 = Split(y.x, y.y), y1 = Split(y.z, y.w);
      const uint32_t high[4] = {x0.high, y0.high, x1.high, y1.high};
      const uint32_t low[4] = {x0.low, y0.low, x1.low, y1.low};
      uint2 b{};
      if (g_ < tokens_) b = *reinterpret_cast<const uint2*>(query + 16 * piece);
      ptx::MultiplyAdd(output, low, b.x, b.y);
      ptx::MultiplyAdd(output, high, b.x, b.y);
      if constexpr (C::kDeltaRule) {
        uint2 c{};
        if (g_ < tokens_) c = *reinterpret_cast<const uint2*>(key + 16 * piece);
        ptx::MultiplyAdd(read, low, c.x, c.y);
        ptx::MultiplyAdd(read, high, c.x, c.y);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      output[i] *= gamma_[i % 2];
      read[i] *= gamma_[i % 2];
    }
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      if (16 * pair >= records) continue;
      if constexpr (C::kDeltaRule) {
        uint32_t high[4], low[4];
        SplitFp16(values[pair], high, low);
        AddRecords(output, high, weight_q_[2 * pair], weight_q_[2 * pair + 1]);
        AddRecords(read, high, weight_k_[2 * pair], weight_k_[2 * pair + 1]);
        ptx::MultiplyAdd(output, low, weight_q_[2 * pair].high, weight_q_[2 * pair + 1].high);
        ptx::MultiplyAdd(read, low, weight_k_[2 * pair].high, weight_k_[2 * pair + 1].high);
      } else {
        AddRecords(output, values[pair], weight_q_[2 * pair], weight_q_[2 * pair + 1]);
      }
    }
    if constexpr (C::kDeltaRule) {
      // Both halves of k hold the 8 tokens: high parts first, low parts second.
      float residual[4], u[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        residual[i] = 2 * t_ + i % 2 < tokens_ ? target[i] - read[i] : 0.0f;
      Pair of_g = Split(residual[0], residual[1]), of_g8 = Split(residual[2], residual[3]);
      const uint32_t a[4] = {of_g.high, of_g8.high, of_g.low, of_g8.low};
      ptx::MultiplyAdd(u, a, solve_.low, 0);
      ptx::MultiplyAdd(u, a, solve_.high, solve_.high);
      const uint32_t fp16[2] = {ptx::NarrowFp16(u[0], u[1]), ptx::NarrowFp16(u[2], u[3])};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u[i] = ptx::WidenFp16(static_cast<uint16_t>(fp16[i / 2] >> (i % 2 * 16)));
        FlagUnless(2 * t_ + i % 2 >= tokens_ || Finite(u[i]), kPoisonOverflow);
      }
      of_g = Split(u[0], u[1]);
      of_g8 = Split(u[2], u[3]);
      const uint32_t b[4] = {of_g.high, of_g8.high, of_g.low, of_g8.low};
      ptx::MultiplyAdd(output, b, draft_weight_.low, draft_weight_.low);
      ptx::MultiplyAdd(output, b, draft_weight_.high, draft_weight_.high);
      StageResults(fp16[0], fp16[1]);
      const uint32_t s = lane_ / 2;
      if (s < tokens_) {
        std::byte* record = Ring(row, launch_.ring.value, head, AppendRow(chunk, s)) + head_row * 2;
        *reinterpret_cast<uint4*>(record + lane_ % 2 * 16) = StagedResult();
      }
      __syncwarp();
    }
    StoreOutput(row, head, head_row, output);
    if (folds_) {
      Fold(chunk, row, head, head_row, stage, upper, lower);
      Release(stage_index);
    }
  }

  __device__ void Release(uint32_t stage_index) {
    __syncwarp();
    if (lane_ == 0) ptx::Arrive(&shared_.item_empty[stage_index]);
  }

  __device__ static void SplitFp16(const uint32_t (&pairs)[4], uint32_t (&high)[4],
                                   uint32_t (&low)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pair parts = Split(ptx::WidenFp16(static_cast<uint16_t>(pairs[i])),
                               ptx::WidenFp16(static_cast<uint16_t>(pairs[i] >> 16)));
      high[i] = parts.high;
      low[i] = parts.low;
    }
  }
  __device__ static void AddRecords(float (&sum)[4], const uint32_t (&values)[4], const Pair& first,
                                    const Pair& second) {
    ptx::MultiplyAdd(sum, values, first.low, second.low);
    ptx::MultiplyAdd(sum, values, first.high, second.high);
  }

  // Mamba-2: the item's part of the new records, by one warp.
  __device__ void AppendValues(const ChunkStage<C>& chunk, const DeviceRow& row,
                               const ItemStage<C>& stage, uint32_t head, uint32_t block) {
    constexpr uint32_t kParts = C::kBlockRows / 8;  // of 16 bytes
    if (warp_ != 0) return;
    for (uint32_t i = lane_; i < tokens_ * kParts; i += 32) {
      const uint32_t s = i / kParts, at = block * C::kBlockRows + i % kParts * 8;
      const uint4 x =
          *reinterpret_cast<const uint4*>(stage.values + (committed_ + s) * C::kValuePitch + at);
      FlagUnless(FiniteBf16(x), kPoisonInput);
      *reinterpret_cast<uint4*>(Ring(row, launch_.ring.value, head, AppendRow(chunk, s)) + 2 * at) =
          x;
    }
  }

  // 16 rows by 8 tokens of 16 bits, from rows g and g + 8 to 16 bytes of one token in lanes 2 s and
  // 2 s + 1.
  __device__ void StageResults(uint32_t of_g, uint32_t of_g8) {
    ptx::StoreMatricesTransposed(
        ptx::SharedAddress(&scratch_.results[lane_ % 8][lane_ / 8 % 2 * 8]), of_g, of_g8);
    __syncwarp();
  }
  __device__ uint4 StagedResult() const {
    return *reinterpret_cast<const uint4*>(&scratch_.results[lane_ / 2 % 8][lane_ % 2 * 8]);
  }

  __device__ void StoreOutput(const DeviceRow& row, uint32_t head, uint32_t head_row,
                              const float (&output)[4]) {
    auto address = [&](uint32_t s) {
      return static_cast<Output*>(launch_.output) +
             ((uint64_t{row.first_token} + s) * launch_.shape.head_count + head) * C::kDv +
             head_row;
    };
    if constexpr (sizeof(Output) == 2) {
      const uint32_t pairs[2] = {ptx::NarrowBf16(output[0], output[1]),
                                 ptx::NarrowBf16(output[2], output[3])};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 rounded = ptx::WidenBf16(pairs[i]);
        FlagUnless(2 * t_ >= tokens_ || Finite(rounded.x), kPoisonOverflow);
        FlagUnless(2 * t_ + 1 >= tokens_ || Finite(rounded.y), kPoisonOverflow);
      }
      StageResults(pairs[0], pairs[1]);
      const uint32_t s = lane_ / 2;
      if (s < tokens_) *reinterpret_cast<uint4*>(address(s) + lane_ % 2 * 8) = StagedResult();
      __syncwarp();
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t s = 2 * t_ + i % 2;
        if (s >= tokens_) continue;
        FlagUnless(Finite(output[i]), kPoisonOverflow);
        address(s)[g_ + i / 2 * 8] = output[i];
      }
    }
  }

  // S' = gamma_{1:n} S + sum_{j < n} u_j (gamma_{j+1:n} k_j)^T, in the registers that hold S, FP32.
  __device__ void Fold(const ChunkStage<C>& chunk, const DeviceRow& row, uint32_t head,
                       uint32_t head_row, const ItemStage<C>& stage, float4 (&upper)[kPieces],
                       float4 (&lower)[kPieces]) {
    const double total = folded_ == 0 ? 0.0 : __shfl_sync(~0u, log_sum_, folded_ - 1);
    const float gamma = Decay(total);
    const float weight = lane_ < folded_ ? Decay(total - log_sum_) * record_.scale : 0.0f;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      upper[piece] = Scale(gamma, upper[piece]);
      lower[piece] = Scale(gamma, lower[piece]);
    }
#pragma unroll 2
    for (uint32_t j = 0; j < folded_; ++j) {
      const float w = __shfl_sync(~0u, weight, j);
      const uint16_t* values = stage.values + j * C::kValuePitch + head_row + g_;
      const float x = w * ReadValue(values[0]), y = w * ReadValue(values[8]);
      const uint16_t* keys = chunk.keys + j * C::kKeyPitch + 4 * t_;
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const uint2 words = *reinterpret_cast<const uint2*>(keys + 16 * piece);
        const float2 low = ptx::WidenBf16(words.x), high = ptx::WidenBf16(words.y);
        upper[piece] = AddScaled(x, low, high, upper[piece]);
        lower[piece] = AddScaled(y, low, high, lower[piece]);
      }
    }
    float probe = 0;  // NaN if an element is not finite
    auto* to = reinterpret_cast<float4*>(launch_.pages + row.target_page * launch_.page.page_bytes +
                                         (uint64_t{head} * C::kDv + head_row + g_) *
                                             (kDk * sizeof(float))) +
               t_;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const float4 x = upper[piece], y = lower[piece];
      probe = fmaf(0.0f, (x.x + x.y) + (x.z + x.w), probe);
      probe = fmaf(0.0f, (y.x + y.y) + (y.z + y.w), probe);
      to[4 * piece] = x;
      to[8 * (kDk / 4) + 4 * piece] = y;
    }
    FlagUnless(probe == 0, kPoisonOverflow);
  }
  __device__ static float ReadValue(uint16_t bits) {
    return C::kDeltaRule ? ptx::WidenFp16(bits) : ptx::WidenBf16(bits);
  }
  __device__ static float4 Scale(float a, float4 x) { return {a * x.x, a * x.y, a * x.z, a * x.w}; }
  __device__ static float4 AddScaled(float a, float2 low, float2 high, float4 sum) {
    return {fmaf(a, low.x, sum.x), fmaf(a, low.y, sum.y), fmaf(a, high.x, sum.z),
            fmaf(a, high.y, sum.w)};
  }

  const VerifyLaunch& launch_;
  SharedStorage<C>& shared_;
  WarpScratch& scratch_;
  const uint32_t lane_ = threadIdx.x % 32, warp_ = threadIdx.x / 32;
  const uint32_t g_ = threadIdx.x % 32 / 4, t_ = threadIdx.x % 4;
  uint32_t consumed_ = 0;  // items
  uint32_t flags_ = kPoisonNone;
  // The chunk at hand.
  uint32_t committed_ = 0, tokens_ = 0, folded_ = 0;
  bool folds_ = false;
  // [tile]: of records 8 tile + 2 t, + 1 with q_g; with k_g.
  float dots_[kTiles][4];
  // The head at hand. Lane j: record j, and the sum of logs up to it.
  uint32_t weighed_head_ = kNoHead;
  Record record_;
  double log_sum_ = 0;
  float gamma_[2];  // gamma_{1:h+s} of the two tokens whose columns this lane sums
  // Weights of records 8 tile + 2 t and + 1 for token g; GDN: the drafts' are kept apart.
  Pair weight_q_[kTiles], weight_k_[C::kDeltaRule ? kTiles : 1];
  Pair solve_, draft_weight_;
};

}  // namespace ssmd::cuda::sm90
