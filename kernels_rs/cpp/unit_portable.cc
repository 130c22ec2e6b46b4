#include "attention_vec.h"
#include "gemm_fma.h"
#include "no_tiles.h"
// The product and the tile scope come before their users.
#include "forward.h"

extern "C" const MkKernels *mk_portable() {
  static const MkKernels table = {
      COLUMNS, attend, merge, finish, rms_norm, project_heads, add_product,
      gated_product, store_product,
  };
  return &table;
}
