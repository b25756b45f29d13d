// A folder of a test's own, closed to others, gone with its files when the test ends.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace ssmd::testing {

class TempFolder {
 public:
  TempFolder() : path_(::testing::TempDir() + "/ssmd_XXXXXX") {
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

  // Writes a file, complete or not at all, and returns its path.
  std::string Write(const std::string& name, const std::string& text) const {
    const std::string path = *this / name;
    std::ofstream(path + ".new") << text;
    std::filesystem::rename(path + ".new", path);
    return path;
  }

 private:
  std::string path_;
};

}  // namespace ssmd::testing
