//! The gate between a load and the forward that follows it: how many layers have arrived.
//!
//! Invariants: layers only ever arrive, in order; what was written before `open` is visible to
//! whoever `wait` lets through. A gate that failed holds nobody: the forward runs on to its end
//! over bytes that mean nothing, and says that it was in vain.
//! Fails: never; a loader that gives up says so with `fail`.

use std::sync::atomic::{AtomicUsize, Ordering::*};

use crate::pool::Gate;

const FAILED: usize = usize::MAX;

/// Layers of a pool's blocks that may be read.
pub struct LayerGate {
    layers: AtomicUsize,
    changed: Gate,
}

impl Default for LayerGate {
    fn default() -> Self {
        Self { layers: AtomicUsize::new(0), changed: Gate::new() }
    }
}

impl LayerGate {
    /// The first `layers` layers have arrived.
    pub fn open(&self, layers: usize) {
        // FAILED is the largest, so a gate that failed stays so.
        self.layers.fetch_max(layers, AcqRel);
        self.changed.wake();
    }

    /// The other layers will not arrive.
    pub fn fail(&self) {
        self.open(FAILED);
    }

    /// Whether `fail` was called.
    pub fn failed(&self) -> bool {
        self.layers.load(Acquire) == FAILED
    }

    /// Blocks until `layer` has arrived, or the gate failed.
    pub(crate) fn wait(&self, layer: usize) {
        self.changed.wait(|| self.layers.load(Acquire) > layer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_pass_when_their_layer_is_there_and_all_when_it_failed() {
        let gate = LayerGate::default();
        let passed = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for layer in 0..4 {
                    gate.wait(layer);
                    passed.store(layer + 1, Release);
                }
            });
            for layers in 1..3 {
                gate.open(layers);
                while passed.load(Acquire) < layers {
                    std::thread::yield_now();
                }
                assert_eq!(passed.load(Acquire), layers);
            }
            gate.fail();
            gate.open(3);
        });
        assert_eq!(passed.load(Acquire), 4);
        assert!(gate.failed());
    }
}
