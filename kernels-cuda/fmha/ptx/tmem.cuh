// Loads from and stores to tensor memory: 32 lanes by 32-bit columns, lane l of the warp having TMEM lane l of its
// warp's part (warp w of a CTA reaches the lanes 32 (w % 4) to 32 (w % 4) + 31).
// PTX ISA, TensorCore 5th Generation Family Instructions: tcgen05.ld, tcgen05.st
// https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05-instructions-tcgen05-ld
#pragma once
#include <fmha/portable.h>

namespace fmha::ptx {

// needs: sm_100a. Waits until this thread's loads from tensor memory have filled their registers. tcgen05_loaded then
// names these registers to the compiler: without it the compiler could move their first use before the wait. PTX ISA:
// tcgen05.wait::ld.
FMHA_DEVICE void tcgen05_wait_ld() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }

// Emits no instruction. It stands behind tcgen05_wait_ld and keeps the compiler from using a load's registers before
// it. PTX ISA: tcgen05.ld.
FMHA_DEVICE void tcgen05_loaded(uint32_t (&r)[8]) {
  asm volatile(""
               : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3]), "+r"(r[4]), "+r"(r[5]), "+r"(r[6]), "+r"(r[7]));
}

// No instruction: the compiler may use the registers of a load from here on, behind tcgen05_wait_ld.
// PTX ISA: tcgen05.ld.
FMHA_DEVICE void tcgen05_loaded(uint32_t (&r)[16]) {
  asm volatile(""
               : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3]), "+r"(r[4]), "+r"(r[5]), "+r"(r[6]), "+r"(r[7]),
                 "+r"(r[8]), "+r"(r[9]), "+r"(r[10]), "+r"(r[11]), "+r"(r[12]), "+r"(r[13]), "+r"(r[14]), "+r"(r[15]));
}

// No instruction: the compiler may use the registers of a load from here on, behind tcgen05_wait_ld.
// PTX ISA: tcgen05.ld.
FMHA_DEVICE void tcgen05_loaded(uint32_t (&r)[32]) {
  asm volatile(""
               : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3]), "+r"(r[4]), "+r"(r[5]), "+r"(r[6]), "+r"(r[7]),
                 "+r"(r[8]), "+r"(r[9]), "+r"(r[10]), "+r"(r[11]), "+r"(r[12]), "+r"(r[13]), "+r"(r[14]), "+r"(r[15]),
                 "+r"(r[16]), "+r"(r[17]), "+r"(r[18]), "+r"(r[19]), "+r"(r[20]), "+r"(r[21]), "+r"(r[22]), "+r"(r[23]),
                 "+r"(r[24]), "+r"(r[25]), "+r"(r[26]), "+r"(r[27]), "+r"(r[28]), "+r"(r[29]), "+r"(r[30]), "+r"(r[31]));
}

// Emits no instruction. Does for the maximum of a reducing load what tcgen05_loaded does for loaded columns. PTX ISA:
// tcgen05.ld.red.
FMHA_DEVICE void tcgen05_loaded(float& x) { asm volatile("" : "+f"(x)); }

// needs: sm_100a. Waits until this thread's stores to tensor memory are done.
// PTX ISA: tcgen05.wait::st.
FMHA_DEVICE void tcgen05_wait_st() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

// needs: sm_100a. Loads 8 columns from `address` on; complete after tcgen05_wait_ld.
// PTX ISA: tcgen05.ld, .32x32b.x8.
FMHA_DEVICE void tcgen05_ld(uint32_t (&r)[8], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x8.b32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, [%8];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
      : "r"(address));
}

// needs: sm_100a. Loads 16 columns from `address` on; complete after tcgen05_wait_ld.
// PTX ISA: tcgen05.ld, .32x32b.x16.
FMHA_DEVICE void tcgen05_ld(uint32_t (&r)[16], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, [%16];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]),
        "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15])
      : "r"(address));
}

