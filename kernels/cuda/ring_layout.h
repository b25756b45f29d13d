// The byte layout of replay rings on a GPU: head-major, so that the records of one head are one
// contiguous run (two when the ring wraps) and a bulk copy brings them.
//
//   pool of a layer: [slot][component]
//     key          k (B)          [key_group][R][d_k]          activation dtype
//     value        x or u         [head][R][d_v]               activation or correction dtype
//     log_alpha    log decay      [key_group][R][heads_per_group], KDA [head][R][d_k]   FP32
//     value_scale  dt (Mamba-2)   [key_group][R][heads_per_group]                       FP32
//     target, beta                two-precision GDN and KDA: as value (activation dtype),
//     value_scale conv         conv inputs    [R_conv][channels]           activation dtype; raw
//     form only
//
// A record of absolute position p lives in row p mod R of its run. Pages are as in
// kernels/layout.h. A run of one position is padded to 16 bytes: bulk copies need multiples of 16.
#pragma once

#include "kernels/layout.h"

namespace ssmd::cuda {

// Row r of run i starts at offset_bytes + (i * R + r) * row_bytes. row_bytes == 0: absent.
struct RingRuns {
  uint64_t offset_bytes = 0;
  uint32_t row_bytes = 0;
};

struct DeviceRingLayout {
  RingRuns key, value, log_alpha, value_scale, target, beta, conv;
  uint32_t ring_records = 0;  // R
  uint32_t conv_rows = 0;     // R_conv; 0 in post_conv form
  uint64_t slot_bytes = 0;    // stride between slots of this layer's pool
};

constexpr DeviceRingLayout MakeDeviceRingLayout(const LayerShape& shape, const Formats& formats,
                                                uint32_t ring_records) {
  DeviceRingLayout ring;
  ring.ring_records = ring_records;
  uint64_t end = 0;
  auto place = [&](uint32_t runs, uint32_t row_payload_bytes) {
    RingRuns component{end, static_cast<uint32_t>(RoundUp(row_payload_bytes, 16))};
    end = RoundUp(end + uint64_t{runs} * ring_records * component.row_bytes, 128);
    return component;
  };
  const uint32_t heads = shape.head_count, groups = shape.key_group_count;
  const uint32_t scalars = shape.heads_per_group() * sizeof(float);
  const Dtype value_dtype = shape.is_delta_rule() ? formats.correction : formats.activation;
  ring.key = place(groups, shape.d_k * DtypeBytes(formats.activation));
  ring.value = place(heads, shape.d_v * DtypeBytes(value_dtype));
  ring.log_alpha = shape.family == Family::kKda
                       ? place(heads, shape.d_k * static_cast<uint32_t>(sizeof(float)))
                       : place(groups, scalars);
  if (!shape.is_delta_rule()) ring.value_scale = place(groups, scalars);
  if (shape.is_delta_rule() && formats.two_precision()) {
    ring.target = place(heads, shape.d_v * DtypeBytes(formats.activation));
    ring.beta = place(groups, scalars);
  }
  if (shape.conv_width > 0) {
    ring.conv_rows = ring_records + shape.conv_width - 1;
    ring.conv = {end, static_cast<uint32_t>(
                          RoundUp(shape.conv_channels() * DtypeBytes(formats.activation), 16))};
    end = RoundUp(end + uint64_t{ring.conv_rows} * ring.conv.row_bytes, 128);
  }
  ring.slot_bytes = end;
  return ring;
}

}  // namespace ssmd::cuda
