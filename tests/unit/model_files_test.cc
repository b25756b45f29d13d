// service/model_files.cc and the presets of deploy/models: they parse, and a sequence costs what a
// pocket calculator says.
#include "service/model_files.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "service/validate.h"
#include "tests/testing/status_is.h"

namespace ssmd {
namespace {

struct Preset {
  const char* file;
  const char* name;
  Family family;
  uint32_t layers;
  uint64_t checkpoint_bytes;  // layers x heads x d_k x d_v x 4
  uint64_t record_bytes;      // at least: what one token's records hold, without padding
};

// Records of one token and layer:
//   Mamba-2  x and B bf16, dt and log alpha FP32: 2 heads d_v + 2 groups d_k + 8 heads
//   GDN      u FP16, k bf16, log alpha FP32:      2 heads d_v + 2 groups d_k + 4 heads
//   KDA      as GDN, log alpha per channel:       2 heads d_v + 2 groups d_k + 4 heads d_k
constexpr Preset kPresets[] = {
    // 21 x 96 x 128 x 80 x 4 B; 21 (15,360 + 2,048 + 768)
    {"nemotron-3-nano-4b", "nemotron-3-nano-4b", Family::kMamba2, 21, 82'575'360, 381'696},
    // 40 x 4 MiB = 160 MiB; 40 (16,384 + 2,048 + 1,024)
    {"nemotron-3-super-120b-a12b", "nemotron-3-super-120b-a12b", Family::kMamba2, 40,
     uint64_t{160} << 20, 778'240},
    // 24 x 2 MiB = 48 MiB; 24 (8,192 + 4,096 + 128)
    {"qwen3.5-4b", "qwen3.5-4b", Family::kGdn, 24, uint64_t{48} << 20, 297'984},
    // 36 x 4 MiB = 144 MiB; 36 (16,384 + 4,096 + 256)
    {"qwen3.5-122b-a10b", "qwen3.5-122b-a10b", Family::kGdn, 36, uint64_t{144} << 20, 746'496},
    // 20 x 2 MiB = 40 MiB; 20 (8,192 + 8,192 + 16,384)
    {"kda-32h", "kda-32h", Family::kKda, 20, uint64_t{40} << 20, 655'360},
};

TEST(ModelFiles, PresetsAreValidAndCostWhatTheirCommentsSay) {
  for (const Preset& preset : kPresets) {
    const auto request =
        ReadModelFile(absl::StrCat(SSMD_SOURCE_DIR, "/deploy/models/", preset.file, ".txtpb"));
    ASSERT_TRUE(request.ok()) << request.status();
    const auto description = ParseModelSpec(request->spec());
    ASSERT_TRUE(description.ok()) << preset.file << ": " << description.status();
    const Geometry geometry = description->MakeGeometry();
    ASSERT_TRUE(ValidateGeometry(geometry).ok()) << ValidateGeometry(geometry);
    EXPECT_EQ(description->name, preset.name);
    EXPECT_EQ(geometry.layers.size(), preset.layers);
    EXPECT_EQ(geometry.layers[0].family, preset.family);
    EXPECT_EQ(geometry.checkpoint_bytes(), preset.checkpoint_bytes) << preset.file;
    EXPECT_GE(geometry.record_bytes(), preset.record_bytes) << preset.file;
    EXPECT_LE(geometry.record_bytes(), preset.record_bytes * 21 / 20) << preset.file;
    EXPECT_EQ(geometry.window_records, 16u);
    EXPECT_EQ(geometry.draft_tokens_max, 8u);
    EXPECT_EQ(geometry.rollback_tokens_min, 0u);
    EXPECT_EQ(geometry.formats.activation, Dtype::kBf16);
    for (uint32_t i = 0; i < preset.layers; ++i)
      EXPECT_EQ(description->groups[0].layer_ids[i], i) << preset.file;
  }
}

absl::StatusOr<v1::RegisterModelRequest> ReadText(const std::string& text) {
  std::string path = absl::StrCat(::testing::TempDir(), "/ssmd_model_XXXXXX");
  const int fd = mkstemp(path.data());
  EXPECT_GE(fd, 0);
  close(fd);
  std::ofstream(path) << text;
  const auto request = ReadModelFile(path);
  EXPECT_TRUE(request.ok() || absl::StrContains(request.status().message(), path))
      << request.status();
  std::remove(path.c_str());
  return request;
}

TEST(ModelFiles, MistakesNameFileLineAndField) {
  using testing::Fails;
  const auto invalid = absl::StatusCode::kInvalidArgument;
  EXPECT_TRUE(Fails(ReadText("spec {\n  nam: \"x\"\n}\n"), invalid, {":2:", "nam"}));
  EXPECT_TRUE(Fails(ReadText("spec {\n\n  window_records: many\n}\n"), invalid, {":3:", "many"}));
  EXPECT_TRUE(Fails(ReadText("spec {\n"), invalid, {":2:"}));
  EXPECT_TRUE(Fails(ReadText("spec { input_form: INPUT_FORM_COOKED }"), invalid,
                    {":1:", "INPUT_FORM_COOKED"}));
  EXPECT_TRUE(Fails(ReadModelFile("/nowhere/model.txtpb"), absl::StatusCode::kNotFound,
                    {"/nowhere/model.txtpb", "No such file"}));
  EXPECT_TRUE(ReadText("").ok());  // an empty request; RegisterModel names what is missing
}

}  // namespace
}  // namespace ssmd
