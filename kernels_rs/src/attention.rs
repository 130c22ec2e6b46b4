//! Attention over a paged KV pool: the cut of the work.
//!
//! Owns: the tiles (query columns of one KV head of one sequence), and the bundles of them that
//! threads share out.
//! Invariants: see the crate; whether a tile's blocks run on one thread or on several is the only
//! thing that the schedule decides, and it does not show in the result.
//! Fails: with [`Error::Invalid`](crate::Error) when a size, offset, length or table entry is out
//! of bounds, before anything is written.

use std::{cmp::Reverse, ffi::c_void, ops::Range, sync::atomic::AtomicUsize};

use crate::{
    Geometry, Isa, Member, Pool, Result, Span,
    ffi::{COLUMNS, KEY_BLOCK, Kernels, PoolView, TileView},
};

/// Query columns of one KV head of one span.
struct Tile {
    span: usize,
    kv_head: usize,
    first: usize,
    count: usize,
    /// Floats of one of its parts.
    part: usize,
    /// Where its parts begin when they are kept for a later merge.
    offset: usize,
}

/// Tiles that go through the same blocks of keys side by side, one after the other in each.
///
/// A token's heads lie side by side in the pool. Where a tile is short work (decode), its span's KV
/// heads go together, so that memory is read in order.
struct Bundle {
    tiles: Range<usize>,
    blocks: usize,
    /// Index of its first (block, tile) among those of all bundles; tiles are innermost.
    unit: usize,
}

/// The cut of one batch; the same for every layer.
pub(crate) struct Plan<'a> {
    spans: &'a [Span<'a>],
    tiles: Vec<Tile>,
    bundles: Vec<Bundle>,
    units: usize,
    /// Threads share out blocks instead of bundles, and merge afterwards.
    split: bool,
    /// Parts that outlive a tile (split), or one bundle's (not split).
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
        let (mut tiles, mut bundles) = (Vec::new(), Vec::new());
        let mut bundle = |tiles: Range<usize>, visible: usize| {
            bundles.push(Bundle { tiles, blocks: visible.div_ceil(KEY_BLOCK), unit: 0 });
        };
        for (index, span) in spans.iter().enumerate() {
            let (columns, begin) = (span.rows * group, tiles.len());
            // Measured on the vector units; AMX keeps its tiles apart.
            let together = columns <= max_columns && max_columns == COLUMNS;
            for kv_head in 0..geometry.kv_heads {
                for first in (0..columns).step_by(max_columns) {
                    let count = max_columns.min(columns - first);
                    let part = count.next_multiple_of(COLUMNS) * (2 + geometry.head_dim);
                    tiles.push(Tile { span: index, kv_head, first, count, part, offset: 0 });
                    if !together {
                        let visible = span.visible + (first + count - 1) / group;
                        bundle(tiles.len() - 1..tiles.len(), visible);
                    }
                }
            }
            if together {
                bundle(begin..tiles.len(), span.visible + span.rows - 1);
            }
        }
        let floats = |b: &Bundle| tiles[b.tiles.clone()].iter().map(|t| t.part).sum::<usize>();
        bundles.sort_by_key(|b| Reverse(b.blocks * floats(b))); // the longest first: an even finish
        // Beside its parts, a bundle of several tiles has one that is about to be merged.
        let later = |b: &Bundle| if b.tiles.len() > 1 { tiles[b.tiles.start].part } else { 0 };
        let scratch = bundles.iter().map(|b| floats(b) + later(b)).max();
        let (mut units, mut kept) = (0, 0);
        for bundle in &mut bundles {
            bundle.unit = units;
            units += bundle.blocks * bundle.tiles.len();
            for tile in &mut tiles[bundle.tiles.clone()] {
                tile.offset = kept;
                kept += bundle.blocks * tile.part;
            }
        }
        let split = bundles.len() < 8 * threads && units > tiles.len();
        let kept = vec![0.0; if split { kept } else { 0 }];
        let scratch = scratch.unwrap_or(0);
        Self { spans, tiles, bundles, units, split, kept, scratch, group, kernels }
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
        let mut parts = vec![0f32; self.scratch];
        member.share(&turns.attend, self.bundles.len(), 1, |range| {
            for bundle in &self.bundles[range] {
                // SAFETY: the caller's promise; `parts` holds the largest bundle's.
                unsafe { self.run_bundle(bundle, on, parts.as_mut_ptr()) };
            }
        });
    }

    unsafe fn run_bundle(&self, bundle: &Bundle, on: &Operands, parts: *mut f32) {
        let tiles = &self.tiles[bundle.tiles.clone()];
        let (size, blocks) = (tiles[0].part, bundle.blocks as i32);
        let part = |index: usize| parts.wrapping_add(index * size);
        // One tile needs no stop between its blocks.
        let step = if tiles.len() == 1 { blocks } else { 1 };
        for from in (0..blocks).step_by(step as usize) {
            for (index, tile) in tiles.iter().enumerate() {
                let (view, later) = (self.view(tile, on), part(tiles.len()));
                let out = if from == 0 { part(index) } else { later };
                // SAFETY: as for `run`; tiles of a bundle have parts of one size.
                unsafe {
                    (self.kernels.attend)(&on.view, &view, on.scale, from, from + step, out);
                    if from > 0 {
                        (self.kernels.merge)(&on.view, &view, from, later, part(index));
                    }
                }
            }
        }
        for (index, tile) in tiles.iter().enumerate() {
            // SAFETY: as above.
            unsafe { (self.kernels.finish)(&on.view, &self.view(tile, on), part(index)) };
        }
    }

    unsafe fn run_split(&self, member: &Member<'_>, on: &Operands, turns: &Turns) {
        let kept = self.kept.as_ptr().cast_mut();
        let part = |tile: &Tile, block: usize| kept.wrapping_add(tile.offset + block * tile.part);
        member.share(&turns.attend, self.units, 1, |range| {
            for unit in range {
                let bundle = &self.bundles[self.bundles.partition_point(|b| b.unit <= unit) - 1];
                let (at, heads) = (unit - bundle.unit, bundle.tiles.len());
                let (block, tile) = (at / heads, &self.tiles[bundle.tiles.start + at % heads]);
                let (view, from) = (self.view(tile, on), block as i32);
                // SAFETY: the caller's promise; each unit has a part of its own in `kept`.
                unsafe {
                    let part = part(tile, block);
                    (self.kernels.attend)(&on.view, &view, on.scale, from, from + 1, part);
                }
            }
        });
        member.barrier();
        member.share(&turns.merge, self.bundles.len(), 1, |range| {
            for bundle in &self.bundles[range] {
                for tile in &self.tiles[bundle.tiles.clone()] {
                    let (view, first) = (self.view(tile, on), part(tile, 0));
                    // SAFETY: the caller's promise; the barrier made all parts visible.
                    unsafe {
                        for block in 1..bundle.blocks {
                            let later = part(tile, block);
                            (self.kernels.merge)(&on.view, &view, block as i32, later, first);
                        }
                        (self.kernels.finish)(&on.view, &view, first);
                    }
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
