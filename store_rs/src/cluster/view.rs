//! The readers' side: which node holds how much of a chain, and what each replica is busy with.
//!
//! Read-only and wait-free. What it says may be a moment old or, when it raced the writer, too
//! little; both cost a miss.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use super::layout::{Meaning, NODES_MAX, REPLICAS_MAX, Region};
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

/// What [`ClusterView::runs`] keeps between calls.
#[derive(Debug, Default)]
pub struct Runs {
    /// One entry per node that holds the first block.
    pub nodes: Vec<NodeRun>,
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

    /// The rows of all replicas that live stores speak for.
    pub fn replicas(&self) -> Vec<ReplicaRow> {
        let known = self.region.header().replicas.load(Ordering::Acquire) as usize;
        let rows = (0..known.min(REPLICAS_MAX)).filter_map(|at| self.region.replica(at).read());
        rows.map(|words| ReplicaRow::unpack(&words)).filter(|row| row.load.accepting).collect()
    }

    /// Which live node holds how much of the chain `keys`, into `runs`.
    pub fn runs(&self, keys: &[Key], runs: &mut Runs) {
        runs.nodes.clear();
        runs.cluster = 0;
        self.read_alive(&mut runs.alive);
        for (block, key) in keys.iter().enumerate() {
            let block = block as u32;
            let mut held = false;
            let alive = &runs.alive;
            let nodes = &mut runs.nodes;
            holders(&self.region, key, |holder, tier| {
                if !alive.get(holder as usize).is_some_and(|alive| *alive) {
                    return;
                }
                held = true;
                let known = nodes.iter().position(|run| run.node == holder);
                let Some(at) = known.or_else(|| {
                    (block == 0).then(|| {
                        nodes.push(NodeRun { node: holder, dram: 0, nvme: 0 });
                        nodes.len() - 1
                    })
                }) else {
                    return;
                };
                let run = &mut nodes[at];
                run.nvme += u32::from(run.nvme == block);
                run.dram += u32::from(run.dram == block && tier == Tier::Dram as u8);
            });
            if !held {
                return;
            }
            runs.cluster = block + 1;
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

/// Call `found` with each (node row, tier) that has `key`.
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
