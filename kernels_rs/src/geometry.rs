//! Shapes of paged attention, and the checks that keep kernels inside their buffers.
//!
//! Invariants: what passes `check` names bytes of the pool and entries of the table, and nothing
//! else.
//! Fails: with [`Error::Invalid`](crate::Error), and a message that names the argument.

use crate::{
    Error, Isa, Result,
    error::require,
    ffi::{MAX_HEAD_DIM, PoolView},
};

/// Element type of queries, outputs and the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Dtype {
    /// bfloat16
    Bf16 = 0,
    /// IEEE half
    F16 = 1,
    /// IEEE single
    F32 = 2,
}

impl Dtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// By torch's name, without the `torch.` in front.
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "bfloat16" => Ok(Self::Bf16),
            "float16" => Ok(Self::F16),
            "float32" => Ok(Self::F32),
            _ => Err(Error::Invalid(format!("dtype {name}: use bfloat16, float16 or float32"))),
        }
    }
}

/// Shapes of the attention and of the pool's layer it reads.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of one head; a multiple of 16.
    pub head_dim: usize,
    /// Tokens of one block; a multiple of 32.
    pub block_tokens: usize,
    /// Blocks of the pool.
    pub blocks: usize,
    /// Bytes of one block, all layers.
    pub block_bytes: usize,
    /// Where the layer's keys begin in a block.
    pub k_offset: usize,
    /// Where the layer's values begin in a block.
    pub v_offset: usize,
    /// Element type.
    pub dtype: Dtype,
    /// Factor of the scores, usually 1 / sqrt(head_dim).
    pub scale: f32,
}

impl Geometry {
    /// Refuses shapes that the kernels cannot run or that leave the pool.
    pub fn check(&self) -> Result<()> {
        let Self { heads, kv_heads, head_dim, block_tokens, .. } = *self;
        require!(
            kv_heads > 0 && heads <= 4096 && heads > 0 && heads.is_multiple_of(kv_heads),
            "{heads} heads do not share {kv_heads} KV heads evenly"
        );
        require!(
            head_dim > 0 && head_dim <= MAX_HEAD_DIM && head_dim.is_multiple_of(16),
            "head_dim {head_dim} is not a multiple of 16 up to {MAX_HEAD_DIM}"
        );
        require!(
            block_tokens > 0 && block_tokens.is_multiple_of(32) && block_tokens <= 1 << 16,
            "block_tokens {block_tokens} is not a multiple of 32"
        );
        let plane = block_tokens * kv_heads * head_dim * self.dtype.size();
        for offset in [self.k_offset, self.v_offset] {
            require!(
                offset.checked_add(plane).is_some_and(|end| end <= self.block_bytes),
                "a plane at byte {offset} leaves the block of {} bytes",
                self.block_bytes
            );
        }
        require!(
            self.blocks.checked_mul(self.block_bytes).is_some_and(|b| b <= isize::MAX as usize),
            "a pool of {} blocks does not fit the address space",
            self.blocks
        );
        Ok(())
    }

    /// The best of the instruction sets up to `isa` whose attention takes these shapes.
    pub fn attention_isa(&self, isa: Isa) -> Isa {
        let tiles = self.dtype == Dtype::Bf16 && [64, 80, 96, 128].contains(&self.head_dim);
        if isa == Isa::Amx && !tiles { Isa::Avx512Bf16 } else { isa }
    }

    pub(crate) fn view(&self, base: *mut u8) -> PoolView {
        PoolView {
            base,
            block_bytes: self.block_bytes as i64,
            k_offset: self.k_offset as i64,
            v_offset: self.v_offset as i64,
            block_tokens: self.block_tokens as i32,
            kv_heads: self.kv_heads as i32,
            head_dim: self.head_dim as i32,
            dtype: self.dtype as i32,
        }
    }

    pub(crate) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Rows of one sequence, one after another in the queries and in the outputs.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// Pool blocks by position / block_tokens.
    pub table: &'a [i32],
    /// Its first row.
    pub first_row: usize,
    /// How many rows.
    pub rows: usize,
    /// Keys that the first row sees; each later row sees one more.
    pub visible: usize,
}

impl Span<'_> {
    /// Refuses lengths and table entries that leave the table or the pool.
    pub fn check(&self, geometry: &Geometry) -> Result<()> {
        require!(self.visible > 0 && self.rows > 0, "row {} sees no keys", self.first_row);
        let keys = self.visible.saturating_add(self.rows - 1);
        let blocks = keys.div_ceil(geometry.block_tokens);
        require!(
            keys <= i32::MAX as usize / geometry.heads && blocks <= self.table.len(),
            "{keys} keys need more than the {} table entries of row {}",
            self.table.len(),
            self.first_row
        );
        for &block in &self.table[..blocks] {
            require!(
                usize::try_from(block).is_ok_and(|b| b < geometry.blocks),
                "table entry {block} of row {} is not one of {} blocks",
                self.first_row,
                geometry.blocks
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> Geometry {
        Geometry {
            heads: 6,
            kv_heads: 2,
            head_dim: 64,
            block_tokens: 64,
            blocks: 4,
            block_bytes: 2 * 64 * 2 * 64 * 2,
            k_offset: 0,
            v_offset: 64 * 2 * 64 * 2,
            dtype: Dtype::Bf16,
            scale: 0.125,
        }
    }

    #[test]
    fn shapes_that_leave_the_pool_are_refused() {
        assert_eq!(geometry().check(), Ok(()));
        let bad = [
            Geometry { heads: 5, ..geometry() },
            Geometry { kv_heads: 0, ..geometry() },
            Geometry { head_dim: 72, ..geometry() },
            Geometry { head_dim: 512, ..geometry() },
            Geometry { block_tokens: 48, ..geometry() },
            Geometry { v_offset: geometry().v_offset + 1, ..geometry() },
            Geometry { k_offset: usize::MAX, ..geometry() },
            Geometry { blocks: usize::MAX, ..geometry() },
        ];
        for (i, case) in bad.iter().enumerate() {
            assert!(case.check().is_err(), "case {i}");
        }
    }

    #[test]
    fn spans_that_leave_the_table_are_refused() {
        let table = [0, 3, 1];
        let span = |visible, rows| Span { table: &table, first_row: 0, rows, visible };
        assert_eq!(span(192, 1).check(&geometry()), Ok(()));
        assert_eq!(span(100, 93).check(&geometry()), Ok(()));
        assert!(span(193, 1).check(&geometry()).is_err());
        assert!(span(100, 94).check(&geometry()).is_err());
        assert!(span(0, 1).check(&geometry()).is_err());
        assert!(span(usize::MAX, 2).check(&geometry()).is_err());
        for entry in [4, -1] {
            let table = [0, entry];
            let span = Span { table: &table, first_row: 0, rows: 1, visible: 65 };
            assert!(span.check(&geometry()).is_err());
        }
    }
}
