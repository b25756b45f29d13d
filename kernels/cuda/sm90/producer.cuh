// The producer warp (kernel.cuh): claims work, issues every copy.
#pragma once

#include "kernels/cuda/sm90/config.cuh"

namespace ssmd::cuda::sm90 {

// Adjacent items of one key group; none if count is 0.
struct ItemRange {
  uint32_t first = 0, count = 0;
};

// How the items of all rows, folding rows first, are dealt out to the blocks.
//
// Few items: every block gets a range of equal weight, where an item that folds weighs two. Many:
// chunks are claimed, single ones at the end.
template <class C>
class WorkList {
 public:
  __device__ WorkList(uint32_t items, uint32_t folding_items, const Schedule& schedule)
      : items_(items), even_(items <= schedule.even_items * gridDim.x) {
    if (even_) {
      const uint32_t weight = items + folding_items;  // few: products fit 32 bits
      auto item_at = [&](uint32_t block) {            // the first one of a block
        const uint32_t at = weight * block / gridDim.x;
        return at < 2 * folding_items ? (at + 1) / 2 : at - folding_items;
      };
      begin_ = item_at(blockIdx.x);
      end_ = item_at(blockIdx.x + 1);
      return;
    }
    chunk_items_ = schedule.chunk_items;
    big_chunks_ = chunk_items_ > 1 ? (items - (items >> schedule.single_shift)) / chunk_items_ : 0;
    chunks_ = items - big_chunks_ * (chunk_items_ - 1);
  }
  __device__ bool even() const { return even_; }

  // Even deal: this block's first range, and the one behind another.
  __device__ ItemRange First() const { return RangeAt(begin_); }
  __device__ ItemRange After(ItemRange range) const {
    return range.count == 0 ? range : RangeAt(range.first + range.count);
  }

  // Otherwise: chunk c of chunks().
  __device__ uint32_t chunks() const { return chunks_; }
  __device__ ItemRange Chunk(uint32_t c) const {
    if (c >= chunks_) return {};
    if (c < big_chunks_) return {c * chunk_items_, chunk_items_};
    return {c + big_chunks_ * (chunk_items_ - 1), 1};
  }

 private:
  __device__ ItemRange RangeAt(uint32_t first) const {
    if (first >= end_) return {};
    return {first, min(end_ - first, C::kItemsPerGroup - first % C::kItemsPerGroup)};
  }

  uint32_t items_;
  bool even_;
  uint32_t begin_ = 0, end_ = 0;
  uint32_t chunk_items_ = 1, big_chunks_ = 0, chunks_ = 0;
};

// ---- The producer: one warp; lanes issue copies side by side.
template <class C>
class Producer {
 public:
  __device__ Producer(const VerifyLaunch& launch, const Schedule& schedule,
                      SharedStorage<C>& shared)
      : launch_(launch),
        schedule_(schedule),
        shared_(shared),
        items_per_row_(launch.shape.key_group_count * C::kItemsPerGroup) {}

