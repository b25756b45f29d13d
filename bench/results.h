// Results: measured rows of a CSV file that several programs append to, one figure a row:
//   date,commit,machine,program,case,quantity,unit,value
// The commit comes from the environment (SSMD_COMMIT, set by tools/bench_cpu), else "unknown".
#pragma once

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>
#include <thread>

namespace ssmd::bench {

class Results {
 public:
  // No path: nothing is written. Ends the program when the file cannot be opened.
  Results(const char* program, const char* path) {
    if (path == nullptr) return;
    file_ = std::fopen(path, "a");
    if (file_ == nullptr) {
      std::perror(path);
      std::exit(1);
    }
    if (std::ftell(file_) == 0)
      std::fprintf(file_, "date,commit,machine,program,case,quantity,unit,value\n");
    char date[16];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof(date), "%Y-%m-%d", std::gmtime(&now));
    const char* commit = std::getenv("SSMD_COMMIT");
    prefix_ = std::string(date) + "," + (commit != nullptr ? commit : "unknown") + "," + Machine() +
              "," + program;
  }
  ~Results() {
    if (file_ != nullptr) std::fclose(file_);
  }
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;

  void Add(const std::string& name, const char* quantity, const char* unit, double value) {
    if (file_ != nullptr)
      std::fprintf(file_, "%s,%s,%s,%s,%.4g\n", prefix_.c_str(), name.c_str(), quantity, unit,
                   value);
  }

 private:
  // "2 x Some CPU @ 2.0 GHz"
  static std::string Machine() {
    std::ifstream cpuinfo("/proc/cpuinfo");
    std::string line, model = "unknown CPU";
    while (std::getline(cpuinfo, line)) {
      const size_t colon = line.find(": ");
      if (line.starts_with("model name") && colon != std::string::npos) {
        model = line.substr(colon + 2);
        break;
      }
    }
    for (char& c : model)
      if (c == ',') c = ' ';
    return std::to_string(std::thread::hardware_concurrency()) + " x " + model;
  }

  FILE* file_ = nullptr;
  std::string prefix_;
};

}  // namespace ssmd::bench
