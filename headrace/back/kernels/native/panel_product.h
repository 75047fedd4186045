// The products of rows with one panel of 64 outputs, for kernels that choose the panels themselves. Each is defined where the
// linear layer of that form is, once per instruction set, and is the same chain of operations: a result depends neither on
// the rows beside it nor on who asked.
//
// results [count][64] floats, with room for whole tiles of 32 rows. The callee takes buffer 1 of hr_scratch.
#pragma once

#include "simd.h"

// Rows as a form multiplies by them: int8 values with scales and sums of quantized values (int8.h: quantize_groups, or
// quantize_row), or floats with zeros up to whole tiles of 32 inputs. `stride`: from row to row, in int8 values or bytes.
struct PanelRows {
  const void* x;
  const float* scales;
  const int32_t* sums;
  int64_t stride, groups;
};

// Panels of a block coding (block_panels.h).
void HR_EXPORT(block_panel)(const PanelRows& rows, int64_t K, int64_t coding, const uint8_t* panel, int64_t count, float* results);
// Panels of int8 values with a scale per output.
void HR_EXPORT(int8_panel)(const PanelRows& rows, int64_t K, const uint8_t* panel, int64_t count, float* results);
// Panels of e4m3 values with a scale for `group` inputs of an output (0: all), against float32 rows, or bf16 ones where it
// takes them.
bool HR_EXPORT(fp8_takes_bf16)();
void HR_EXPORT(fp8_panel)(const PanelRows& rows, int64_t K, int64_t group, const uint8_t* panel, int64_t count, bool is_bf16,
                          float* results);
