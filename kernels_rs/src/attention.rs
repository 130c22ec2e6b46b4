//! Attention over a paged KV pool, for an engine that keeps its own tensors.
//!
//! Owns: the checks, and the cut of the work into tiles (up to 16 queries of one KV head).
//! Invariants: see the crate; whether a tile's blocks run on one thread or on several is the only
//! thing that the schedule decides, and it does not show in the result.
//! Fails: with [`Error::Invalid`](crate::Error) when a size, offset, length or table entry is out
//! of bounds, before anything is written.

use std::{
    ffi::c_void,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

use crate::{
    Isa, Member, Pool, Result,
    error::require,
    ffi::{KEY_BLOCK, Kernels, MAX_HEAD_DIM, MAX_QUERIES, PoolView},
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
    /// Tokens of one block; a multiple of 16.
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
        let Self {
            heads,
            kv_heads,
            head_dim,
            block_tokens,
            ..
        } = *self;
        require!(
            kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads),
            "{heads} heads do not share {kv_heads} KV heads evenly"
        );
        require!(
            head_dim > 0 && head_dim <= MAX_HEAD_DIM && head_dim.is_multiple_of(16),
            "head_dim {head_dim} is not a multiple of 16 up to {MAX_HEAD_DIM}"
        );
        require!(
            block_tokens > 0 && block_tokens.is_multiple_of(16) && block_tokens <= 1 << 16,
            "block_tokens {block_tokens} is not a multiple of 16"
        );
        let plane = block_tokens.checked_mul(kv_heads * head_dim * self.dtype.size());
        for offset in [self.k_offset, self.v_offset] {
            require!(
                plane
                    .and_then(|p| p.checked_add(offset))
                    .is_some_and(|e| e <= self.block_bytes),
                "a plane at byte {offset} leaves the block of {} bytes",
                self.block_bytes
            );
        }
        require!(
            self.blocks
                .checked_mul(self.block_bytes)
                .is_some_and(|b| b <= isize::MAX as usize),
            "a pool of {} blocks does not fit the address space",
            self.blocks
        );
        Ok(())
    }

    fn row_elements(&self) -> usize {
        self.heads * self.head_dim
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
    fn check(&self, geometry: &Geometry) -> Result<()> {
        let keys = self.visible + self.rows - 1;
        require!(self.visible > 0, "row {} sees no keys", self.first_row);
        require!(
            keys <= i32::MAX as usize && keys.div_ceil(geometry.block_tokens) <= self.table.len(),
            "{keys} keys need more than the {} table entries of row {}",
            self.table.len(),
            self.first_row
        );
        for &block in &self.table[..keys.div_ceil(geometry.block_tokens)] {
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

/// Up to [`MAX_QUERIES`] queries of one KV head of one span.
struct Tile {
    span: usize,
    kv_head: usize,
    first: usize,
    count: usize,
    blocks: usize,
    /// Index of its first block among all tiles' blocks.
    unit: usize,
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
    threads: &Pool,
) -> Result<()> {
    geometry.check()?;
    for span in spans {
        span.check(geometry)?;
    }
    let tiles = cut(geometry, spans);
    let units = tiles.last().map_or(0, |t| t.unit + t.blocks);
    let job = Job {
        geometry,
        spans,
        query: query as usize,
        out: out as usize,
        view: view(geometry, pool),
        kernels: isa.kernels(),
        tiles: &tiles,
    };
    let next = AtomicUsize::new(0);
    if tiles.len() >= 8 * threads.threads() || units == tiles.len() {
        return threads.run(|_| {
            let mut parts = Vec::new();
            while let Some(tile) = tiles.get(next.fetch_add(1, Relaxed)) {
                parts.resize(tile.blocks * job.part_floats(), 0.0);
                // SAFETY: the caller's promise, and the checks above.
                unsafe {
                    job.compute(tile, 0..tile.blocks, parts.as_mut_ptr());
                    job.finish(tile, parts.as_ptr());
                }
            }
        });
    }
    // SAFETY: as for this function.
    unsafe { job.run_split(units, threads, &next) }
}

fn cut(geometry: &Geometry, spans: &[Span<'_>]) -> Vec<Tile> {
    let group = geometry.heads / geometry.kv_heads;
    let (mut tiles, mut unit) = (Vec::new(), 0);
    for (index, span) in spans.iter().enumerate() {
        for kv_head in 0..geometry.kv_heads {
            for first in (0..span.rows * group).step_by(MAX_QUERIES) {
                let count = MAX_QUERIES.min(span.rows * group - first);
                let visible = span.visible + (first + count - 1) / group;
                let blocks = visible.div_ceil(KEY_BLOCK);
                tiles.push(Tile {
                    span: index,
                    kv_head,
                    first,
                    count,
                    blocks,
                    unit,
                });
                unit += blocks;
            }
        }
    }
    tiles
}

fn view(geometry: &Geometry, base: *const u8) -> PoolView {
    PoolView {
        base,
        block_bytes: geometry.block_bytes as i64,
        k_offset: geometry.k_offset as i64,
        v_offset: geometry.v_offset as i64,
        block_tokens: geometry.block_tokens as i32,
        kv_heads: geometry.kv_heads as i32,
        head_dim: geometry.head_dim as i32,
        dtype: geometry.dtype as i32,
    }
}

struct Job<'a> {
    geometry: &'a Geometry,
    spans: &'a [Span<'a>],
    query: usize,
    out: usize,
    view: PoolView,
    kernels: &'static Kernels,
    tiles: &'a [Tile],
}

// SAFETY: the pointers are read-only (pool, query) or written at places that no two tiles share
// (out); the caller keeps them alive during the run.
unsafe impl Sync for Job<'_> {}

impl Job<'_> {
    fn part_floats(&self) -> usize {
        MAX_QUERIES * (2 + self.geometry.head_dim)
    }

    /// Byte offset of query `column` of a tile in the queries and in the outputs.
    fn offset(&self, tile: &Tile, column: usize) -> usize {
        let group = self.geometry.heads / self.geometry.kv_heads;
        let row = self.spans[tile.span].first_row + (tile.first + column) / group;
        let head = tile.kv_head * group + (tile.first + column) % group;
        let element = row * self.geometry.row_elements() + head * self.geometry.head_dim;
        element * self.geometry.dtype.size()
    }

    /// Parts of some of the tile's blocks.
    ///
    /// # Safety
    /// As for [`attend`]; `parts` must hold `part_floats` for each block.
    unsafe fn compute(&self, tile: &Tile, blocks: std::ops::Range<usize>, parts: *mut f32) {
        let dim = self.geometry.head_dim;
        let span = &self.spans[tile.span];
        let group = self.geometry.heads / self.geometry.kv_heads;
        let mut queries = [0f32; MAX_QUERIES * MAX_HEAD_DIM];
        let mut visible = [0i32; MAX_QUERIES];
        let scale = self.geometry.scale * std::f32::consts::LOG2_E;
        for (column, seen) in visible.iter_mut().enumerate().take(tile.count) {
            *seen = (span.visible + (tile.first + column) / group) as i32;
            let source = (self.query + self.offset(tile, column)) as *const c_void;
            let target = queries[column * dim..].as_mut_ptr();
            // SAFETY: the row is one of the span's, and the column fits `queries`.
            unsafe { (self.kernels.widen)(source, self.view.dtype, dim as i64, scale, target) };
        }
        for (i, block) in blocks.enumerate() {
            // SAFETY: the span's table covers every key that a query of the tile sees.
            unsafe {
                (self.kernels.attend_block)(
                    &self.view,
                    span.table.as_ptr(),
                    tile.kv_head as i32,
                    queries.as_ptr(),
                    visible.as_ptr(),
                    tile.count as i32,
                    block as i32,
                    parts.add(i * self.part_floats()),
                );
            }
        }
    }

    /// Merges the tile's parts into the outputs.
    ///
    /// # Safety
    /// As for [`attend`]; `parts` holds all the tile's parts.
    unsafe fn finish(&self, tile: &Tile, parts: *const f32) {
        let (dim, group) = (
            self.geometry.head_dim,
            self.geometry.heads / self.geometry.kv_heads,
        );
        for column in 0..tile.count {
            // A query's last block may come before its tile's.
            let visible = self.spans[tile.span].visible + (tile.first + column) / group;
            let out = (self.out + self.offset(tile, column)) as *mut c_void;
            // SAFETY: see above; each column has its own place in the outputs.
            unsafe {
                (self.kernels.merge_parts)(
                    parts.add(column * (2 + dim)),
                    self.part_floats() as i64,
                    visible.div_ceil(KEY_BLOCK) as i32,
                    dim as i32,
                    self.view.dtype,
                    out,
                );
            }
        }
    }

    /// Few tiles, long contexts: the threads share out the blocks, then merge tile by tile.
    ///
    /// # Safety
    /// As for [`attend`].
    unsafe fn run_split(&self, units: usize, threads: &Pool, next: &AtomicUsize) -> Result<()> {
        let mut parts = vec![0f32; units * self.part_floats()];
        let base = parts.as_mut_ptr() as usize;
        let part = |unit: usize| (base as *mut f32).wrapping_add(unit * self.part_floats());
        let merged = AtomicUsize::new(0);
        threads.run(|member: &Member<'_>| {
            loop {
                let unit = next.fetch_add(1, Relaxed);
                if unit >= units {
                    break;
                }
                let tile = &self.tiles[self.tiles.partition_point(|t| t.unit <= unit) - 1];
                let block = unit - tile.unit;
                // SAFETY: the caller's promise; each unit has its own part.
                unsafe { self.compute(tile, block..block + 1, part(unit)) };
            }
            member.barrier();
            while let Some(tile) = self.tiles.get(merged.fetch_add(1, Relaxed)) {
                // SAFETY: the caller's promise; the barrier made all parts visible.
                unsafe { self.finish(tile, part(tile.unit)) };
            }
        })
    }
}
