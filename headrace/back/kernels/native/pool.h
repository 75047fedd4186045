// The thread pool every kernel shares, and the C types of the plain interface.
//
// Rules of the kernel sources (native_*.cpp): each is compiled once per instruction set, so nothing in it may have
// external linkage except what HR_EXPORT names, and no std:: template may be instantiated: the linker would keep one
// copy for all instruction sets and an old CPU would run into a new instruction.
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define HR_PUBLIC extern "C" __declspec(dllexport)
#else
#define HR_PUBLIC extern "C" __attribute__((visibility("default")))
#endif

// Element types as the wrappers number them.
enum HrDtype : int32_t { HR_F32 = 0, HR_BF16 = 1, HR_F16 = 2 };

// What a kernel returns: 0, or why it refused. The wrappers turn these into exceptions.
enum HrStatus : int32_t { HR_OK = 0, HR_BAD_DTYPE = 1, HR_BAD_SHAPE = 2, HR_BAD_INDEX = 3, HR_NO_MEMORY = 4 };

using HrTask = void (*)(void* context, int64_t chunk);

// Runs task(context, 0 .. chunks-1), each exactly once, on the caller and the pool's threads; returns when all are done.
// Chunks are claimed one by one, so a thread that lost its core delays at most the chunk it holds. A call from inside a
// task, or while another thread uses the pool, runs on the calling thread alone.
void hr_parallel(HrTask task, void* context, int64_t chunks);

// At least `bytes` of memory of the calling thread, 64-byte aligned, valid until its next hr_scratch; null when there is
// none. Grows to the largest request and stays: no allocation on the hot path. A thread has four such buffers: a chunk that
// runs on the caller's thread must not take those its caller fills (0: inputs of a product; 3: what chunks leave, top.h), and
// takes 1 for its own work and 2 for results that go no further.
void* hr_scratch(int64_t bytes, int slot = 0);

// Threads a call may use, the caller included.
int hr_pool_threads();