  __device__ void Run() {
    if (!schedule_.prefetch) WaitForPrevious();
    const Rows rows = OrderRows(launch_.step->row_count);
    const WorkList<C> work(rows.count * items_per_row_, rows.folding * items_per_row_, schedule_);
    // Chunks: three rounds are dealt out by block index. From then on they are claimed, one round
    // before their row is loaded and two before they are issued, so nothing waits for either. All
    // blocks together claim chunks() times; the last claim takes the counter back to 0.
    const uint32_t dealt = 3 * gridDim.x;
    const bool dynamic = !work.even() && work.chunks() > dealt;
    uint32_t ticket = 0;
    ItemRange ranges[2];
    if (work.even()) {
      ranges[0] = work.First();
      ranges[1] = work.After(ranges[0]);
    } else {
      ranges[0] = work.Chunk(blockIdx.x);
      ranges[1] = work.Chunk(blockIdx.x + gridDim.x);
    }
    const uint32_t word = LoadRowWord(ranges[0]), next_word = LoadRowWord(ranges[1]);
    Chunk now = Unpack(ranges[0], word);
    Chunk next = Unpack(ranges[1], next_word);
    if (schedule_.prefetch) {
      // As much as there are stages for: the state and records of two items.
      Start(now);
      if (now.issued < kStages) Start(next);
      WaitForPrevious();
      IssueInputs(now);
      IssueInputs(next);
    }
    ItemRange last = ranges[1];  // the range of `next`
    for (uint32_t round = 0; now.count != 0; ++round) {
      if (work.even()) {
        last = work.After(last);
      } else {
        last = work.Chunk(dynamic && round > 0 ? dealt + __shfl_sync(~0u, ticket, 0)
                                               : blockIdx.x + (round + 2) * gridDim.x);
      }
      const uint32_t later_word = LoadRowWord(last);
      if (dynamic && lane_ == 0) ticket = atomicInc(launch_.work_counter, work.chunks() - 1);
      Finish(now);
      now = next;
      next = Unpack(last, later_word);
    }
    AnnounceEnd();
  }

 private:
  // A chunk with the row it belongs to; `issued` items of it are under way.
  struct Chunk {
    uint32_t row_word;  // lane i: word i of the row
    uint32_t row, item, count, group;
    uint32_t committed, tokens, first_record, slot, token, source_page;
    bool folds;
    ChunkKind kind;  // kEnd: there is nothing to do
    uint32_t issued;
    uint32_t index, first_stage;  // of ChunkStage; of the first item
  };

  __device__ void WaitForPrevious() {
    ptx::WaitForPrevious();
    ptx::AllowNext();
    waited_ = true;
  }

  __device__ static bool Takes(uint32_t tokens) {
    return tokens >= C::kTokensMin && tokens <= C::kTokensMax;
  }

  // The rows of this kernel. Where they are few, those that fold come first, so that their weight
  // can be dealt out; where they are many, writes are better spread (measured: 2.5 % at B = 256).
  // More rows than can be ordered stay in the plan's order, rows of other kernels included.
  struct Rows {
    uint32_t count, folding;
  };
  __device__ Rows OrderRows(uint32_t rows) {
    ordered_ = rows > 1 && rows <= kOrderedRowsMax;
    if (!ordered_) return {rows, 0};
    const bool folding_first = rows * items_per_row_ <= schedule_.even_items * gridDim.x;
    uint32_t folding_count = 0, count = 0;
    constexpr int kBatch = 4;  // loads that are under way together
    for (uint32_t first = 0; first < rows; first += kBatch * 32) {
      uint32_t target[kBatch], tokens[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const DeviceRow* row = launch_.rows + first + 32 * i + lane_;
        const bool there = first + 32 * i + lane_ < rows;
        target[i] = there ? __ldcg(&row->target_page) : 0;
        tokens[i] = there ? __ldcg(&row->draft_tokens) : 0;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool folds = Takes(tokens[i]) && folding_first && target[i] != ToInt(kNoPage);
        const bool reads = Takes(tokens[i]) && !folds;
        const uint32_t folding = __ballot_sync(~0u, folds);
        const uint32_t reading = __ballot_sync(~0u, reads);
        const uint32_t before = (1u << lane_) - 1;
        // Folding rows from the front, the others from the back.
        const uint32_t rank =
            folds ? folding_count + __popc(folding & before)
                  : kOrderedRowsMax - 1 - (count - folding_count + __popc(reading & before));
        if (folds || reads) shared_.row_order[rank] = static_cast<uint16_t>(first + 32 * i + lane_);
        folding_count += __popc(folding);
        count += __popc(folding | reading);
      }
    }
    folding_ = folding_count;
    __syncwarp();
    return {count, folding_count};
  }
  __device__ uint32_t RowOf(uint32_t item) const {
    const uint32_t rank = item / items_per_row_;
    if (!ordered_) return rank;
    return shared_.row_order[rank < folding_ ? rank : kOrderedRowsMax - 1 - (rank - folding_)];
  }

