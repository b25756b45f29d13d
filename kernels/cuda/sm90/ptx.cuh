// Hopper instructions that CUDA C++ has no name for: bulk copies, their barriers, dependent
// launches, cache hints. One wrapper per instruction, no policy.
#pragma once

#include <cstdint>

namespace ssmd::cuda::ptx {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A barrier in shared memory: its phase ends when `arrivals` threads have arrived and all bytes
// that they announced have landed.
using Barrier = uint64_t;

__device__ __forceinline__ void InitBarrier(Barrier* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals)
               : "memory");
}
// After InitBarrier, before the copies and threads that use it.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void Arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
__device__ __forceinline__ void ArriveExpecting(Barrier* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
// Returns once the phase of this parity has ended.
__device__ __forceinline__ void Wait(Barrier* barrier, uint32_t parity) {
  uint32_t ended = 0;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(ended)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  } while (ended == 0);
}

// What is read once should leave the L2 first.
__device__ __forceinline__ uint64_t EvictFirst() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Global to shared. Addresses and `bytes` are multiples of 16; `bytes` were announced to `barrier`.
__device__ __forceinline__ void BulkLoad(void* shared, const void* global, uint32_t bytes,
                                         Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}
__device__ __forceinline__ void BulkLoad(void* shared, const void* global, uint32_t bytes,
                                         Barrier* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(SharedAddress(shared)),
      "l"(global), "r"(bytes), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}

// Orders this thread's ordinary writes to shared memory before later bulk copies into it.
__device__ __forceinline__ void FenceSharedForBulk() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier of some of the block's warps.
template <int kId>
__device__ __forceinline__ void SyncThreads(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "r"(threads) : "memory");
}

// Programmatic dependent launch. WaitForPrevious returns when the kernel before this one on the
// stream has ended and its writes are visible; at once without the launch attribute.
__device__ __forceinline__ void WaitForPrevious() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void AllowNext() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Write-through: the line is not kept for later writes.
__device__ __forceinline__ void StoreThrough(void* address, uint4 value) {
  asm volatile("st.global.wt.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ float2 WidenBf16(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ float WidenBf16(uint16_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
// Round to nearest even; `low` in the low half.
__device__ __forceinline__ uint32_t NarrowBf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ uint32_t NarrowFp16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float WidenFp16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Four 8x8 matrices of 16-bit elements; lane 8 i + r gives the address of row r of matrix i.
__device__ __forceinline__ void LoadMatrices(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
// Two 8x8 matrices; lanes 0..15 give the addresses of their rows.
__device__ __forceinline__ void StoreMatricesTransposed(uint32_t address, uint32_t m0,
                                                        uint32_t m1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(m0), "r"(m1)
               : "memory");
}
// d += a b, m16n8k16, bf16 operands, FP32 sums. Lane 4 g + t holds
//   a: rows g, g + 8, g, g + 8; columns 2t, 2t+1 (two registers), 2t+8, 2t+9 (two more)
//   b: rows 2t, 2t+1 | 2t+8, 2t+9 of column g        d: row g | g + 8, columns 2t, 2t+1
__device__ __forceinline__ void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace ssmd::cuda::ptx
