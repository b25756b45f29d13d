// Times the verify kernels of the CUDA backend against a conventional step; FP32 checkpoints.
// README.md beside this says what is measured and how to read it.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "bench/kernels/conventional.h"
#include "bench/kernels/scenario.h"
#include "bench/kernels/targets.h"
#include "kernels/cuda/sm90/verify.h"

#ifndef SSMD_COMMIT
#define SSMD_COMMIT "unknown"
#endif

namespace ssmd::bench {
namespace {

struct Options {
  bool quick = false;  // fewer batches, 11 repetitions
  std::string filter;  // run what contains this: "Super-120B/T1/256/staggered", "/T8/check"
  std::string csv = "h200_kernels.csv";
};

struct Case {
  const BenchShape& shape;
  uint32_t tokens, batch;
  std::string Name(Steps steps) const {
    return shape.name + "/T" + std::to_string(tokens) + "/" + std::to_string(batch) + "/" +
           StepsName(steps);
  }
};

struct Report {
  std::ofstream csv;
  std::string filter;
  Ceilings ceilings;
  bool good = true;

  bool Wants(const std::string& name) const { return name.find(filter) != std::string::npos; }

  // `conventional_us`: of one conventional step of the same batch; 0 if it was not measured.
  void Add(const Case& at, Steps steps, const Measurement& m, double conventional_us) {
    const double floor = m.traffic.read / ceilings.read + m.traffic.write / ceilings.write;
    const double bytes = m.traffic.read + m.traffic.write;
    const double target = TargetMicroseconds(at.shape.name, at.tokens, at.batch, steps);
    const double percent = 100 * bytes / m.microseconds / ceilings.read;
    const double ratio = conventional_us > 0 ? m.microseconds / conventional_us : 0;
    good = good && m.good;
    char line[400];
    std::snprintf(line, sizeof(line),
                  "%s,%u,%u,%s,%.2f,%.0f,%.1f,%.3f,%.2f,%.3f,%.1f,%d,%s,%s,%.2e,%.2e,%.2e",
                  at.shape.name.c_str(), at.tokens, at.batch, StepsName(steps), m.microseconds,
                  bytes, percent, ratio, floor, m.microseconds / floor, target, m.repetitions,
                  SSMD_COMMIT, m.good ? "passed" : "FAILED", m.errors.output, m.errors.state,
                  m.errors.correction);
    csv << line << std::endl;  // kept if a later case is killed
    std::printf("%-36s %8.2f us %6.3f of floor %5.1f%% bw %6.3f of conv  %s%s\n",
                at.Name(steps).c_str(), m.microseconds, m.microseconds / floor, percent, ratio,
                target == 0                ? ""
                : m.microseconds <= target ? "target met"
                                           : "target missed",
                m.good ? "" : "  WRONG");
    std::fflush(stdout);
  }
};

cuda::VerifyLaunch Settled(cuda::VerifyLaunch launch) {
  launch.rows_settled = true;  // the launch before it verifies another layer
  return launch;
}

// Median of a conventional step of this batch, which is also reported.
double RunConventional(const Case& at, int repetitions, Report& report) {
  World world(at.shape.layer, at.batch, ColdLayers(at.shape.layer, at.batch), Dtype::kBf16, 1, 1);
  const Measurement m = Measure(world, at.shape.layer, Dtype::kBf16, Steps::kConventional,
                                repetitions, LaunchConventional);
  report.Add(at, Steps::kConventional, m, m.microseconds);
  return m.microseconds;
}

void RunCase(const Case& at, int repetitions, double& conventional_us, Report& report) {
  std::vector<Steps> wanted;
  for (const Steps steps : {Steps::kEmpty, Steps::kFull, Steps::kFlush, Steps::kStaggered,
                            Steps::kInPhase, Steps::kAllAccepted}) {
    if (steps == Steps::kAllAccepted && at.tokens == 1) continue;  // is kStaggered
    if (report.Wants(at.Name(steps))) wanted.push_back(steps);
  }
  if (wanted.empty()) return;
  if (conventional_us == 0)
    conventional_us = RunConventional({at.shape, 1, at.batch}, repetitions, report);
  World world(at.shape.layer, at.batch, ColdLayers(at.shape.layer, at.batch), Dtype::kBf16,
              at.tokens, at.tokens == 1 ? 1 : 8);
  if (!cuda::sm90::Supports(world.Launch(RowSet{}, 0))) return;
  for (const Steps steps : wanted) {
    const Measurement m = Measure(world, at.shape.layer, Dtype::kBf16, steps, repetitions,
                                  [](const cuda::VerifyLaunch& launch, cudaStream_t stream) {
                                    return cuda::sm90::EnqueueVerify(Settled(launch), stream);
                                  });
    report.Add(at, steps, m, conventional_us);
  }
}

// Hostile steps with both outputs, with and without reading ahead of the previous kernel.
bool Check(const BenchShape& shape, uint32_t tokens) {
  const World world(shape.layer, 1, 1, Dtype::kBf16, tokens, tokens);
  if (!cuda::sm90::Supports(world.Launch(RowSet{}, 0))) return true;
  bool good = true;
  for (const Dtype output : {Dtype::kFp32, Dtype::kBf16}) {
    const std::string name = shape.name + " T=" + std::to_string(tokens) + " " + DtypeName(output);
    good = SelfCheck(name, shape.layer, output, tokens,
                     [&](const cuda::VerifyLaunch& launch, cudaStream_t stream) {
                       return cuda::sm90::EnqueueVerify(
                           output == Dtype::kFp32 ? launch : Settled(launch), stream);
                     }) &&
           good;
  }
  return good;
}

int Run(const Options& options) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no CUDA device\n");
    return 2;
  }
  cudaDeviceProp device;
  SSMD_CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
  Report report{
      .csv = std::ofstream(options.csv), .filter = options.filter, .ceilings = MeasureCeilings()};
  std::printf("%s, commit %s: read %.2f TB/s, write %.2f TB/s\n", device.name, SSMD_COMMIT,
              report.ceilings.read / 1e6, report.ceilings.write / 1e6);
  for (const BenchShape& shape : BenchShapes()) {
    for (const uint32_t tokens : {1, 8}) {
      if (report.Wants(shape.name + "/T" + std::to_string(tokens) + "/check"))
        report.good = Check(shape, tokens) && report.good;
    }
  }
  report.csv << "shape,T,batch,steps,us,bytes,percent_of_read_bandwidth,ratio_to_conventional,"
                "floor_us,ratio_to_floor,target_us,repetitions,commit,check,output_error,"
                "state_error,correction_error\n";
  const int repetitions = options.quick ? 11 : 51;
  for (const BenchShape& shape : BenchShapes()) {
    for (const uint32_t batch : kBatches) {
      if (options.quick && batch != 1 && batch != 32 && batch != 256) continue;
      double conventional_us = 0;
      for (const uint32_t tokens : {1, 2, 4, 8}) {
        if (tokens > 1 && batch != 1 && batch != 256) continue;
        RunCase({shape, tokens, batch}, repetitions, conventional_us, report);
      }
    }
  }
  std::printf("%s\n", report.good ? "every check passed" : "A CHECK FAILED");
  return report.good ? 0 : 1;
}

}  // namespace
}  // namespace ssmd::bench

int main(int argc, char** argv) {
  ssmd::bench::Options options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      options.quick = true;
    } else if (std::strncmp(argv[i], "--filter=", 9) == 0) {
      options.filter = argv[i] + 9;
    } else if (std::strncmp(argv[i], "--csv=", 6) == 0) {
      options.csv = argv[i] + 6;
    } else {
      std::fprintf(stderr, "usage: %s [--quick] [--filter=SHAPE/T#/BATCH/STEPS] [--csv=FILE]\n",
                   argv[0]);
      return 2;
    }
  }
  return ssmd::bench::Run(options);
}
