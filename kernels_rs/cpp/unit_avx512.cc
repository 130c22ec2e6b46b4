#include "attention_vec.h"

extern "C" const MkKernels *mk_avx512() {
  static const MkKernels table = {widen, attend_block, merge_parts};
  return &table;
}