  __device__ uint32_t LoadRowWord(ItemRange range) const {
    if (range.count == 0 || lane_ >= kRowWords) return 0;
    const DeviceRow* row = launch_.rows + RowOf(range.first);
    return __ldcg(reinterpret_cast<const uint32_t*>(row) + lane_);
  }

  __device__ Chunk Unpack(ItemRange range, uint32_t word) const {
    auto get = [&](size_t offset) {
      return __shfl_sync(~0u, word, static_cast<uint32_t>(offset / 4));
    };
    const uint32_t base_low = get(offsetof(DeviceRow, base));
    const uint32_t base_high = get(offsetof(DeviceRow, base) + 4);
    Chunk c;
    c.row_word = word;
    c.row = range.count == 0 ? 0 : RowOf(range.first);
    c.item = range.first % items_per_row_;
    c.group = c.item / C::kItemsPerGroup;
    c.committed = get(offsetof(DeviceRow, tail)) - base_low;
    c.tokens = get(offsetof(DeviceRow, draft_tokens));
    c.slot = get(offsetof(DeviceRow, slot));
    c.token = get(offsetof(DeviceRow, first_token));
    c.source_page = get(offsetof(DeviceRow, source_page));
    c.folds = get(offsetof(DeviceRow, target_page)) != ToInt(kNoPage);
    // base mod R in 32-bit arithmetic: R is at most kRingRecordsMax.
    const uint32_t r = launch_.ring.ring_records;
    c.first_record = ((base_high % r) * (0xffffffffu % r + 1) + base_low % r) % r;
    c.count = range.count;
    c.kind = c.count == 0 || !Takes(c.tokens) ? ChunkKind::kEnd
             : c.slot == ToInt(kNoSlot)       ? ChunkKind::kZero
                                              : ChunkKind::kWork;
    c.issued = 0;
    return c;
  }

  // First item and what its chunk shares, then more items while stages are free without waiting
  // for the consumers' first release; after the wait, one item.
  __device__ void Start(Chunk& c) {
    if (c.kind != ChunkKind::kWork) return;
    c.first_stage = issued_ % kStages;
    IssueItem(c);
    IssueShared(c);
    if (!waited_) {
      while (c.issued < c.count && issued_ < kStages) IssueItem(c);
    }
  }

  // What Start left of a chunk.
  __device__ void Finish(Chunk& c) {
    if (c.kind == ChunkKind::kZero) Announce(c, 0);
    if (c.kind != ChunkKind::kWork) return;
    if (c.issued == 0) Start(c);
    while (c.issued < c.count) IssueItem(c);
  }

  // The inputs of what was started before the wait.
  __device__ void IssueInputs(const Chunk& c) {
    if (c.issued == 0) return;
    IssueSharedInputs(c);
    for (uint32_t i = 0; i < c.issued; ++i) IssueItemInputs(c, i, (c.first_stage + i) % kStages);
  }

  // The next item of the chunk: state tile, values of the records, the new tokens' values.
  __device__ void IssueItem(Chunk& c) {
    const uint32_t item = c.item + c.issued;
    const uint32_t stage = issued_ % kStages;
    if (issued_ >= kStages) ptx::Wait(&shared_.item_empty[stage], (issued_ / kStages - 1) & 1);
    ++issued_;
    ptx::Barrier* full = &shared_.item_full[stage];
    if (lane_ == 0) {
      ptx::ArriveExpecting(full, C::kTileBytes + (c.committed + c.tokens) * C::kValueBytes);
      const std::byte* tile =
          launch_.pages + c.source_page * launch_.page.page_bytes + uint64_t{item} * C::kTileBytes;
      if (c.folds) {  // what is written must leave the L2 too, so reads make no way for it
        ptx::BulkLoad(shared_.items[stage].tile, tile, C::kTileBytes, full);
      } else {
        ptx::BulkLoad(shared_.items[stage].tile, tile, C::kTileBytes, full, policy_);
      }
    }
    __syncwarp();
    const std::byte* records = Ring(c, launch_.ring.value, item / C::kBlocksPerHead);
    IssueRecords<C::kValueBytes, C::kValuePitch * 2>(c, 0, shared_.items[stage].values, records,
                                                     full);
    if (waited_) IssueItemInputs(c, c.issued, stage);
    ++c.issued;
  }

