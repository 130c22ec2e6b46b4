//! Maps the arena's pages into this process ahead of the first read of each block.
//!
//! A first read otherwise pays a page fault for every 16 pages, a quarter of its time. The thread
//! runs at the lowest priority, costs 0.2 s of it and 2 MiB of page tables per GiB, and ends with
//! the last user of the mapping. Nothing depends on how far it gets.

use std::sync::{Arc, Weak};
use std::thread;

use crate::arena::ArenaView;
use crate::error::{Error, Result};

/// Bytes per step; the mapping cannot go away during one.
const STEP: usize = 16 << 20;

const LOWEST_PRIORITY: i32 = 19;

pub(super) fn start(arena: &Arc<ArenaView>) -> Result<()> {
    let arena = Arc::downgrade(arena);
    thread::Builder::new()
        .name("store-prefault".to_owned())
        .spawn(move || run(&arena))
        .map(drop)
        .map_err(|error| Error::io("start a thread", error))
}

fn run(arena: &Weak<ArenaView>) {
    // On Linux a priority belongs to a thread. Refusal would only make us less polite.
    let _ = rustix::process::setpriority_process(None, LOWEST_PRIORITY);
    let mut next = Some(0);
    while let (Some(offset), Some(arena)) = (next, arena.upgrade()) {
        next = arena.prefault(offset, STEP);
    }
}
