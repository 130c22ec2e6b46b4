//! Which block leaves a full cache.
//!
//! Owns: the order in which the blocks of one cache (one tier of one store) are given up, and the
//! tree of prefixes that constrains it. The owner of the bytes keeps a key index and asks here.
//!
//! Invariants: a victim never has a resident child (a prefix match stops at the first hole, so a
//! block without its parent is dead weight), is never pinned, and ties are broken the same way in
//! every run. Policies are deterministic, never read a clock and never allocate per touch; their
//! time is the number of blocks touched so far, so that ages compare directly with the capacity.
//!
//! Fails: misuse of a handle (unknown block, unpin without pin) panics, it is a bug of the owner.
//! A cache in which everything is pinned has no victim: `victim` returns `None` and the owner
//! refuses the put.

mod appraiser;
mod arc;
mod forest;
mod ghost;
mod heap;
mod lru;
mod prefix_aware;
mod reuse;
mod s3fifo;

use std::str::FromStr;

pub use appraiser::{Appraiser, Trace};
pub use arc::Arc;
pub use forest::{BlockId, Forest, Rank};
pub use lru::Lru;
pub use prefix_aware::PrefixAware;
pub use s3fifo::S3Fifo;

/// What a request says about the chance that its blocks are wanted again: −1 (the session is over)
/// to 1 (the next turn will come), 0 for silence.
///
/// Soft on purpose. A hint moves a block's place in the order and never decides alone; hints that
/// act as hard classes punch holes into prefixes as soon as some of them are wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Hint(f32);

impl Hint {
    /// No opinion.
    pub const NONE: Self = Self(0.0);

    /// A hint of the given strength; out of range values are clamped, NaN counts as silence.
    #[must_use]
    pub fn new(strength: f32) -> Self {
        if strength.is_nan() { Self::NONE } else { Self(strength.clamp(-1.0, 1.0)) }
    }

    /// The strength, −1 to 1.
    #[must_use]
    pub fn strength(self) -> f32 {
        self.0
    }
}

/// What is known about the request that touches a block.
#[derive(Clone, Copy, Debug, Default)]
pub struct Touch {
    /// The request's own hint.
    pub hint: Hint,
    /// The block is not full. It only matches a request with the very same prompt.
    pub partial: bool,
}

/// The eviction order of one cache.
///
/// Handles are dense small integers, reused after `remove`; the owner can index arrays by them.
pub trait EvictionPolicy: Send {
    /// Admit a block. `key` is 64 bits of its content key, `parent` the handle of the block before
    /// it, if resident. The owner makes room first, with `parent` pinned.
    fn insert(&mut self, key: u64, parent: Option<BlockId>, touch: Touch) -> BlockId;

    /// A request used the block.
    fn touch(&mut self, block: BlockId, touch: Touch);

    /// Another cache took a copy of the block and will serve its next use, so this copy is worth
    /// less than its history says. Policies without a notion of worth ignore it.
    fn copied(&mut self, _block: BlockId) {}

    /// Protect the block until the matching `unpin`. Pins count.
    fn pin(&mut self, block: BlockId);

    /// Undo one `pin`.
    fn unpin(&mut self, block: BlockId);

    /// The block to give up next, or `None` when everything is pinned. It stays resident until
    /// `remove`.
    fn victim(&mut self) -> Option<BlockId>;

    /// Whether a full cache, whose next victim is `victim`, should take the block `key` at all.
    fn admits(&self, _key: u64, _victim: BlockId) -> bool {
        true
    }

    /// Forget the block. `evicted` says that `victim` chose it, so that policies which learn from
    /// their past remember `key`; otherwise its content is gone for a reason of its own (corrupt,
    /// deleted). Children of a removed block stay until they are chosen themselves.
    fn remove(&mut self, block: BlockId, key: u64, evicted: bool);

    /// Blocks resident.
    fn len(&self) -> usize;

    /// No block is resident.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of bookkeeping, ghosts included.
    fn state_bytes(&self) -> usize;
}

/// The policies a cache can be built with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyKind {
    /// Recency, corrected by the learnt odds of being used again.
    Ours,
    /// Least recently used, tail first.
    Lru,
    /// Adaptive replacement cache.
    Arc,
    /// S3-FIFO with half of the cache as its small queue.
    S3Fifo,
}

impl PolicyKind {
    /// A policy for a cache that holds about `capacity` blocks.
    #[must_use]
    pub fn build(self, capacity: usize) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Ours => Box::new(PrefixAware::new(capacity)),
            Self::Lru => Box::new(Lru::new(capacity)),
            Self::Arc => Box::new(Arc::new(capacity)),
            Self::S3Fifo => Box::new(S3Fifo::new(capacity)),
        }
    }
}

impl FromStr for PolicyKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "ours" => Ok(Self::Ours),
            "lru" => Ok(Self::Lru),
            "arc" => Ok(Self::Arc),
            "s3fifo" => Ok(Self::S3Fifo),
            other => Err(format!("unknown policy {other:?}: use ours, lru, arc or s3fifo")),
        }
    }
}
