// A small valid ModelSpec in raw form: every family, random layer parameters.
#pragma once

#include <random>

#include "tests/testing/model_specs.h"
#include "tests/testing/raw_inputs.h"

namespace ssmd::testing {

// Shape of a layer of RawSpec.
inline LayerShape RawShape(uint32_t layer_id) {
  if (layer_id == 9) return {Family::kGdn, 2, 1, 16, 8, 3};
  if (layer_id == 11) return {Family::kKda, 2, 2, 16, 8, 2};
  return {Family::kMamba2, 4, 2, 16, 8, 4};
}
inline constexpr uint32_t kRawLayers[] = {3, 5, 9, 11};

inline void FillParameters(const LayerShape& shape, const RawParameters& raw,
                           v1::LayerParameters& proto) {
  proto.set_conv_width(shape.conv_width);
  proto.mutable_conv_weight()->Add(raw.conv_weight.begin(), raw.conv_weight.end());
  proto.mutable_conv_bias()->Add(raw.conv_bias.begin(), raw.conv_bias.end());
  proto.mutable_a_log()->Add(raw.a_log.begin(), raw.a_log.end());
  proto.mutable_dt_bias()->Add(raw.dt_bias.begin(), raw.dt_bias.end());
  proto.mutable_d()->Add(raw.d.begin(), raw.d.end());
  proto.set_qk_l2_norm(raw.qk_l2_norm);
  if (shape.family == Family::kKda) {
    proto.set_kda_gate(raw.kda_gate == KdaGate::kLowerBound ? v1::KDA_GATE_LOWER_BOUND
                                                            : v1::KDA_GATE_SOFTPLUS);
    proto.set_gate_lower_bound(raw.gate_lower_bound);
  }
}

// SmallSpec's layers and KDA layer 11 (2 heads in 2 groups), convolution widths 4, 3 and 2.
// `parameters`: if given, those of each layer in order.
inline v1::ModelSpec RawSpec(std::mt19937_64& random,
                             std::vector<RawParameters>* parameters = nullptr) {
  v1::ModelSpec spec = SmallSpec();
  spec.set_name("raw");
  spec.set_input_form(v1::INPUT_FORM_RAW);
  v1::LayerGroup* kda = spec.add_layer_groups();
  kda->set_family(v1::FAMILY_KDA);
  kda->add_layer_ids(11);
  kda->set_head_count(2);
  kda->set_key_group_count(2);
  kda->set_d_k(16);
  kda->set_d_v(8);
  for (v1::LayerGroup& group : *spec.mutable_layer_groups()) {
    for (const uint32_t id : group.layer_ids()) {
      const LayerShape shape = RawShape(id);
      const RawParameters raw = RandomRawParameters(shape, {.lower_bound = true}, random);
      FillParameters(shape, raw, *group.add_parameters());
      if (parameters != nullptr) parameters->push_back(raw);
    }
  }
  return spec;
}

}  // namespace ssmd::testing
