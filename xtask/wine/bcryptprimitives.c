/* bcryptprimitives.dll for releases of wine that lack it (8.0 and earlier): Rust's standard library takes its random numbers from
   ProcessPrng. Compiled by `cargo xtask test --all` for tests under wine alone. */
#include <windows.h>

BOOLEAN NTAPI SystemFunction036(PVOID bytes, ULONG count);

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE bytes, SIZE_T count) {
    return SystemFunction036(bytes, (ULONG)count);
}
