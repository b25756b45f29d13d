// ssmd.v1.ModelSpec and ModelCapacity <-> plain structs; see validate.h.
#include <bit>
#include <cmath>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "service/validate.h"

namespace ssmd {
namespace {

absl::Status Expected(absl::string_view field, absl::string_view expected,
                      absl::string_view actual) {
  return InvalidField(absl::StrCat("spec.", field),
                      absl::StrCat(field, ": expected ", expected, ", got ", actual));
}

// Unset is legal here; ValidateGeometry says which formats may be.
absl::StatusOr<Dtype> ParseDtype(absl::string_view field, v1::DataType dtype) {
  if (!v1::DataType_IsValid(dtype))
    return Expected(field, "a DataType of ssmd.v1", absl::StrCat(static_cast<int>(dtype)));
  return static_cast<Dtype>(dtype);
}

std::vector<float> Floats(const google::protobuf::RepeatedField<float>& values) {
  return {values.begin(), values.end()};
}

std::string EnumName(const std::string& name, int number) {
  return name.empty() ? absl::StrCat(number) : name;
}

// Lengths and finiteness are ValidateGeometry's.
absl::StatusOr<RawParameters> ParseParameters(const std::string& at, Family family,
                                              const v1::LayerParameters& proto) {
  RawParameters raw = {.conv_weight = Floats(proto.conv_weight()),
                       .conv_bias = Floats(proto.conv_bias()),
                       .a_log = Floats(proto.a_log()),
                       .dt_bias = Floats(proto.dt_bias()),
                       .d = Floats(proto.d()),
                       .qk_l2_norm = proto.qk_l2_norm(),
                       .gate_lower_bound = proto.gate_lower_bound()};
  const v1::KdaGate gate = proto.kda_gate();
  const bool is_kda = family == Family::kKda;
  const bool known = is_kda ? gate == v1::KDA_GATE_SOFTPLUS || gate == v1::KDA_GATE_LOWER_BOUND
                            : gate == v1::KDA_GATE_UNSPECIFIED;
  if (!known)
    return Expected(at + ".kda_gate",
                    is_kda ? "KDA_GATE_SOFTPLUS or KDA_GATE_LOWER_BOUND" : "none (not a KDA layer)",
                    EnumName(v1::KdaGate_Name(gate), gate));
  if (gate == v1::KDA_GATE_LOWER_BOUND) {
    raw.kda_gate = KdaGate::kLowerBound;
    if (!std::isfinite(raw.gate_lower_bound))
      return Expected(at + ".gate_lower_bound", "a finite number below 0",
                      absl::StrCat(raw.gate_lower_bound));
  } else if (std::bit_cast<uint32_t>(raw.gate_lower_bound) != 0) {
    return Expected(at + ".gate_lower_bound", "none without KDA_GATE_LOWER_BOUND",
                    absl::StrCat(raw.gate_lower_bound));
  }
  return raw;
}

absl::Status ParseGroupParameters(const std::string& at, v1::InputForm form,
                                  const v1::LayerGroup& group,
                                  ModelDescription::LayerGroup& parsed) {
  const int expected = form == v1::INPUT_FORM_RAW ? group.layer_ids_size() : 0;
  if (group.parameters_size() != expected)
    return Expected(at + ".parameters",
                    expected == 0 ? "none in post-conv form"
                                  : absl::StrCat(expected, " entries (as layer_ids) in raw form"),
                    absl::StrCat(group.parameters_size()));
  for (int i = 0; i < expected; ++i) {
    const std::string here = absl::StrCat(at, ".parameters[", i, "]");
    const v1::LayerParameters& proto = group.parameters(i);
    if (i == 0) parsed.shape.conv_width = proto.conv_width();
    if (proto.conv_width() != parsed.shape.conv_width)
      return Expected(here + ".conv_width",
                      absl::StrCat(parsed.shape.conv_width, " (as the first of its group)"),
                      absl::StrCat(proto.conv_width()));
    // Every later check assumes a width that MakeGeometry can lay out.
    if (proto.conv_width() < 2 || proto.conv_width() > 4)
      return Expected(here + ".conv_width", "2..4", absl::StrCat(proto.conv_width()));
    SSMD_ASSIGN_OR_RETURN(RawParameters raw, ParseParameters(here, parsed.shape.family, proto));
    parsed.parameters.push_back(std::move(raw));
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelDescription::LayerGroup> ParseGroup(absl::string_view at,
                                                        const v1::LayerGroup& group) {
  ModelDescription::LayerGroup parsed;
  switch (group.family()) {
    case v1::FAMILY_MAMBA2:
      parsed.shape.family = Family::kMamba2;
      break;
    case v1::FAMILY_GDN:
      parsed.shape.family = Family::kGdn;
      break;
    case v1::FAMILY_KDA:
      parsed.shape.family = Family::kKda;
      break;
    default:
      return Expected(absl::StrCat(at, ".family"), "FAMILY_MAMBA2, FAMILY_GDN or FAMILY_KDA",
                      v1::Family_IsValid(group.family()) ? v1::Family_Name(group.family())
                                                         : absl::StrCat(group.family()));
  }
  parsed.shape.head_count = group.head_count();
  parsed.shape.key_group_count = group.key_group_count();
  parsed.shape.d_k = group.d_k();
  parsed.shape.d_v = group.d_v();
  parsed.layer_ids.assign(group.layer_ids().begin(), group.layer_ids().end());
  return parsed;
}

absl::Status ParseGroups(const v1::ModelSpec& spec, ModelDescription& description) {
  if (spec.layer_groups().empty()) return Expected("layer_groups", "at least one", "none");
  absl::flat_hash_set<uint32_t> seen;
  for (int g = 0; g < spec.layer_groups_size(); ++g) {
    const v1::LayerGroup& group = spec.layer_groups(g);
    const std::string at = absl::StrCat("layer_groups[", g, "]");
    if (group.layer_ids().empty()) return Expected(at + ".layer_ids", "at least one", "none");
    for (int i = 0; i < group.layer_ids_size(); ++i) {
      const std::string id_at = absl::StrCat(at, ".layer_ids[", i, "]");
      if (!seen.insert(group.layer_ids(i)).second)
        return Expected(id_at, "an id that is unique in the spec",
                        absl::StrCat(group.layer_ids(i), " a second time"));
      if (seen.size() > kLayersMax)
        return Expected(id_at, absl::StrCat("at most ", kLayersMax, " layers in a spec"), "more");
    }
    SSMD_ASSIGN_OR_RETURN(ModelDescription::LayerGroup parsed, ParseGroup(at, group));
    SSMD_RETURN_IF_ERROR(ParseGroupParameters(at, spec.input_form(), group, parsed));
    description.groups.push_back(std::move(parsed));
  }
  return absl::OkStatus();
}

absl::Status CheckShard(const v1::ModelSpec& spec) {
  if (spec.tp_size() == 0) return Expected("tp_size", "at least 1", "0");
  if (spec.pp_size() == 0) return Expected("pp_size", "at least 1", "0");
  if (spec.tp_rank() >= spec.tp_size())
    return Expected("tp_rank", absl::StrCat("below tp_size ", spec.tp_size()),
                    absl::StrCat(spec.tp_rank()));
  if (spec.pp_rank() >= spec.pp_size())
    return Expected("pp_rank", absl::StrCat("below pp_size ", spec.pp_size()),
                    absl::StrCat(spec.pp_rank()));
  // Shards of one sequence that disagree after a failure roll back to the smallest position.
  if (uint64_t{spec.tp_size()} * spec.pp_size() > 1 &&
      spec.rollback_tokens_min() < spec.draft_tokens_max()) {
    return Expected("rollback_tokens_min",
                    absl::StrCat("at least draft_tokens_max ", spec.draft_tokens_max(),
                                 " with tp_size ", spec.tp_size(), " and pp_size ", spec.pp_size()),
                    absl::StrCat(spec.rollback_tokens_min()));
  }
  return absl::OkStatus();
}

// The store speaks of layers[i]; the caller wrote layer_groups[g], and parameters[j] of it.
absl::Status NameSpecFields(const absl::Status& status, const ModelDescription& description) {
  std::string field = GetDetail(status, detail::kField);
  std::string message(status.message());
  size_t first_layer = 0;
  for (size_t g = 0; g < description.groups.size(); ++g) {
    const size_t count = description.groups[g].layer_ids.size();
    for (size_t i = 0; i < count; ++i) {
      const std::string layer = absl::StrCat("layers[", first_layer + i, "].");
      if (!absl::StartsWith(field, layer)) continue;
      const std::string group = absl::StrCat("layer_groups[", g, "].");
      const auto rename = [&](const std::string& text) {
        return absl::StrReplaceAll(
            text,
            {{layer + "parameters.", absl::StrCat(group, "parameters[", i, "].")}, {layer, group}});
      };
      return WithDetail(absl::Status(status.code(), rename(message)), detail::kField,
                        absl::StrCat("spec.", rename(field)));
    }
    first_layer += count;
  }
  return WithDetail(absl::Status(status.code(), message), detail::kField,
                    absl::StrCat("spec.", field));
}

}  // namespace

absl::StatusOr<ModelDescription> ParseModelSpec(const v1::ModelSpec& spec) {
  ModelDescription description;
  if (spec.name().empty() || spec.name().size() > kNameBytesMax)
    return Expected("name", absl::StrCat("1..", kNameBytesMax, " bytes"),
                    absl::StrCat(spec.name().size()));
  description.name = spec.name();
  if (spec.input_form() != v1::INPUT_FORM_POST_CONV && spec.input_form() != v1::INPUT_FORM_RAW)
    return Expected("input_form", "INPUT_FORM_POST_CONV or INPUT_FORM_RAW",
                    EnumName(v1::InputForm_Name(spec.input_form()), spec.input_form()));
  static_assert(static_cast<int>(InputForm::kPostConv) == v1::INPUT_FORM_POST_CONV);
  static_assert(static_cast<int>(InputForm::kRaw) == v1::INPUT_FORM_RAW);
  description.input_form = static_cast<InputForm>(spec.input_form());
  SSMD_RETURN_IF_ERROR(ParseGroups(spec, description));
  Formats& formats = description.formats;
  SSMD_ASSIGN_OR_RETURN(formats.activation,
                        ParseDtype("activation_dtype", spec.activation_dtype()));
  SSMD_ASSIGN_OR_RETURN(formats.correction,
                        ParseDtype("correction_dtype", spec.correction_dtype()));
  SSMD_ASSIGN_OR_RETURN(formats.output, ParseDtype("output_dtype", spec.output_dtype()));
  SSMD_ASSIGN_OR_RETURN(formats.checkpoint_hp,
                        ParseDtype("checkpoint_dtype", spec.checkpoint_dtype()));
  SSMD_ASSIGN_OR_RETURN(formats.checkpoint_lp,
                        ParseDtype("checkpoint_lp_dtype", spec.checkpoint_lp_dtype()));
  description.window_records = spec.window_records();
  description.draft_tokens_max = spec.draft_tokens_max();
  description.rollback_tokens_min = spec.rollback_tokens_min();
  if (!v1::FlushMode_IsValid(spec.flush_mode()))
    return Expected("flush_mode", "FLUSH_MODE_FUSED or FLUSH_MODE_BACKGROUND",
                    absl::StrCat(static_cast<int>(spec.flush_mode())));
  description.flush_mode =
      spec.flush_mode() == v1::FLUSH_MODE_BACKGROUND ? FlushMode::kBackground : FlushMode::kFused;
  description.rounding_seed = spec.rounding_seed();
  SSMD_RETURN_IF_ERROR(CheckShard(spec));
  description.tp_rank = spec.tp_rank();
  description.tp_size = spec.tp_size();
  description.pp_rank = spec.pp_rank();
  description.pp_size = spec.pp_size();
  if (const absl::Status status = ValidateGeometry(description.MakeGeometry()); !status.ok())
    return NameSpecFields(status, description);
  return description;
}

Capacity ParseCapacity(const v1::ModelCapacity& capacity) {
  return {.sequences_max = capacity.sequences_max(),
          .snapshots_max = capacity.snapshots_max(),
          .spare_pages = capacity.spare_pages(),
          .rows_max = capacity.rows_max(),
          .steps_max = capacity.steps_max()};
}

namespace {

void ToProto(const LayerShape& shape, const RawParameters& raw, v1::LayerParameters& proto) {
  const auto copy = [](const std::vector<float>& from, auto* to) {
    to->Add(from.begin(), from.end());
  };
  proto.set_conv_width(shape.conv_width);
  copy(raw.conv_weight, proto.mutable_conv_weight());
  copy(raw.conv_bias, proto.mutable_conv_bias());
  copy(raw.a_log, proto.mutable_a_log());
  copy(raw.dt_bias, proto.mutable_dt_bias());
  copy(raw.d, proto.mutable_d());
  proto.set_qk_l2_norm(raw.qk_l2_norm);
  if (shape.family == Family::kKda)
    proto.set_kda_gate(raw.kda_gate == KdaGate::kLowerBound ? v1::KDA_GATE_LOWER_BOUND
                                                            : v1::KDA_GATE_SOFTPLUS);
  proto.set_gate_lower_bound(raw.gate_lower_bound);
}

}  // namespace

void ToProto(const ModelDescription& description, v1::ModelSpec& spec) {
  spec.set_name(description.name);
  for (const ModelDescription::LayerGroup& group : description.groups) {
    v1::LayerGroup& proto = *spec.add_layer_groups();
    proto.set_family(static_cast<v1::Family>(group.shape.family));
    for (const uint32_t id : group.layer_ids) proto.add_layer_ids(id);
    proto.set_head_count(group.shape.head_count);
    proto.set_key_group_count(group.shape.key_group_count);
    proto.set_d_k(group.shape.d_k);
    proto.set_d_v(group.shape.d_v);
    for (const RawParameters& raw : group.parameters)
      ToProto(group.shape, raw, *proto.add_parameters());
  }
  static_assert(static_cast<int>(Family::kMamba2) == v1::FAMILY_MAMBA2);
  static_assert(static_cast<int>(Family::kGdn) == v1::FAMILY_GDN);
  static_assert(static_cast<int>(Family::kKda) == v1::FAMILY_KDA);
  spec.set_input_form(static_cast<v1::InputForm>(description.input_form));
  const Formats& formats = description.formats;
  spec.set_activation_dtype(static_cast<v1::DataType>(formats.activation));
  spec.set_correction_dtype(static_cast<v1::DataType>(formats.correction));
  spec.set_output_dtype(static_cast<v1::DataType>(formats.output));
  spec.set_checkpoint_dtype(static_cast<v1::DataType>(formats.checkpoint_hp));
  spec.set_checkpoint_lp_dtype(static_cast<v1::DataType>(formats.checkpoint_lp));
  spec.set_window_records(description.window_records);
  spec.set_draft_tokens_max(description.draft_tokens_max);
  spec.set_rollback_tokens_min(description.rollback_tokens_min);
  spec.set_tp_rank(description.tp_rank);
  spec.set_tp_size(description.tp_size);
  spec.set_pp_rank(description.pp_rank);
  spec.set_pp_size(description.pp_size);
  spec.set_flush_mode(description.flush_mode == FlushMode::kBackground ? v1::FLUSH_MODE_BACKGROUND
                                                                       : v1::FLUSH_MODE_FUSED);
  spec.set_rounding_seed(description.rounding_seed);
}

}  // namespace ssmd