  __device__ void IssueItemInputs(const Chunk& c, uint32_t i, uint32_t stage) {
    if (lane_ >= c.tokens) return;
    const uint64_t head =
        (uint64_t{c.token} + lane_) * launch_.shape.head_count + (c.item + i) / C::kBlocksPerHead;
    ptx::BulkLoad(shared_.items[stage].values + (c.committed + lane_) * C::kValuePitch,
                  static_cast<const uint16_t*>(launch_.inputs.v) + head * C::kDv, C::kValueBytes,
                  &shared_.item_full[stage]);
  }

  // The committed records of one run. Without padding two copies, from lanes first_lane and
  // first_lane + 1: up to the end of the ring, and the rest. With padding a lane copies a record.
  template <uint32_t kBytes, uint32_t kPitchBytes>
  __device__ void IssueRecords(const Chunk& c, uint32_t first_lane, void* shared,
                               const std::byte* run, ptx::Barrier* full) {
    auto* target = static_cast<std::byte*>(shared);
    if constexpr (kBytes == kPitchBytes) {
      const uint32_t until_end = launch_.ring.ring_records - c.first_record;
      const uint32_t straight = c.committed < until_end ? c.committed : until_end;
      const bool rest = lane_ == first_lane + 1;
      const uint32_t count = rest ? c.committed - straight : lane_ == first_lane ? straight : 0;
      if (count != 0) {
        ptx::BulkLoad(target + (rest ? straight * kBytes : 0),
                      run + (rest ? 0 : c.first_record * kBytes), count * kBytes, full, policy_);
      }
    } else if (lane_ < c.committed) {
      const uint32_t row = c.first_record + lane_;
      const uint32_t wrapped =
          row < launch_.ring.ring_records ? row : row - launch_.ring.ring_records;
      ptx::BulkLoad(target + lane_ * kPitchBytes, run + wrapped * kBytes, kBytes, full, policy_);
    }
  }

  __device__ bool Scaled() const { return C::kDeltaRule || launch_.inputs.value_scale != nullptr; }

  // Keys and decays of the records, and the new tokens' q, k and scalars.
  __device__ void IssueShared(Chunk& c) {
    const uint32_t scale_bytes = Scaled() ? C::kScalarBytes : 0;
    uint32_t bytes = c.tokens * (2 * C::kKeyBytes + C::kDecayBytes + scale_bytes) +
                     c.committed * (C::kKeyBytes + C::kDecayBytes);
    if (!C::kDeltaRule) bytes += c.committed * C::kScalarBytes;
    Announce(c, bytes);
    ChunkStage<C>& chunk = shared_.chunks[c.index];
    ptx::Barrier* full = &shared_.chunk_full[c.index];
    IssueRecords<C::kKeyBytes, C::kKeyPitch * 2>(c, 0, chunk.keys,
                                                 Ring(c, launch_.ring.key, c.group), full);
    IssueRecords<C::kDecayBytes, C::kDecayBytes>(c, 28, chunk.log_alpha,
                                                 Ring(c, launch_.ring.log_alpha, c.group), full);
    if constexpr (!C::kDeltaRule) {
      IssueRecords<C::kScalarBytes, C::kScalarBytes>(
          c, 30, chunk.value_scale, Ring(c, launch_.ring.value_scale, c.group), full);
    }
    if (waited_) IssueSharedInputs(c);
  }

