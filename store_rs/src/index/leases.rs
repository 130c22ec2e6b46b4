//! The leases of one session: a slab of tokens, each naming one leased extent.
//!
//! A token is handed out once: its upper half is a generation, so a token released twice, or one
//! of another session, finds nothing and changes nothing.

use super::Tick;
use crate::alloc::ExtentId;

/// Names one lease within its session.
pub type Token = u64;

const FREE: ExtentId = ExtentId::MAX;

#[derive(Clone, Copy)]
struct Slot {
    since: Tick,
    extent: ExtentId,
    generation: u32,
}

/// What one session holds.
#[derive(Default)]
pub(super) struct Leases {
    slots: Vec<Slot>,
    spare: Vec<u32>,
    /// The session broke the protocol: its leases wait for its process to die.
    pub(super) quarantined: bool,
    /// The bit of its process.
    pub(super) user: u16,
}

impl Leases {
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.spare.len()
    }

    pub(super) fn add(&mut self, extent: ExtentId, now: Tick) -> Token {
        let at = self.spare.pop().unwrap_or_else(|| {
            self.slots.push(Slot { since: 0, extent: FREE, generation: 0 });
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[at as usize];
        (slot.extent, slot.since) = (extent, now);
        u64::from(slot.generation) << 32 | u64::from(at)
    }

    pub(super) fn get(&self, token: Token) -> Option<ExtentId> {
        let slot = self.slots.get(token as u32 as usize)?;
        (slot.generation == (token >> 32) as u32 && slot.extent != FREE).then_some(slot.extent)
    }

    pub(super) fn remove(&mut self, token: Token) -> Option<ExtentId> {
        let extent = self.get(token)?;
        let slot = &mut self.slots[token as u32 as usize];
        slot.extent = FREE;
        slot.generation = slot.generation.wrapping_add(1);
        self.spare.push(token as u32);
        Some(extent)
    }

    /// When the oldest of them was taken.
    pub(super) fn oldest(&self) -> Option<Tick> {
        self.slots.iter().filter(|slot| slot.extent != FREE).map(|slot| slot.since).min()
    }

    pub(super) fn extents(&self) -> impl Iterator<Item = ExtentId> + '_ {
        self.slots.iter().map(|slot| slot.extent).filter(|&extent| extent != FREE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_works_once() {
        let mut leases = Leases::default();
        let first = leases.add(7, 1);
        assert_eq!(leases.remove(first), Some(7));
        assert_eq!(leases.remove(first), None);
        let second = leases.add(8, 2);
        assert_ne!(first, second);
        assert_eq!(leases.get(first), None);
        assert_eq!(leases.extents().collect::<Vec<_>>(), [8]);
        assert_eq!(leases.len(), 1);
        let third = leases.add(9, 3);
        assert_eq!(leases.oldest(), Some(2));
        leases.remove(second);
        assert_eq!(leases.oldest(), Some(3));
        leases.remove(third);
        assert_eq!(leases.oldest(), None);
    }
}
