// The byte layout of everything the service keeps per layer: checkpoint pages and replay rings.
//
// Shared by whoever writes bytes and whoever reads them; private to this process (import and export
// convert).
//
//   page  (one per sequence, all layers)     pool of a layer: [page][hp | lp]
//           hp, lp                           [head][d_v][d_k], d_k innermost
//   ring  (one per slot)                     pool of a layer: [slot][component][row]
//           key            k (B)             [R][key_group][d_k]        activation dtype
//           value          x (Mamba-2)       [R][head][d_v]             activation dtype
//                          u (GDN, KDA)      [R][head][d_v]             correction dtype
//           log_alpha      log decay         [R][head], KDA [R][head][d_k]   FP32
//           value_scale    dt (Mamba-2)      [R][head]                  FP32; v = dt * x is never
//           stored target, beta   v, beta           two-precision GDN and KDA only: u is re-derived
//           from them conv           conv inputs       raw input form only: its own modulus, see
//           conv_rows
//
// A record of absolute position p lives in row p mod R. Rows are padded to 16 bytes so that bulk
// copies may move them. All offsets are 64 bit: slot * stride passes 2^31.
#pragma once

#include <cstdint>

#include "kernels/formats.h"

namespace ssmd {

enum class Family : uint8_t { kMamba2 = 1, kGdn = 2, kKda = 3 };

constexpr const char* FamilyName(Family family) {
  switch (family) {
    case Family::kMamba2:
      return "mamba2";
    case Family::kGdn:
      return "gdn";
    case Family::kKda:
      return "kda";
  }
  return "?";
}

// One SSM layer of one shard. Heads of a key group are adjacent: head h reads group h / (head_count
// / key_group_count).
struct LayerShape {
  Family family = Family::kMamba2;
  uint32_t head_count = 0;
  uint32_t key_group_count = 0;  // divides head_count
  uint32_t d_k = 0;              // multiple of 16, at most kDimMax
  uint32_t d_v = 0;              // multiple of 8, at most kDimMax
  uint32_t conv_width = 0;       // w: raw form, 2..4; 0: post_conv form, no window

  constexpr bool is_delta_rule() const { return family != Family::kMamba2; }
  constexpr uint32_t heads_per_group() const { return head_count / key_group_count; }
  // Decays of one head and token: one scalar, or one per key channel (KDA).
  constexpr uint32_t decays_per_head() const { return family == Family::kKda ? d_k : 1; }
  // Channels of the short convolution: x|B|C or q|k|v.
  constexpr uint32_t conv_channels() const { return head_count * d_v + 2 * key_group_count * d_k; }
  constexpr uint64_t state_elements() const { return uint64_t{head_count} * d_v * d_k; }
  friend constexpr bool operator==(const LayerShape&, const LayerShape&) = default;
};

inline constexpr uint32_t kDimMax = 256;
inline constexpr uint32_t kDraftTokensMax = 16;  // the largest T any kernel is compiled for
inline constexpr uint32_t kRingRecordsMax = 256;

// Formats of one registered model.
struct Formats {
  Dtype activation = Dtype::kBf16;     // q, k, v on the wire; k and x (v) in records
  Dtype correction = Dtype::kFp16;     // u in GDN and KDA records: kFp16 or kFp32
  Dtype output = Dtype::kFp32;         // o on the wire
  Dtype checkpoint_hp = Dtype::kFp32;  // read back into the recurrence
  Dtype checkpoint_lp = Dtype::kNone;  // read copy; kNone: one shared checkpoint
  constexpr bool two_precision() const { return checkpoint_lp != Dtype::kNone; }
  friend constexpr bool operator==(const Formats&, const Formats&) = default;
};

// One component of a ring. Row r starts at offset_bytes + r * row_bytes; row_bytes == 0 means
// absent.
struct RingComponent {
  uint64_t offset_bytes = 0;
  uint64_t row_bytes = 0;
};

struct RingLayout {
  RingComponent key, value, log_alpha, value_scale, target, beta, conv;
  uint32_t ring_records = 0;  // R: rows of every component but conv
  uint32_t conv_rows = 0;     // R_conv; 0 in post_conv form
  uint64_t slot_bytes = 0;    // stride between slots of this layer's pool
  // Bytes of one record, padding included: what reading or appending one costs.
  constexpr uint64_t record_bytes() const {
    return key.row_bytes + value.row_bytes + log_alpha.row_bytes + value_scale.row_bytes +
           target.row_bytes + beta.row_bytes;
  }
};

struct PageLayout {
  uint64_t hp_bytes = 0;
  uint64_t lp_offset_bytes = 0;
  uint64_t lp_bytes = 0;    // 0: one shared checkpoint
  uint64_t page_bytes = 0;  // stride between pages of this layer's pool
};

constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr PageLayout MakePageLayout(const LayerShape& shape, const Formats& formats) {
  PageLayout page;
  page.hp_bytes = shape.state_elements() * DtypeBytes(formats.checkpoint_hp);
  page.lp_offset_bytes = RoundUp(page.hp_bytes, 128);
  page.lp_bytes = shape.state_elements() * DtypeBytes(formats.checkpoint_lp);
  page.page_bytes = RoundUp(page.lp_offset_bytes + page.lp_bytes, 128);
  return page;
}

constexpr RingLayout MakeRingLayout(const LayerShape& shape, const Formats& formats,
                                    uint32_t ring_records) {
  RingLayout ring;
  ring.ring_records = ring_records;
  uint64_t end = 0;
  auto place = [&](uint64_t row_payload_bytes) {
    RingComponent component{end, RoundUp(row_payload_bytes, 16)};
    end = RoundUp(end + component.row_bytes * ring_records, 128);
    return component;
  };
  const uint64_t keys = uint64_t{shape.key_group_count} * shape.d_k;
  const uint64_t values = uint64_t{shape.head_count} * shape.d_v;
  const Dtype value_dtype = shape.is_delta_rule() ? formats.correction : formats.activation;
  ring.key = place(keys * DtypeBytes(formats.activation));
  ring.value = place(values * DtypeBytes(value_dtype));
  ring.log_alpha = place(uint64_t{shape.head_count} * shape.decays_per_head() * sizeof(float));
  if (!shape.is_delta_rule()) ring.value_scale = place(uint64_t{shape.head_count} * sizeof(float));
  if (shape.is_delta_rule() && formats.two_precision()) {
    ring.target = place(values * DtypeBytes(formats.activation));
    ring.beta = place(uint64_t{shape.head_count} * sizeof(float));
  }
  if (shape.conv_width > 0) {  // its own modulus: the window before `base` must survive too
    ring.conv_rows = ring_records + shape.conv_width - 1;
    ring.conv = {end,
                 RoundUp(uint64_t{shape.conv_channels()} * DtypeBytes(formats.activation), 16)};
    end = RoundUp(end + ring.conv.row_bytes * ring.conv_rows, 128);
  }
  ring.slot_bytes = end;
  return ring;
}

}  // namespace ssmd
