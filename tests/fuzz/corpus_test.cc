// Replays fuzz/corpus without libFuzzer: every file of every request type, and every cut of it.
// With SSMD_WRITE_SEEDS=1 it writes the seeds first.
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/fuzz/world.h"

namespace ssmd::fuzz {
namespace {

const std::filesystem::path kCorpus = std::filesystem::path(SSMD_SOURCE_DIR) / "tests/fuzz/corpus";

TEST(FuzzCorpus, Replays) {
  spdlog::set_level(spdlog::level::off);
  for (const std::string_view type : Types()) {
    const std::filesystem::path folder = kCorpus / type;
    if (std::getenv("SSMD_WRITE_SEEDS") != nullptr) {
      std::filesystem::create_directories(folder);
      for (const auto& [name, bytes] : Seeds(type))
        std::ofstream(folder / name, std::ios::binary) << bytes;
    }
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      SCOPED_TRACE(entry.path().string());
      std::ifstream in(entry.path(), std::ios::binary);
      const std::string bytes((std::istreambuf_iterator<char>(in)), {});
      const size_t step = std::max<size_t>(1, bytes.size() / 16);
      bool accepted = false;  // the last one: the whole file
      for (size_t size = bytes.size() % step; size <= bytes.size(); size += step)
        accepted = fuzz::Run(type, reinterpret_cast<const uint8_t*>(bytes.data()), size);
      // A model in use cannot go.
      if (entry.path().filename() == "full") {
        EXPECT_EQ(accepted, type != "UnregisterModel") << type;
      }
      ++files;
    }
    EXPECT_GE(files, 3) << type;
  }
}

}  // namespace
}  // namespace ssmd::fuzz
