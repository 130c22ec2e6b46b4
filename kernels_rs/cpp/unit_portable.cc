#include "attention_vec.h"

extern "C" const MkKernels *mk_portable() {
  static const MkKernels table = {widen, attend_block, merge_parts};
  return &table;
}
