#include "attention_amx.h"
#include "gemm_amx.h"
// The product and the tile scope come before their users.
#include "forward.h"

extern "C" const MkKernels *mk_amx() {
  static const MkKernels table = {
      MAX_COLUMNS, attend, merge, finish, rms_norm, project_heads, add_product,
      gated_product, store_product,
  };
  return &table;
}