// needs: sm_100a. Loads 32 columns from `address` on; complete after tcgen05_wait_ld.
// PTX ISA: tcgen05.ld, .32x32b.x32.
FMHA_DEVICE void tcgen05_ld(uint32_t (&r)[32], uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, [%32];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]),
        "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15]),
        "=r"(r[16]), "=r"(r[17]), "=r"(r[18]), "=r"(r[19]), "=r"(r[20]), "=r"(r[21]), "=r"(r[22]), "=r"(r[23]),
        "=r"(r[24]), "=r"(r[25]), "=r"(r[26]), "=r"(r[27]), "=r"(r[28]), "=r"(r[29]), "=r"(r[30]), "=r"(r[31])
      : "r"(address));
}

// needs: sm_103a, or sm_110a. Loads 32 columns from `address` on, and the largest of the lane's 32 numbers; NaNs among
// them are ignored. PTX ISA: tcgen05.ld.red, .32x32b.x32.
FMHA_DEVICE void tcgen05_ld_max(uint32_t (&r)[32], float& largest, uint32_t address) {
  asm volatile(
      "tcgen05.ld.red.sync.aligned.32x32b.x32.max.f32 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, [%33];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]),
        "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15]),
        "=r"(r[16]), "=r"(r[17]), "=r"(r[18]), "=r"(r[19]), "=r"(r[20]), "=r"(r[21]), "=r"(r[22]), "=r"(r[23]),
        "=r"(r[24]), "=r"(r[25]), "=r"(r[26]), "=r"(r[27]), "=r"(r[28]), "=r"(r[29]), "=r"(r[30]), "=r"(r[31]),
        "=f"(largest)
      : "r"(address));
}

// needs: sm_100a. Stores 4 columns from `address` on; complete after tcgen05_wait_st. PTX ISA: tcgen05.st, .32x32b.x4.
FMHA_DEVICE void tcgen05_st(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("tcgen05.st.sync.aligned.32x32b.x4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// needs: sm_100a. Stores 8 columns from `address` on; complete after tcgen05_wait_st. PTX ISA: tcgen05.st, .32x32b.x8.
FMHA_DEVICE void tcgen05_st(uint32_t address, const uint32_t (&r)[8]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {"
      "%1, %2, %3, %4, %5, %6, %7, %8"
      "};" ::"r"(address),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7])
      : "memory");
}

// needs: sm_100a. Stores 16 columns from `address` on; complete after tcgen05_wait_st. PTX ISA: tcgen05.st,
// .32x32b.x16.
FMHA_DEVICE void tcgen05_st(uint32_t address, const uint32_t (&r)[16]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], {"
      "%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16"
      "};" ::"r"(address),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7]),
        "r"(r[8]), "r"(r[9]), "r"(r[10]), "r"(r[11]), "r"(r[12]), "r"(r[13]), "r"(r[14]), "r"(r[15])
      : "memory");
}

// needs: sm_100a. Stores 32 columns from `address` on; complete after tcgen05_wait_st. PTX ISA: tcgen05.st,
// .32x32b.x32.
FMHA_DEVICE void tcgen05_st(uint32_t address, const uint32_t (&r)[32]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x32.b32 [%0], {"
      "%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32"
      "};" ::"r"(address),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7]),
        "r"(r[8]), "r"(r[9]), "r"(r[10]), "r"(r[11]), "r"(r[12]), "r"(r[13]), "r"(r[14]), "r"(r[15]),
        "r"(r[16]), "r"(r[17]), "r"(r[18]), "r"(r[19]), "r"(r[20]), "r"(r[21]), "r"(r[22]), "r"(r[23]),
        "r"(r[24]), "r"(r[25]), "r"(r[26]), "r"(r[27]), "r"(r[28]), "r"(r[29]), "r"(r[30]), "r"(r[31])
      : "memory");
}

}  // namespace fmha::ptx
