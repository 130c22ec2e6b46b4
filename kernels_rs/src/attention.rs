//! Attention over a paged KV pool: the checks, and the cut of the work.
//!
//! Owns: the shapes, and the tiles (query columns of one KV head of one sequence) that threads
//! share out.
//! Invariants: see the crate; whether a tile's blocks run on one thread or on several is the only
//! thing that the schedule decides, and it does not show in the result.
//! Fails: with [`Error::Invalid`](crate::Error) when a size, offset, length or table entry is out
//! of bounds, before anything is written.

use std::{cmp::Reverse, ffi::c_void, sync::atomic::AtomicUsize};

use crate::{
    Isa, Member, Pool, Result,
    error::require,
    ffi::{COLUMNS, KEY_BLOCK, Kernels, MAX_HEAD_DIM, PoolView, TileView},
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
            _ => Err(crate::Error::Invalid(format!(
                "dtype {name}: use bfloat16, float16 or float32"
            ))),
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

    fn group(&self) -> usize {
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

/// Query columns of one KV head of one span.
struct Tile {
    span: usize,
    kv_head: usize,
    first: usize,
    count: usize,
    blocks: usize,
    /// Index of its first block among all tiles' blocks.
    unit: usize,
    /// Floats of one of its parts.
    part: usize,
    /// Where its parts begin when they are kept for a later merge.
    offset: usize,
}

/// The cut of one batch; the same for every layer.
pub(crate) struct Plan<'a> {
    spans: &'a [Span<'a>],
    tiles: Vec<Tile>,
    units: usize,
    /// Threads share out blocks instead of tiles, and merge afterwards.
    split: bool,
    /// Parts that outlive a tile (split), or one tile's (not split).
    kept: Vec<f32>,
    scratch: usize,
    group: usize,
    kernels: &'static Kernels,
}

/// One layer's operands.
pub(crate) struct Operands {
    pub(crate) view: PoolView,
    pub(crate) query: *const c_void,
    pub(crate) out: *mut c_void,
    pub(crate) row_elements: usize,
    pub(crate) scale: f32,
}

/// Counters by which the members share one layer's attention.
#[derive(Default)]
pub(crate) struct Turns {
    attend: AtomicUsize,
    merge: AtomicUsize,
}

