// Files of every bad kind are refused with a message that says why; good ones read back as written.
#include "client/demo/safetensors.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

namespace ssmd::demo {
namespace {

using ::testing::TempDir;

std::string File(const std::string& header, const std::string& data, int64_t header_bytes = -1) {
  const uint64_t size = header_bytes < 0 ? header.size() : static_cast<uint64_t>(header_bytes);
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &size, 8);
  return bytes + header + data;
}

struct BadFile {
  const char* what;
  std::string bytes;
  const char* message;  // part of it
};

TEST(Safetensors, RefusesMalformedFiles) {
  const std::string eight(8, 'x');
  const std::vector<BadFile> files = {
      {"empty", "", "shorter than 8 bytes"},
      {"cut length", "\x02\x00\x00", "shorter than 8 bytes"},
      {"header past the end", File("{}", "", 3), "header of 3 bytes in a file of 10"},
      {"header of 2^64 - 1", File("{}", "", std::numeric_limits<int64_t>::max()), "header of"},
      {"not JSON", File("{]", ""), "not a JSON object"},
      {"not an object", File("[1]", ""), "not a JSON object"},
      {"cut JSON", File(R"({"a":{"dtype":"F32")", ""), "not a JSON object"},
      {"entry not an object", File(R"({"a":1})", ""), "'a' is not an object"},
      {"metadata not text", File(R"({"__metadata__":{"k":1}})", ""), "metadata"},
      {"no dtype", File(R"({"a":{"shape":[2],"data_offsets":[0,8]}})", eight), "lacks a valid"},
      {"dtype not text", File(R"({"a":{"dtype":1,"shape":[2],"data_offsets":[0,8]}})", eight),
       "lacks a valid"},
      {"no shape", File(R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", eight), "lacks a valid"},
      {"negative extent", File(R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", eight),
       "lacks a valid"},
      {"fractional extent",
       File(R"({"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}})", eight), "lacks a valid"},
      {"one offset", File(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", eight),
       "lacks a valid"},
      {"three offsets", File(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4,8]}})", eight),
       "lacks a valid"},
      {"offsets reversed", File(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", eight),
       "lies at 8..0"},
      {"past the end", File(R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}})", eight),
       "lies at 0..16 of 8"},
      {"wrong size", File(R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", eight),
       "F32 [3] has 8 bytes"},
      {"shape overflows",
       File(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", ""),
       "has 0 bytes"},
      {"hole at the start", File(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", eight),
       "hole or overlap at data byte 0"},
      {"overlap",
       File(R"({"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},)"
            R"("b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
            eight),
       "hole or overlap at data byte 5"},
      {"bytes left over", File(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", eight),
       "tensors cover 4 of 8"},
      {"data without tensors", File("{}", eight), "tensors cover 0 of 8"},
  };
  for (const BadFile& file : files) {
    const auto parsed = Safetensors::Parse(file.bytes);
    ASSERT_FALSE(parsed.ok()) << file.what;
    EXPECT_TRUE(absl::IsInvalidArgument(parsed.status())) << file.what;
    EXPECT_NE(std::string(parsed.status().message()).find(file.message), std::string::npos)
        << file.what << ": " << parsed.status();
  }
}

TEST(Safetensors, EveryCutOfAGoodFileIsRefused) {
  SafetensorsWriter writer;
  writer.AddFloats("w", {2, 2}, {1, 2, 3, 4});
  const std::string good = writer.Serialize();
  ASSERT_TRUE(Safetensors::Parse(good).ok());
  for (size_t size = 0; size < good.size(); ++size)
    EXPECT_FALSE(Safetensors::Parse(good.substr(0, size)).ok()) << size;
}

TEST(Safetensors, ReadsBackWhatWasWritten) {
  SafetensorsWriter writer;
  const std::vector<float> values = {1.5f, -2.0f, 0.0f, 3e38f, 1e-40f, -0.0f};
  writer.AddFloats("floats", {2, 3}, values);
  writer.AddInts("ints", {7, -8});
  writer.AddBytes("bytes", std::string("\x00\xff\x80", 3));
  writer.AddFloats("none", {0, 5}, {});
  writer.SetMetadata("key", "value");
  const std::string path = TempDir() + "/ssmd_safetensors_test.safetensors";
  ASSERT_TRUE(writer.Write(path).ok());
  const auto file = Safetensors::Read(path);
  std::filesystem::remove(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->Floats("floats", {2, 3}).value(), values);
  EXPECT_EQ(file->Ints("ints", {2}).value(), (std::vector<int32_t>{7, -8}));
  EXPECT_EQ(file->Bytes("bytes").value(), std::string("\x00\xff\x80", 3));
  EXPECT_TRUE(file->Floats("none", {0, 5}).value().empty());
  EXPECT_EQ(file->Metadata("key"), "value");
  EXPECT_EQ(file->Metadata("other"), "");
}

TEST(Safetensors, WidensBf16) {
  const std::string data("\x80\x3f\x00\xc0", 4);  // 1.0, -2.0
  const auto file =
      Safetensors::Parse(File(R"({"w":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}})", data));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->Floats("w", {2}).value(), (std::vector<float>{1.0f, -2.0f}));
}

TEST(Safetensors, RefusesWhatTheCallerDidNotExpect) {
  SafetensorsWriter writer;
  writer.AddFloats("floats", {2}, {1, 2});
  writer.AddInts("ints", {1});
  const auto file = Safetensors::Parse(writer.Serialize()).value();
  EXPECT_TRUE(absl::IsNotFound(file.Floats("missing", {2}).status()));
  EXPECT_EQ(file.Floats("floats", {2, 1}).status().message(),
            "tensor 'floats': expected shape [2, 1], the file has [2]");
  EXPECT_TRUE(absl::IsInvalidArgument(file.Floats("ints", {1}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(file.Ints("floats", {2}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(file.Bytes("ints").status()));
  EXPECT_TRUE(absl::IsNotFound(Safetensors::Read("/nonexistent/file").status()));
}

}  // namespace
}  // namespace ssmd::demo
