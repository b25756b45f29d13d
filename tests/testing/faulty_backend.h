// FaultyBackend: a real backend whose Verify can be made to fail or to wait, at a chosen call.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "kernels/backend.h"

namespace ssmd::testing {

class FaultyBackend : public Backend {
 public:
  // `before_verify` runs before each Verify; an error is returned in its place. It may block.
  FaultyBackend(std::unique_ptr<Backend> backend,
                std::function<absl::Status(const VerifyParams&)> before_verify)
      : backend_(std::move(backend)), before_verify_(std::move(before_verify)) {}

  const char* name() const override { return backend_->name(); }
  void ClearSlot(SlotIndex slot, uint32_t window, uint64_t rounding_key) override {
    backend_->ClearSlot(slot, window, rounding_key);
  }
  absl::StatusOr<PlanReport> Plan(const PlanParams& params) override {
    return backend_->Plan(params);
  }
  absl::StatusOr<VerifyReport> Verify(const VerifyParams& params) override {
    SSMD_RETURN_IF_ERROR(before_verify_(params));
    return backend_->Verify(params);
  }
  absl::Status Commit(const CommitParams& params) override { return backend_->Commit(params); }
  void Abort(StepIndex step) override { backend_->Abort(step); }
  absl::Status Rollback(SlotIndex slot, uint64_t version, uint64_t position) override {
    return backend_->Rollback(slot, version, position);
  }
  absl::Status CopySlot(const CopySlotParams& params) override {
    return backend_->CopySlot(params);
  }
  absl::StatusOr<bool> FlushSlot(SlotIndex slot) override { return backend_->FlushSlot(slot); }
  absl::Status BeginImport(SlotIndex slot, uint64_t version) override {
    return backend_->BeginImport(slot, version);
  }
  void WriteImport(SlotIndex slot, uint32_t layer, uint64_t position,
                   absl::Span<const float> state) override {
    backend_->WriteImport(slot, layer, position, state);
  }
  void EndImport(SlotIndex slot, uint64_t position,
                 absl::Span<const std::vector<std::byte>> windows) override {
    backend_->EndImport(slot, position, windows);
  }
  void AbortImport(SlotIndex slot) override { backend_->AbortImport(slot); }
  absl::Status ReadWindow(SlotIndex slot, uint32_t layer, uint64_t position,
                          absl::Span<std::byte> window) override {
    return backend_->ReadWindow(slot, layer, position, window);
  }
  BackgroundBytes ReadBackgroundBytes() override { return backend_->ReadBackgroundBytes(); }
  void ReleaseSlot(SlotIndex slot) override { backend_->ReleaseSlot(slot); }
  absl::Status ReadState(SlotIndex slot, uint32_t layer, uint64_t position,
                         absl::Span<float> state) override {
    return backend_->ReadState(slot, layer, position, state);
  }
  SlotCursor ReadCursor(SlotIndex slot) override { return backend_->ReadCursor(slot); }
  PageCounts ReadPageCounts() override { return backend_->ReadPageCounts(); }

 private:
  const std::unique_ptr<Backend> backend_;
  const std::function<absl::Status(const VerifyParams&)> before_verify_;
};

}  // namespace ssmd::testing