impl<'a> Plan<'a> {
    /// `geometry` and `spans` have been checked.
    pub(crate) fn new(
        geometry: &Geometry,
        spans: &'a [Span<'a>],
        kernels: &'static Kernels,
        threads: usize,
    ) -> Self {
        let (group, max_columns) = (geometry.group(), kernels.max_columns as usize);
        let mut tiles = Vec::new();
        for (index, span) in spans.iter().enumerate() {
            for kv_head in 0..geometry.kv_heads {
                for first in (0..span.rows * group).step_by(max_columns) {
                    let count = max_columns.min(span.rows * group - first);
                    let visible = span.visible + (first + count - 1) / group;
                    let part = count.next_multiple_of(COLUMNS) * (2 + geometry.head_dim);
                    let blocks = visible.div_ceil(KEY_BLOCK);
                    let (unit, offset) = (0, 0);
                    tiles.push(Tile {
                        span: index,
                        kv_head,
                        first,
                        count,
                        blocks,
                        unit,
                        part,
                        offset,
                    });
                }
            }
        }
        tiles.sort_by_key(|t| Reverse(t.blocks * t.part)); // the longest first: an even finish
        let (mut units, mut floats) = (0, 0);
        for tile in &mut tiles {
            (tile.unit, tile.offset) = (units, floats);
            units += tile.blocks;
            floats += tile.blocks * tile.part;
        }
        let split = tiles.len() < 8 * threads && units > tiles.len();
        let scratch = tiles.iter().map(|t| t.part).max().unwrap_or(0);
        let kept = vec![0.0; if split { floats } else { 0 }];
        Self { spans, tiles, units, split, kept, scratch, group, kernels }
    }

    /// One member's share of one layer.
    ///
    /// # Safety
    /// The operands match the geometry that the plan was made for, and hold every row of its
    /// spans; nothing else writes them until the members meet again.
    pub(crate) unsafe fn run(&self, member: &Member<'_>, on: &Operands, turns: &Turns) {
        if self.split {
            // SAFETY: as for this function.
            return unsafe { self.run_split(member, on, turns) };
        }
        let mut part = vec![0f32; self.scratch];
        member.share(&turns.attend, self.tiles.len(), 1, |range| {
            for tile in &self.tiles[range] {
                let view = self.view(tile, on);
                let (part, blocks) = (part.as_mut_ptr(), tile.blocks as i32);
                // SAFETY: the caller's promise; `part` holds the largest tile's.
                unsafe {
                    (self.kernels.attend)(&on.view, &view, on.scale, 0, blocks, part);
                    (self.kernels.finish)(&on.view, &view, part);
                }
            }
        });
    }

    unsafe fn run_split(&self, member: &Member<'_>, on: &Operands, turns: &Turns) {
        let kept = self.kept.as_ptr().cast_mut();
        let part = |tile: &Tile, block: usize| kept.wrapping_add(tile.offset + block * tile.part);
        member.share(&turns.attend, self.units, 1, |range| {
            for unit in range {
                let tile = &self.tiles[self.tiles.partition_point(|t| t.unit <= unit) - 1];
                let (view, block) = (self.view(tile, on), unit - tile.unit);
                let (from, to) = (block as i32, block as i32 + 1);
                // SAFETY: the caller's promise; each unit has a part of its own in `kept`.
                unsafe {
                    let part = part(tile, block);
                    (self.kernels.attend)(&on.view, &view, on.scale, from, to, part);
                }
            }
        });
        member.barrier();
        member.share(&turns.merge, self.tiles.len(), 1, |range| {
            for tile in &self.tiles[range] {
                let (view, first) = (self.view(tile, on), part(tile, 0));
                // SAFETY: the caller's promise; the barrier made all parts visible.
                unsafe {
                    for block in 1..tile.blocks {
                        let later = part(tile, block);
                        (self.kernels.merge)(&on.view, &view, block as i32, later, first);
                    }
                    (self.kernels.finish)(&on.view, &view, first);
                }
            }
        });
    }

    fn view(&self, tile: &Tile, on: &Operands) -> TileView {
        let span = &self.spans[tile.span];
        let bytes = span.first_row * on.row_elements * if on.view.dtype == 2 { 4 } else { 2 };
        TileView {
            query: on.query.wrapping_byte_add(bytes),
            out: on.out.wrapping_byte_add(bytes),
            table: span.table.as_ptr(),
            row_elements: on.row_elements as i64,
            kv_head: tile.kv_head as i32,
            group: self.group as i32,
            first: tile.first as i32,
            count: tile.count as i32,
            visible: span.visible as i32,
        }
    }
}

/// Computes attention for the rows of all spans.
///
/// # Safety
/// `query` and `out` must hold `[rows, heads, head_dim]` elements for every row that a span names,
/// and `pool` must hold `blocks * block_bytes` bytes. Nothing may write them during the call.
pub unsafe fn attend(
    geometry: &Geometry,
    spans: &[Span<'_>],
    query: *const c_void,
    out: *mut c_void,
    pool: *const u8,
    isa: Isa,
    team: &Pool,
) -> Result<()> {
    geometry.check()?;
    for span in spans {
        span.check(geometry)?;
    }
    let plan = Plan::new(geometry, spans, geometry.attention_isa(isa).kernels(), team.threads());
    let operands = Operands {
        view: geometry.view(pool.cast_mut()),
        query,
        out,
        row_elements: geometry.heads * geometry.head_dim,
        scale: geometry.scale,
    };
    let (shared, turns) = (Shared(&operands), Turns::default());
    team.run(|member| {
        // SAFETY: the caller's promise, and the checks above.
        unsafe { plan.run(member, shared.get(), &turns) }
    })
}

/// Operands that the members of a team read.
pub(crate) struct Shared<'a, T>(pub(crate) &'a T);

// SAFETY: the addresses inside are read, or written at places that no two members share; whoever
// wraps them keeps them alive for the run.
unsafe impl<T> Sync for Shared<'_, T> {}

impl<T> Shared<'_, T> {
    pub(crate) fn get(&self) -> &T {
        self.0
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
