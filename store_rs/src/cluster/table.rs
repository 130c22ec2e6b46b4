//! The writer's side of the index: open addressing over the slots, one slot per (key, holder).
//!
//! Invariants: an entry lies between its home and the next empty slot; at most [`FULL`] of the slots
//! are in use. Removing an entry moves later ones up, so chains stay short without tombstones. When
//! the slots run out a larger table takes over, up to the memory it was given; from then on a new
//! entry replaces the oldest remote one near its home.

use std::sync::atomic::Ordering;

use super::layout::{Meaning, NODES_MAX, REPLICAS_MAX, Region, bytes_of, slots_in};
use crate::arena::Arena;
use crate::error::Result;
use crate::index::{Entry, Tier};

/// Share of the slots in use at which the table grows, in percent.
const FULL: usize = 85;
/// Growth, in percent: entries take 16 / 0.68 bytes at most right after it.
const GROWTH: usize = 125;
const SLOTS_MIN: usize = 1 << 14;
/// How far a full table looks for the oldest entry.
const WINDOW: usize = 32;
/// The holder whose entries are never replaced: this store.
const OURS: u16 = 0;

/// See the module.
pub(super) struct Table {
    arena: Arena,
    region: Region,
    used: usize,
    slots_max: usize,
    /// Entries that made way for others.
    pub(super) replaced: u64,
}

/// Bytes of a table of so many entries, and of the one that it took over from.
pub(super) fn bytes_for(entries: u64) -> u64 {
    let slots = entries.saturating_mul(GROWTH as u64) / FULL as u64;
    let slots = usize::try_from(slots).unwrap_or(usize::MAX / 64).max(SLOTS_MIN);
    let bytes = bytes_of(slots) as u64;
    bytes.saturating_add(bytes / GROWTH as u64 * 100)
}

impl Table {
    /// An empty table that may grow until it and the one it takes over from make `bytes_max`.
    pub(super) fn new(bytes_max: u64) -> Result<Self> {
        let share = bytes_max / (100 + GROWTH as u64) * GROWTH as u64;
        let slots_max = slots_in(share).max(SLOTS_MIN);
        let (arena, region) = allocate(SLOTS_MIN)?;
        Ok(Self { arena, region, used: 0, slots_max, replaced: 0 })
    }

    pub(super) fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(super) fn region(&self) -> &Region {
        &self.region
    }

    /// Entries in it.
    pub(super) fn entries(&self) -> usize {
        self.used
    }

    /// Bytes it takes.
    pub(super) fn bytes(&self) -> u64 {
        self.arena.size()
    }

