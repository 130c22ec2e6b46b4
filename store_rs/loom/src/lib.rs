//! The store's own source, compiled with loom's atomics; its tests explore every interleaving.

#![allow(dead_code, unreachable_pub)]

#[path = "../../src/cluster/slot.rs"]
mod slot;
#[path = "../../src/written.rs"]
mod written;
