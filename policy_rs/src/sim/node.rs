//! One simulated node: a queue of prompts, one prefill at a time, decode slots, and caches.

use std::collections::VecDeque;

use super::cache::Cache;
use super::index::Index;
use super::trace::Request;
use super::workload::Workload;
use crate::evict::Touch;
use crate::route::{Load, Plan, Tier};

/// A request on a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) request: usize,
    pub(super) tokens: u32,
    pub(super) blocks: u32,
    pub(super) predicted_s: f64,
}

impl Job {
    pub(super) fn new(number: usize, request: &Request, plan: &Plan) -> Self {
        Self {
            request: number,
            tokens: request.input_tokens,
            blocks: request.blocks.len() as u32,
            predicted_s: plan.reuse.total_s(),
        }
    }
}

/// See the module.
pub(super) struct Node {
    pub(super) queue: VecDeque<Job>,
    pub(super) running: Option<(Job, f64)>,
    pub(super) decoding: u32,
    /// Blocks of all unfinished requests.
    pub(super) active_blocks: u64,
    /// Seconds of the queued jobs, as predicted when they came.
    pub(super) queued_s: f64,
    pub(super) queued_tokens: u64,
    /// Seconds spent on prompts.
    pub(super) work_s: f64,
    /// When its link can send the next block.
    pub(super) egress_free_s: f64,
    device: Cache,
    dram: Cache,
    nvme: Cache,
    admitted: Vec<u32>,
    evicted: Vec<u32>,
}

impl Node {
    pub(super) fn new(device: Cache, dram: Cache, nvme: Cache) -> Self {
        Self {
            queue: VecDeque::new(),
            running: None,
            decoding: 0,
            active_blocks: 0,
            queued_s: 0.0,
            queued_tokens: 0,
            work_s: 0.0,
            egress_free_s: 0.0,
            device,
            dram,
            nvme,
            admitted: Vec::new(),
            evicted: Vec::new(),
        }
    }

    pub(super) fn accept(&mut self, job: Job) {
        self.queued_s += job.predicted_s;
        self.queued_tokens += u64::from(job.tokens);
        self.active_blocks += u64::from(job.blocks);
        self.queue.push_back(job);
    }

    pub(super) fn next_job(&mut self) -> Option<Job> {
        let job = self.queue.pop_front()?;
        self.queued_s -= job.predicted_s;
        self.queued_tokens -= u64::from(job.tokens);
        Some(job)
    }

    /// What the node reports about itself.
    pub(super) fn load(&self, now_s: f64) -> Load {
        let (running_s, running_tokens) =
            self.running.map_or((0.0, 0), |(job, ends_s)| ((ends_s - now_s).max(0.0), job.tokens));
        let waiting = (self.queue.len() + usize::from(self.running.is_some())) as u32;
        Load {
            queue_s: running_s + self.queued_s.max(0.0),
            prefill_tokens: self.queued_tokens + u64::from(running_tokens),
            waiting,
            requests: waiting + self.decoding,
            active_blocks: self.active_blocks,
            accepting: true,
        }
    }

    /// Another node copied `block` from here.
    pub(super) fn copied(&mut self, block: u32) {
        self.dram.copied(block);
    }

    /// Publish the blocks of a prompt whose prefill ended, and keep the index true.
    pub(super) fn publish(&mut self, me: usize, work: &Workload, job: Job, index: &mut Index) {
        let request = &work.trace.requests[job.request];
        let hint = work.hints[job.request];
        let blocks = || {
            request
                .blocks
                .iter()
                .map(|&block| (block, Touch { hint, partial: work.partial[block as usize] }))
        };
        for (tier, cache) in [(Tier::Device, &mut self.device), (Tier::Dram, &mut self.dram)] {
            self.admitted.clear();
            self.evicted.clear();
            cache.commit(None, blocks(), &mut self.admitted, &mut self.evicted);
            update(index, me, tier, &self.admitted, &self.evicted);
        }
        let on_disk = blocks().take_while(|&(block, _)| self.nvme.contains(block)).count();
        self.nvme.commit(None, blocks().take(on_disk), &mut Vec::new(), &mut Vec::new());
        for block in std::mem::take(&mut self.evicted) {
            self.demote(me, block, work, index);
        }
    }

    /// Write a block that left memory to disk, after its ancestors: no chain on disk has a hole.
    /// Partial blocks are not worth the write.
    fn demote(&mut self, me: usize, block: u32, work: &Workload, index: &mut Index) {
        if self.nvme.capacity() == 0 || work.partial[block as usize] {
            return;
        }
        let mut chain = Vec::new();
        let mut next = Some(block);
        while let Some(missing) = next.filter(|&block| !self.nvme.contains(block)) {
            chain.push((missing, Touch::default()));
            next = work.parents[missing as usize];
        }
        let (mut admitted, mut evicted) = (Vec::new(), Vec::new());
        self.nvme.commit(next, chain.into_iter().rev(), &mut admitted, &mut evicted);
        update(index, me, Tier::Nvme, &admitted, &evicted);
    }
}

fn update(index: &mut Index, me: usize, tier: Tier, admitted: &[u32], evicted: &[u32]) {
    // A block may be admitted and evicted within one commit: additions come first.
    for &block in admitted {
        index.add(block, me, tier);
    }
    for &block in evicted {
        index.remove(block, me, tier);
    }
}
