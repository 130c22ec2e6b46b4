//! Which node holds which block in which tier: the simulator's cluster index, always up to date.

use crate::route::{Runs, Tier};

/// A node that holds a block, and the tiers it holds it in as bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holder {
    pub(super) node: u32,
    tiers: u8,
}

impl Holder {
    pub(super) fn holds(self, tier: Tier) -> bool {
        self.tiers & (1 << tier as u8) != 0
    }
}

/// See the module.
pub(super) struct Index {
    holders: Vec<Vec<Holder>>,
    /// Local runs (device, dram, any) of the last query, and which nodes they were written for.
    runs: Vec<[u32; 3]>,
    touched: Vec<u32>,
}

impl Index {
    pub(super) fn new(nodes: usize, blocks: usize) -> Self {
        Self { holders: vec![Vec::new(); blocks], runs: vec![[0; 3]; nodes], touched: Vec::new() }
    }

    pub(super) fn add(&mut self, block: u32, node: usize, tier: Tier) {
        let holders = &mut self.holders[block as usize];
        let bit = 1 << tier as u8;
        match holders.iter_mut().find(|holder| holder.node == node as u32) {
            Some(holder) => holder.tiers |= bit,
            None => holders.push(Holder { node: node as u32, tiers: bit }),
        }
    }

    pub(super) fn remove(&mut self, block: u32, node: usize, tier: Tier) {
        let holders = &mut self.holders[block as usize];
        if let Some(at) = holders.iter().position(|holder| holder.node == node as u32) {
            holders[at].tiers &= !(1 << tier as u8);
            if holders[at].tiers == 0 {
                holders.swap_remove(at);
            }
        }
    }

    pub(super) fn holders(&self, block: u32) -> &[Holder] {
        &self.holders[block as usize]
    }

    /// Local runs of every node, into `out`; returns the run over the whole cluster.
    pub(super) fn runs(&mut self, blocks: &[u32], out: &mut Vec<Runs>) -> u32 {
        let mut cluster = 0;
        for (depth, &block) in blocks.iter().enumerate() {
            let holders = &self.holders[block as usize];
            if holders.is_empty() {
                break;
            }
            cluster += 1;
            for holder in holders {
                let runs = &mut self.runs[holder.node as usize];
                if runs[2] != depth as u32 {
                    continue;
                }
                runs[2] += 1;
                let in_dram = holder.holds(Tier::Dram) || holder.holds(Tier::Device);
                runs[1] += u32::from(in_dram && runs[1] == depth as u32);
                runs[0] += u32::from(holder.holds(Tier::Device) && runs[0] == depth as u32);
                if depth == 0 {
                    self.touched.push(holder.node);
                }
            }
        }
        out.clear();
        out.resize(self.runs.len(), Runs::NONE);
        for node in self.touched.drain(..) {
            let [device, dram, any] = std::mem::take(&mut self.runs[node as usize]);
            out[node as usize] = Runs::local(device, dram, any);
        }
        cluster
    }
}