    /// `holder` has the block in this tier, or no longer.
    pub(super) fn set(&mut self, entry: &Entry, holder: u16, age: u16) -> Result<()> {
        let Entry { fingerprint, check, tier } = *entry;
        let meaning = Meaning { check, holder, tier: tier as u8, age };
        match self.find(fingerprint, check, holder) {
            (at, true) if tier == Tier::Gone => self.remove(at),
            (at, true) => self.region.slots()[at].set_meaning(meaning.pack()),
            (_, false) if tier == Tier::Gone => {}
            (at, false) => self.insert(at, fingerprint, meaning)?,
        }
        self.region.header().entries.store(self.used as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Drop everything `holder` has.
    pub(super) fn purge(&mut self, holder: u16) {
        let mut at = 0;
        while at < self.region.slots().len() {
            let (_, word) = self.region.slots()[at].peek();
            if word != 0 && Meaning::unpack(word).holder == holder {
                // Another entry may move here: look again.
                self.remove(at);
            } else {
                at += 1;
            }
        }
        self.region.header().entries.store(self.used as u64, Ordering::Relaxed);
    }

    /// Everything `holder` has.
    pub(super) fn held_by(&self, holder: u16) -> Vec<Entry> {
        let entry = |(fingerprint, word): (u64, u64)| {
            let Meaning { check, holder: by, tier, .. } = Meaning::unpack(word);
            let tier = Tier::from_u8(tier).filter(|_| word != 0 && by == holder)?;
            Some(Entry { fingerprint, check, tier })
        };
        self.region.slots().iter().filter_map(|slot| entry(slot.peek())).collect()
    }

    /// Where the entry is, or the empty slot at the end of its chain.
    fn find(&self, fingerprint: u64, check: u16, holder: u16) -> (usize, bool) {
        let slots = self.region.slots();
        let mut at = self.region.home(fingerprint);
        loop {
            let (found, word) = slots[at].peek();
            if word == 0 {
                return (at, false);
            }
            let meaning = Meaning::unpack(word);
            if found == fingerprint && meaning.check == check && meaning.holder == holder {
                return (at, true);
            }
            at = (at + 1) % slots.len();
        }
    }

    fn insert(&mut self, at: usize, fingerprint: u64, meaning: Meaning) -> Result<()> {
        if (self.used + 1) * 100 <= self.region.slots().len() * FULL {
            self.region.slots()[at].write(fingerprint, meaning.pack());
            self.used += 1;
            return Ok(());
        }
        let larger = (self.region.slots().len() * GROWTH / 100).min(self.slots_max);
        if larger > self.region.slots().len() {
            self.grow(larger)?;
        } else if let Some(victim) = self.oldest_near(fingerprint, meaning.age) {
            self.replaced += 1;
            self.remove(victim);
        } else {
            self.replaced += 1;
            return Ok(());
        }
        let (at, _) = self.find(fingerprint, meaning.check, meaning.holder);
        self.insert(at, fingerprint, meaning)
    }

    /// The remote entry near a home that was written longest ago.
    fn oldest_near(&self, fingerprint: u64, now: u16) -> Option<usize> {
        let slots = self.region.slots();
        let home = self.region.home(fingerprint);
        let window = (home..home + WINDOW).map(|at| at % slots.len());
        let remote = window.filter_map(|at| {
            let (_, word) = slots[at].peek();
            let meaning = Meaning::unpack(word);
            (word != 0 && meaning.holder != OURS).then(|| (now.wrapping_sub(meaning.age), at))
        });
        remote.max_by_key(|(age, _)| *age).map(|(_, at)| at)
    }

    fn remove(&mut self, mut hole: usize) {
        let slots = self.region.slots();
        let mut at = hole;
        loop {
            at = (at + 1) % slots.len();
            let (fingerprint, word) = slots[at].peek();
            if word == 0 {
                break;
            }
            let home = self.region.home(fingerprint);
            let stays =
                if hole <= at { hole < home && home <= at } else { hole < home || home <= at };
            if !stays {
                slots[hole].write(fingerprint, word);
                hole = at;
            }
        }
        slots[hole].set_meaning(0);
        self.used -= 1;
    }

    fn grow(&mut self, slots: usize) -> Result<()> {
        let (arena, region) = allocate(slots)?;
        let old = self.region;
        for slot in old.slots() {
            let (fingerprint, word) = slot.peek();
            if word == 0 {
                continue;
            }
            let mut at = region.home(fingerprint);
            while region.slots()[at].peek().1 != 0 {
                at = (at + 1) % slots;
            }
            region.slots()[at].write(fingerprint, word);
        }
        let (from, to) = (old.header(), region.header());
        to.nodes.store(from.nodes.load(Ordering::Relaxed), Ordering::Relaxed);
        to.replicas.store(from.replicas.load(Ordering::Relaxed), Ordering::Relaxed);
        for at in 0..NODES_MAX {
            old.node(at).read().inspect(|words| region.node(at).write(words));
        }
        for at in 0..REPLICAS_MAX {
            old.replica(at).read().inspect(|words| region.replica(at).write(words));
        }
        from.moved.store(1, Ordering::Release);
        // Readers keep what they have mapped until they follow.
        (self.arena, self.region) = (arena, region);
        Ok(())
    }
}

fn allocate(slots: usize) -> Result<(Arena, Region)> {
    let bytes = bytes_of(slots);
    let arena = Arena::create_as("mooncake-cluster", "store.peer.index", bytes)?;
    // SAFETY: a fresh mapping of that size, page aligned and zeroed; the table keeps the arena as
    // long as the region.
    let region = unsafe { Region::create(arena.at(0, bytes), slots) };
    Ok((arena, region))
}