  // Lane 8 i + s: tensor i of token s.
  __device__ void IssueSharedInputs(const Chunk& c) {
    const uint32_t s = lane_ % 8, tensor = lane_ / 8;
    if (s >= c.tokens || (tensor == 3 && !Scaled())) return;
    const VerifyInputs& inputs = launch_.inputs;
    ChunkStage<C>& chunk = shared_.chunks[c.index];
    const uint64_t token = uint64_t{c.token} + s;
    const uint64_t first_key = (token * launch_.shape.key_group_count + c.group) * kDk;
    // FP32 [token, head] of the group's heads, in a 16-byte window.
    const uint64_t first_scalar =
        (token * launch_.shape.head_count + c.group * C::kHeadsPerGroup) & ~uint64_t{3};
    const void* source;
    void* target;
    uint32_t bytes = C::kKeyBytes;
    if (tensor == 0) {
      source = static_cast<const uint16_t*>(inputs.q) + first_key;
      target = chunk.query + s * C::kKeyPitch;
    } else if (tensor == 1) {
      source = static_cast<const uint16_t*>(inputs.k) + first_key;
      target = chunk.keys + (c.committed + s) * C::kKeyPitch;
    } else if (tensor == 2) {  // channelwise: groups are heads
      source = inputs.log_alpha + (C::kChannelwise ? first_key : first_scalar);
      target = chunk.new_log_alpha + s * (C::kDecayBytes / 4);
      bytes = C::kDecayBytes;
    } else {
      source = (C::kDeltaRule ? inputs.beta : inputs.value_scale) + first_scalar;
      target = chunk.new_scale + s * (C::kScalarBytes / 4);
      bytes = C::kScalarBytes;
    }
    ptx::BulkLoad(target, source, bytes, &shared_.chunk_full[c.index]);
  }

  // Hands a chunk's description to the consumers; `bytes` of copies are still to be issued.
  __device__ void Announce(Chunk& c, uint32_t bytes) {
    c.index = announced_ % 2;
    if (announced_ >= 2) ptx::Wait(&shared_.chunk_empty[c.index], (announced_ / 2 - 1) & 1);
    ++announced_;
    ChunkStage<C>& chunk = shared_.chunks[c.index];
    if (lane_ < kRowWords) chunk.row_words[lane_] = c.row_word;
    if (lane_ == 0) {
      const uint32_t append = c.first_record + c.committed;
      chunk.kind = c.kind;
      chunk.row = c.row;
      chunk.first_item = c.item;
      chunk.item_count = c.count;
      chunk.append_row =
          append < launch_.ring.ring_records ? append : append - launch_.ring.ring_records;
      chunk.new_scalar = (c.group * C::kHeadsPerGroup) % 4;
    }
    // Every lane that has written arrives.
    if (lane_ == 0) {
      ptx::ArriveExpecting(&shared_.chunk_full[c.index], bytes);
    } else if (lane_ < kRowWords) {
      ptx::Arrive(&shared_.chunk_full[c.index]);
    }
    __syncwarp();
  }
  __device__ void AnnounceEnd() {
    Chunk end{};
    end.kind = ChunkKind::kEnd;
    Announce(end, 0);
  }

  __device__ const std::byte* Ring(const Chunk& c, const RingRuns& runs, uint32_t run) const {
    return launch_.rings + c.slot * launch_.ring.slot_bytes + runs.offset_bytes +
           uint64_t{run} * launch_.ring.ring_records * runs.row_bytes;
  }

  const VerifyLaunch& launch_;
  const Schedule& schedule_;
  SharedStorage<C>& shared_;
  const uint32_t items_per_row_;
  const uint32_t lane_ = threadIdx.x % 32;
  const uint64_t policy_ = ptx::EvictFirst();
  uint32_t issued_ = 0, announced_ = 0;  // items, chunks
  bool waited_ = false;
  bool ordered_ = false;  // by row_order, in which `folding_` rows fold
  uint32_t folding_ = 0;
};

}  // namespace ssmd::cuda::sm90
