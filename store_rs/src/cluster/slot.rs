//! The two protocols between the store, which writes, and any number of readers in other processes.
//!
//! A [`Slot`] is two words, fingerprint and meaning. The writer clears the meaning, writes the
//! fingerprint, then the new meaning; a reader takes meaning, fingerprint, meaning again, and
//! believes them if the meaning did not change. A [`Row`] is a seqlock: its first word is odd while
//! it is written. Neither ever blocks; a reader that loses the race three times takes it as absent,
//! which costs a miss. Checked with loom (`make loom`).

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// How often a reader tries.
const TRIES: usize = 3;

/// One entry of the table. A meaning of 0 is an empty slot.
#[repr(C)]
pub(super) struct Slot {
    fingerprint: AtomicU64,
    meaning: AtomicU64,
}

impl Slot {
    #[cfg(all(test, loom))]
    fn new() -> Self {
        Self { fingerprint: AtomicU64::new(0), meaning: AtomicU64::new(0) }
    }

    /// Replace the entry. One writer at a time.
    pub(super) fn write(&self, fingerprint: u64, meaning: u64) {
        self.meaning.store(0, Ordering::Relaxed);
        // Who sees the new fingerprint sees the cleared meaning, or a later one.
        self.fingerprint.store(fingerprint, Ordering::Release);
        self.meaning.store(meaning, Ordering::Release);
    }

    /// Change the meaning only; 0 empties the slot.
    pub(super) fn set_meaning(&self, meaning: u64) {
        self.meaning.store(meaning, Ordering::Release);
    }

    /// The entry as its only writer sees it.
    pub(super) fn peek(&self) -> (u64, u64) {
        (self.fingerprint.load(Ordering::Relaxed), self.meaning.load(Ordering::Relaxed))
    }

    /// Fingerprint and meaning that belong together; None if the slot is empty or keeps changing.
    pub(super) fn read(&self) -> Option<(u64, u64)> {
        for _ in 0..TRIES {
            let meaning = self.meaning.load(Ordering::Acquire);
            if meaning == 0 {
                return None;
            }
            let fingerprint = self.fingerprint.load(Ordering::Acquire);
            if self.meaning.load(Ordering::Relaxed) == meaning {
                return Some((fingerprint, meaning));
            }
        }
        None
    }
}

/// `N` words behind a sequence number.
#[repr(C)]
pub(super) struct Row<const N: usize> {
    sequence: AtomicU64,
    words: [AtomicU64; N],
}

impl<const N: usize> Row<N> {
    #[cfg(all(test, loom))]
    fn new() -> Self {
        Self { sequence: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Replace all words. One writer at a time.
    pub(super) fn write(&self, words: &[u64; N]) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        for (word, value) in self.words.iter().zip(words) {
            word.store(*value, Ordering::Relaxed);
        }
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// All words of one write; None if it was never written or keeps changing.
    pub(super) fn read(&self) -> Option<[u64; N]> {
        for _ in 0..TRIES {
            let before = self.sequence.load(Ordering::Acquire);
            if before == 0 {
                return None;
            }
            let words = std::array::from_fn(|at| self.words[at].load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before {
                return Some(words);
            }
        }
        None
    }
}

#[cfg(all(test, loom))]
mod tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn a_slot_is_never_read_in_halves() {
        loom::model(|| {
            let slot = Arc::new(Slot::new());
            let writer = {
                let slot = Arc::clone(&slot);
                thread::spawn(move || {
                    slot.write(1, 10);
                    slot.write(2, 20);
                })
            };
            if let Some(read) = slot.read() {
                assert!(read == (1, 10) || read == (2, 20), "{read:?} was never written");
            }
            writer.join().expect("the writer");
            assert_eq!(slot.read(), Some((2, 20)));
        });
    }

    #[test]
    fn a_row_is_never_read_in_halves() {
        loom::model(|| {
            let row = Arc::new(Row::<2>::new());
            let writer = {
                let row = Arc::clone(&row);
                thread::spawn(move || {
                    row.write(&[1, 1]);
                    row.write(&[2, 2]);
                })
            };
            if let Some([left, right]) = row.read() {
                assert_eq!(left, right);
            }
            writer.join().expect("the writer");
            assert_eq!(row.read(), Some([2, 2]));
        });
    }
}
