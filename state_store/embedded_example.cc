// The store without a server: one Mamba-2 layer, one sequence, a few decode steps, a fork.
//
//   build/release/state_store/embedded_example
#include <cstdio>
#include <vector>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/thread_pool.h"
#include "state_store/store.h"

int main() {
  using namespace ssmd;  // NOLINT: an example
  const LayerShape layer{
      .family = Family::kMamba2, .head_count = 4, .key_group_count = 1, .d_k = 128, .d_v = 64};
  cpu::ThreadPool pool(2);
  cpu::CpuDevice device(64 << 20, &pool);  // bytes of state this process may hold
  auto store = Store::Create(
      {.geometry = {.layers = {layer},
                    .formats = {.activation = Dtype::kFp32, .correction = Dtype::kNone}},
       .capacity = {.sequences_max = 4,
                    .snapshots_max = 1,
                    .spare_pages = 2,
                    .rows_max = 4,
                    .steps_max = 2}},
      [&](const BackendSpec& spec) { return device.CreateBackend(spec); });
  if (!store.ok()) return std::fprintf(stderr, "%s\n", store.status().ToString().c_str()), 1;

  constexpr OwnerId kOwner{1};
  SequenceVersion sequence{(*store)->CreateSequences(kOwner, 1)->ids[0], 1};
  std::vector<float> q(128, 0.1f), k(128, 0.1f), v(4 * 64, 1.0f), log_alpha(4, -0.05f), dt(4, 0.5f),
      o(4 * 64);
  for (int token = 0; token < 40; ++token) {
    // Plan, compute every layer, commit. Until Commit nothing of the sequence has changed.
    const auto step = (*store)->BeginStep(
        kOwner,
        {.rows = {{.sequence = sequence.id, .version = sequence.version, .draft_tokens = 1}}});
    if (!step.ok()) return std::fprintf(stderr, "%s\n", step.status().ToString().c_str()), 1;
    const auto verified = (*store)->Verify(kOwner, {.step = step->id,
                                                    .layer = 0,
                                                    .token_count = 1,
                                                    .inputs = {.q = q.data(),
                                                               .k = k.data(),
                                                               .v = v.data(),
                                                               .log_alpha = log_alpha.data(),
                                                               .value_scale = dt.data()},
                                                    .output = o.data()});
    if (!verified.ok())
      return std::fprintf(stderr, "%s\n", verified.status().ToString().c_str()), 1;
    const uint32_t accepted = 1;
    sequence.version = (*store)->Commit(kOwner, step->id, {&accepted, 1})->versions[0];
    if (token % 10 == 9) std::printf("token %2d: o[0] = %.6f\n", token + 1, o[0]);
  }
  const auto child =
      (*store)->Fork(kOwner, sequence, 1);  // shares the checkpoint page, copies live records
  const StoreCounters counters = (*store)->counters();
  std::printf(
      "fork at position %lu; %lu flushes; %.1f MB of state moved, %.1f MB if written every token\n",
      static_cast<unsigned long>(child->position),
      static_cast<unsigned long>(counters.flushes_fused),
      static_cast<double>(counters.checkpoint_hp_read_bytes + counters.checkpoint_hp_write_bytes +
                          counters.ring_read_bytes + counters.ring_write_bytes) /
          1e6,
      static_cast<double>(counters.write_every_step_bytes) / 1e6);
  return 0;
}
