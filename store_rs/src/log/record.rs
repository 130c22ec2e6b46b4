//! A record: what the log's directory says of one block on disk.
//!
//! 128 bytes, little endian. The check covers the rest of it, place included, so that a record
//! that was torn, rotted or written to another place is nothing. Decoding is total: any bytes give
//! a record, the mark of another format, or nothing.

use crate::key::{KEY_BYTES, Key, NO_KEY};

/// Bytes of a record.
pub const RECORD_BYTES: usize = 128;

/// The unit of the log: every offset and length on disk is a multiple of it.
pub const PAGE: usize = 4096;

/// Records in a page of the directory.
pub const PER_PAGE: usize = PAGE / RECORD_BYTES;

/// Most bytes of a segment: a page's number has 16 bits.
pub const MAX_SEGMENT: u64 = (1 << 16) * PAGE as u64;

/// What record, container and key chain look like; another family's records are ignored. Raise it
/// with any of the three.
const FAMILY: u32 = 1;
const MAGIC: [u8; 4] = *b"MKVR";
const CHECKED: usize = RECORD_BYTES - 8;

/// One block on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Its key.
    pub key: Key,
    /// The key before it in its chain; None for the first block.
    pub parent: Option<Key>,
    /// Whose it is: the start of the BLAKE3 digest of the tenant's name.
    pub tenant: u64,
    /// Of its segment; grows with every segment that is begun.
    pub generation: u64,
    /// Where it is.
    pub segment: u32,
    /// Its number in the segment's directory.
    pub slot: u32,
    /// First page of its bytes within the segment.
    pub page: u32,
    /// Bytes of its container.
    pub len: u32,
    /// Checksum of those bytes. The container has stronger ones inside; this one tells a wrong
    /// place from the right one before anything is decoded.
    pub sum: u32,
}

/// What 128 bytes of a directory turned out to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// A whole record.
    Record(Record),
    /// A whole record of another format.
    OtherFamily,
    /// Never written, torn, or damaged.
    Nothing,
}

/// The fingerprint of a tenant's name that records carry.
pub fn tenant_print(name: &str) -> u64 {
    head(blake3::hash(name.as_bytes()).as_bytes())
}

/// Pages that `len` bytes take.
pub fn pages(len: u32) -> u32 {
    len.div_ceil(PAGE as u32)
}

fn head(digest: &[u8; 32]) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&digest[..8]);
    u64::from_le_bytes(word)
}

fn check(bytes: &[u8]) -> u64 {
    head(blake3::hash(bytes).as_bytes())
}

impl Record {
    /// As it goes to disk.
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&MAGIC);
        put(&FAMILY.to_le_bytes());
        for word in [self.segment, self.slot, self.page, self.len] {
            put(&word.to_le_bytes());
        }
        for word in [self.generation, self.tenant, self.sum.into()] {
            put(&word.to_le_bytes());
        }
        put(&self.key);
        put(&self.parent.unwrap_or(NO_KEY));
        let sum = check(&bytes[..CHECKED]);
        bytes[CHECKED..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// What is in a slot of a directory.
    pub fn decode(bytes: &[u8; RECORD_BYTES]) -> Found {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let key = |at: usize| -> Key { std::array::from_fn(|i| bytes[at + i]) };
        if bytes[..4] != MAGIC || word(CHECKED) != check(&bytes[..CHECKED]) {
            return Found::Nothing;
        }
        if half(4) != FAMILY {
            return Found::OtherFamily;
        }
        let parent = key(48 + KEY_BYTES);
        Found::Record(Self {
            key: key(48),
            parent: (parent != NO_KEY).then_some(parent),
            tenant: word(32),
            generation: word(24),
            segment: half(8),
            slot: half(12),
            page: half(16),
            len: half(20),
            sum: half(40),
        })
    }
}

#[cfg(test)]
pub(super) fn sample() -> Record {
    Record {
        key: [1; 32],
        parent: Some([2; 32]),
        tenant: tenant_print("acme"),
        generation: 7,
        segment: 3,
        slot: 5,
        page: 11,
        len: 70_000,
        sum: 99,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_record_survives_the_disk() {
        let record = sample();
        assert_eq!(Record::decode(&record.encode()), Found::Record(record));
        let root = Record { parent: None, ..record };
        assert_eq!(Record::decode(&root.encode()), Found::Record(root));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let whole = sample().encode();
        for bit in 0..RECORD_BYTES * 8 {
            let mut bytes = whole;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Record::decode(&bytes), Found::Nothing, "bit {bit}");
        }
    }

    #[test]
    fn another_family_is_told_apart_from_damage() {
        let mut bytes = sample().encode();
        bytes[4] = 0xee;
        let sum = check(&bytes[..CHECKED]);
        bytes[CHECKED..].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(Record::decode(&bytes), Found::OtherFamily);
    }

    proptest! {
        #[test]
        fn decoding_is_total(bytes: Vec<u8>) {
            let mut slot = [0; RECORD_BYTES];
            let len = bytes.len().min(RECORD_BYTES);
            slot[..len].copy_from_slice(&bytes[..len]);
            prop_assert_eq!(Record::decode(&slot), Found::Nothing);
        }
    }
}
