// A small valid ModelSpec with all that the service tells apart: two families, odd layer numbers.
#pragma once

#include "ssmd/v1/state_service.pb.h"

namespace ssmd::testing {

// Layers 3 and 5: Mamba-2, 4 heads in 2 groups, 16 x 8. Layer 9: GDN, 2 heads in 1 group, 16 x 8.
// FP32 everywhere, L = 8, T_max = 4, K = 2.
inline v1::ModelSpec SmallSpec() {
  v1::ModelSpec spec;
  spec.set_name("small");
  v1::LayerGroup* mamba = spec.add_layer_groups();
  mamba->set_family(v1::FAMILY_MAMBA2);
  mamba->add_layer_ids(3);
  mamba->add_layer_ids(5);
  mamba->set_head_count(4);
  mamba->set_key_group_count(2);
  mamba->set_d_k(16);
  mamba->set_d_v(8);
  v1::LayerGroup* gdn = spec.add_layer_groups();
  gdn->set_family(v1::FAMILY_GDN);
  gdn->add_layer_ids(9);
  gdn->set_head_count(2);
  gdn->set_key_group_count(1);
  gdn->set_d_k(16);
  gdn->set_d_v(8);
  spec.set_input_form(v1::INPUT_FORM_POST_CONV);
  spec.set_activation_dtype(v1::DATA_TYPE_FP32);
  spec.set_correction_dtype(v1::DATA_TYPE_FP32);
  spec.set_output_dtype(v1::DATA_TYPE_FP32);
  spec.set_checkpoint_dtype(v1::DATA_TYPE_FP32);
  spec.set_window_records(8);
  spec.set_draft_tokens_max(4);
  spec.set_rollback_tokens_min(2);
  spec.set_tp_size(1);
  spec.set_pp_size(1);
  spec.set_flush_mode(v1::FLUSH_MODE_FUSED);
  return spec;
}

}  // namespace ssmd::testing
