//! A trace and what can be said about its blocks and requests beforehand.

use super::belady::Future;
use super::trace::Trace;
use crate::evict::Hint;
use crate::route::Rng;

/// See the module.
pub(super) struct Workload {
    pub(super) trace: Trace,
    /// The block before each block.
    pub(super) parents: Vec<Option<u32>>,
    /// Blocks that are not full.
    pub(super) partial: Vec<bool>,
    /// The hint of each request.
    pub(super) hints: Vec<Hint>,
}

impl Workload {
    /// `hint_accuracy` is the share of requests whose hint is right; none for silence.
    pub(super) fn new(
        trace: Trace,
        hint_accuracy: Option<f64>,
        future: &Future,
        seed: u64,
    ) -> Self {
        let mut parents = vec![None; trace.unique_blocks];
        let mut partial = vec![false; trace.unique_blocks];
        for request in &trace.requests {
            for pair in request.blocks.windows(2) {
                parents[pair[1] as usize] = Some(pair[0]);
            }
            if let Some(&last) = request.blocks.last() {
                partial[last as usize] = !request.input_tokens.is_multiple_of(trace.block_tokens);
            }
        }
        let mut rng = Rng::new(seed ^ 0x6869_6e74);
        let mut hint = |number: usize| {
            let Some(accuracy) = hint_accuracy else {
                return Hint::NONE;
            };
            let request = &trace.requests[number];
            let full = (request.input_tokens / trace.block_tokens).max(1) as usize;
            let again = future.next_use(request.blocks[full - 1], number as u32).is_some();
            let right = rng.unit() < accuracy;
            Hint::new(if again == right { 1.0 } else { -1.0 })
        };
        let hints = (0..trace.requests.len()).map(&mut hint).collect();
        Self { trace, parents, partial, hints }
    }
}
