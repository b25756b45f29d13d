// Tile sizes and shared memory of the sm_90a verify kernels (kernel.cuh).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/sm90/ptx.cuh"
#include "kernels/cuda/verify_launch.h"

namespace ssmd::cuda::sm90 {

inline constexpr int kDk = 128;
inline constexpr int kStages = 2;
inline constexpr uint32_t kOrderedRowsMax = 512;
// Two blocks share the shared memory of an SM (228 KiB, 1 KiB of it reserved per block).
inline constexpr size_t kSharedBytesMax = (228 * 1024) / 2 - 1024;

// One item of work is `block_rows` rows of one head's state: a tile of block_rows * 512 bytes.
template <Family family, int heads_per_group, int d_v, int block_rows, int consumer_warps,
          int tokens_max>
struct Config {
  static constexpr Family kFamily = family;
  static constexpr bool kDeltaRule = family != Family::kMamba2;
  static constexpr bool kChannelwise = family == Family::kKda;
  static constexpr int kHeadsPerGroup = heads_per_group;
  // T. Rows of one token are left to the kernel for T = 1, so that a row's bytes do not depend on
  // how many tokens other rows of its step have.
  static constexpr uint32_t kTokensMin = tokens_max == 1 ? 1 : 2;
  static constexpr uint32_t kTokensMax = tokens_max;
  // Committed records of one row. What fold deferral may leave at L = 16: L + T_max.
  static constexpr int kRecordsMax = kChannelwise ? 20 : 24;
  static constexpr int kDv = d_v;
  static constexpr int kBlockRows = block_rows;
  static constexpr int kBlocksPerHead = d_v / block_rows;
  static constexpr int kItemsPerGroup = heads_per_group * kBlocksPerHead;
  static constexpr int kConsumerWarps = consumer_warps;
  static constexpr int kConsumerThreads = consumer_warps * 32;
  static constexpr int kThreads = kConsumerThreads + 32;
  // A warp owns kRowsPerWarp adjacent rows: 8 lanes a row, 4 rows at a time.
  static constexpr int kRowsPerWarp = block_rows / consumer_warps;
  static constexpr int kRowsPerThread = kRowsPerWarp / 4;

  // Rows of keys and values that ldmatrix reads are 16 bytes apart in the banks.
  static constexpr uint32_t kPadding = tokens_max == 1 ? 0 : 8;
  static constexpr uint32_t kKeyPitch = kDk + kPadding;  // elements
  static constexpr uint32_t kValuePitch = d_v + kPadding;

  static constexpr uint32_t kTileBytes = block_rows * kDk * sizeof(float);
  static constexpr uint32_t kKeyBytes = kDk * 2;
  static constexpr uint32_t kValueBytes = d_v * 2;  // one record of a head
  static constexpr uint32_t kScalarBytes = (heads_per_group * 4 + 15) / 16 * 16;
  static constexpr uint32_t kDecayBytes = kChannelwise ? kDk * 4 : kScalarBytes;

  static_assert(tokens_max == 1 || kRowsPerWarp == 16, "a tile of the tensor cores");
  static_assert(d_v % block_rows == 0 && block_rows % consumer_warps == 0);
  static_assert(kRowsPerWarp % 8 == 0, "16-byte stores of 16-bit results");
  static_assert(!kChannelwise || (heads_per_group == 1 && kConsumerThreads >= kDk));
  static_assert(heads_per_group <= 2 || heads_per_group % 4 == 0, "16-byte windows of scalars");
};

// The state tile of one item and the values of its records.
template <class C>
struct ItemStage {
  alignas(128) float tile[C::kBlockRows * kDk];
  // [record][d_v], the whole head; behind the committed records those of the new tokens
  alignas(128) uint16_t values[(C::kRecordsMax + C::kTokensMax) * C::kValuePitch];
};

enum class ChunkKind : uint32_t { kWork, kZero, kEnd };

// Lanes of the producer that describe a chunk: one a word of its row.
inline constexpr uint32_t kRowWords = sizeof(DeviceRow) / 4;

// Adjacent items of one row and key group, and everything that they share.
template <class C>
struct ChunkStage {
  // [record][d_k]; behind the committed records those of the new tokens
  alignas(128) uint16_t keys[(C::kRecordsMax + C::kTokensMax) * C::kKeyPitch];
  // [record][head] or, channelwise, [record][d_k], where decayed keys later take their place.
  alignas(128) float log_alpha[C::kRecordsMax * C::kDecayBytes / 4];
  alignas(16) float value_scale[C::kDeltaRule ? 4 : C::kRecordsMax * C::kScalarBytes / 4];
  alignas(16) uint16_t query[C::kTokensMax * C::kKeyPitch];
  // Of the new tokens; scalars start at new_scalar in their 16-byte windows.
  alignas(16) float new_log_alpha[C::kTokensMax * C::kDecayBytes / 4];
  alignas(16) float new_scale[C::kTokensMax * C::kScalarBytes / 4];  // beta, or value_scale
  // Written by the consumers, T = 1.
  float dots[2][32];                       // k_j . q and k_j . k_new, decayed if channelwise
  float alpha[C::kChannelwise ? kDk : 1];  // of the new token
  float gamma[C::kChannelwise ? kDk : 1];  // of the committed records
  // Written by the producer.
  alignas(16) uint32_t row_words[kRowWords];
  ChunkKind kind;
  uint32_t row;
  uint32_t first_item;  // in its row
  uint32_t item_count;
  uint32_t append_row;  // of the ring: where the first new token's record goes
  uint32_t new_scalar;  // see above
};

// Scratch of one consumer warp, T > 1.
struct WarpScratch {
  float draft_weight[2][8][8];          // [q, k][record][token]: W and A among the drafts
  float solve[8][8];                    // (B^-1 + A)^-1
  alignas(16) uint16_t results[8][16];  // [token][row]
};

template <class C>
struct SharedStorage {
  ItemStage<C> items[kStages];
  ChunkStage<C> chunks[2];
  ptx::Barrier item_full[kStages], item_empty[kStages];
  ptx::Barrier chunk_full[2], chunk_empty[2];
  uint16_t row_order[kOrderedRowsMax];
  alignas(16) uint32_t zeros[4];  // a row of records that are not there
  WarpScratch scratch[C::kTokensMax == 1 ? 1 : C::kConsumerWarps];
};

// How the items of a launch are dealt out. Data, chosen in tuning.cuh.
struct Schedule {
  // Up to this many items a block they are dealt out in equal shares.
  uint32_t even_items = 20;
  // Beyond: chunks of this size, a divisor of kItemsPerGroup, are claimed; the last 1 / 2^shift of
  // the items one by one.
  uint32_t chunk_items = 4;
  uint32_t single_shift = 3;
  // 1: rows, pages and committed records may be read before the previous kernel has ended.
  uint32_t prefetch = 0;
};

}  // namespace ssmd::cuda::sm90
