//! The readers' side: which node holds how much of a chain, and what each replica is busy with.
//!
//! Read-only and wait-free. What it says may be a moment old or, when it raced the writer, too
//! little; both cost a miss.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use super::layout::{Meaning, NODES_MAX, REPLICAS_MAX, Region};
use super::pools::POOLS;
use super::rows::{NodeRow, ReplicaRow};
use crate::arena::ArenaView;
use crate::error::Result;
use crate::index::{Entry, Tier};
use crate::key::Key;

/// A mapped cluster index.
pub struct ClusterView {
    region: Region,
    _map: ArenaView,
}

/// How much of a chain one node holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeRun {
    /// The node's row.
    pub node: u16,
    /// Leading blocks in its memory.
    pub dram: u32,
    /// Leading blocks in its memory or on its disk.
    pub nvme: u32,
}

/// How much of a chain one replica's pool holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolRun {
    /// The replica's row.
    pub replica: u16,
    /// Leading blocks.
    pub blocks: u32,
}

/// What [`ClusterView::runs`] keeps between calls.
#[derive(Debug, Default)]
pub struct Runs {
    /// One entry per node that holds the first block.
    pub nodes: Vec<NodeRun>,
    /// One entry per replica whose pool holds the first block.
    pub pools: Vec<PoolRun>,
    /// Leading blocks that some node holds, each from wherever it is.
    pub cluster: u32,
    alive: Vec<bool>,
}

impl ClusterView {
    /// Map what a store passed.
    pub fn open(fd: OwnedFd, bytes: u64) -> Result<Self> {
        let map = ArenaView::open(fd, bytes)?;
        // SAFETY: a mapping of `bytes`, kept beside the region.
        let region = unsafe { Region::open(map.base(), bytes as usize)? };
        Ok(Self { region, _map: map })
    }

    /// A larger index took over: ask the store for it.
    pub fn moved(&self) -> bool {
        self.region.header().moved.load(Ordering::Acquire) != 0
    }

    /// Entries of all nodes.
    pub fn entries(&self) -> u64 {
        self.region.header().entries.load(Ordering::Relaxed)
    }

    /// Row number and row of every store that ever was.
    pub fn nodes(&self) -> Vec<(u16, NodeRow)> {
        let known = self.region.header().nodes.load(Ordering::Acquire) as usize;
        let rows = (0..known.min(NODES_MAX))
            .filter_map(|at| Some((at as u16, NodeRow::unpack(&self.region.node(at).read()?))));
        rows.collect()
    }

    /// Row number and row of every replica that a live store speaks for.
    pub fn replicas(&self) -> Vec<(u16, ReplicaRow)> {
        let known = self.region.header().replicas.load(Ordering::Acquire) as usize;
        let rows = (0..known.min(REPLICAS_MAX)).filter_map(|at| {
            Some((at as u16, ReplicaRow::unpack(&self.region.replica(at).read()?)))
        });
        rows.filter(|(_, row)| row.load.accepting).collect()
    }

    /// Which live node and which replica's pool holds how much of the chain `keys`, into `runs`.
    pub fn runs(&self, keys: &[Key], runs: &mut Runs) {
        runs.nodes.clear();
        runs.pools.clear();
        runs.cluster = 0;
        self.read_alive(&mut runs.alive);
        for (block, key) in keys.iter().enumerate() {
            let (mut held, mut pooled) = (false, false);
            holders(&self.region, key, |holder, tier| {
                if holder >= POOLS {
                    pooled |= runs.extend_pool(holder - POOLS, block as u32);
                } else if runs.alive.get(holder as usize).is_some_and(|alive| *alive) {
                    held = true;
                    runs.extend_node(holder, tier, block as u32);
                }
            });
            runs.cluster += u32::from(held && runs.cluster == block as u32);
            if !held && !pooled {
                return;
            }
        }
    }

    fn read_alive(&self, alive: &mut Vec<bool>) {
        let known = self.region.header().nodes.load(Ordering::Acquire) as usize;
        alive.clear();
        alive.extend(
            (0..known.min(NODES_MAX)).map(|at| {
                self.region.node(at).read().is_some_and(|words| NodeRow::is_alive(&words))
            }),
        );
    }
}

impl Runs {
    fn extend_node(&mut self, node: u16, tier: u8, block: u32) {
        if block == 0 {
            self.nodes.push(NodeRun { node, dram: 0, nvme: 0 });
        }
        let Some(run) = self.nodes.iter_mut().find(|run| run.node == node) else { return };
        run.nvme += u32::from(run.nvme == block);
        run.dram += u32::from(run.dram == block && tier == Tier::Dram as u8);
    }

    /// Whether the run goes on.
    fn extend_pool(&mut self, replica: u16, block: u32) -> bool {
        let known = self.pools.iter_mut().find(|run| run.replica == replica);
        match known {
            Some(run) if run.blocks == block => run.blocks += 1,
            None if block == 0 => self.pools.push(PoolRun { replica, blocks: 1 }),
            _ => return false,
        }
        true
    }
}

/// Call `found` with each (holder, tier) that has `key`: a node's row, or a replica's above `POOLS`.
pub(super) fn holders(region: &Region, key: &Key, mut found: impl FnMut(u16, u8)) {
    let Entry { fingerprint, check, .. } = Entry::new(key, Tier::Dram);
    let slots = region.slots();
    let mut at = region.home(fingerprint);
    // Bounded, should the writer ever leave no empty slot in sight.
    for _ in 0..slots.len() {
        let Some((other, word)) = slots[at].read() else { return };
        let meaning = Meaning::unpack(word);
        if other == fingerprint && meaning.check == check {
            found(meaning.holder, meaning.tier);
        }
        at = if at + 1 == slots.len() { 0 } else { at + 1 };
    }
}
