//! Blocks that are being computed right now and will be cached when the next request needs them.
//!
//! Owns: a table from block key to the replica that computes it and when it should be done. Soft
//! and short-lived: an entry ends some time after its block should have reached the index, so a
//! replica that failed costs a few wrong guesses and no more.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Keys are cut from a cryptographic hash (or are mixed ids): they need no hashing again.
#[derive(Default)]
pub(super) struct Identity(u64);

impl Hasher for Identity {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 << 8) | u64::from(byte);
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// Who computes a block, and until when to believe it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pending {
    pub(super) replica: usize,
    pub(super) ready_s: f64,
    expires_s: f64,
}

/// See the module.
#[derive(Default)]
pub(super) struct PendingBlocks {
    blocks: HashMap<u64, Pending, BuildHasherDefault<Identity>>,
    expiries: VecDeque<(f64, u64)>,
}

/// Index lag to allow for after a block should be done.
const LINGER_S: f64 = 2.0;

impl PendingBlocks {
    /// `replica` will have computed `keys` at `ready_s`.
    pub(super) fn announce(&mut self, replica: usize, keys: &[u64], now_s: f64, ready_s: f64) {
        while let Some(&(expires_s, key)) = self.expiries.front() {
            if expires_s > now_s {
                break;
            }
            self.expiries.pop_front();
            // A later announcement may have renewed the entry; its own expiry is further back.
            if self.blocks.get(&key).is_some_and(|pending| pending.expires_s <= now_s) {
                self.blocks.remove(&key);
            }
        }
        let expires_s = ready_s + LINGER_S;
        for &key in keys {
            self.blocks.insert(key, Pending { replica, ready_s, expires_s });
            self.expiries.push_back((expires_s, key));
        }
    }

    /// Who computes each of `keys`, into `out`; empty when nothing is in the making.
    pub(super) fn look_up(&self, keys: &[u64], now_s: f64, out: &mut Vec<Option<Pending>>) {
        out.clear();
        if !self.blocks.is_empty() {
            out.extend(keys.iter().map(|key| {
                self.blocks.get(key).copied().filter(|pending| pending.expires_s > now_s)
            }));
        }
    }
}
