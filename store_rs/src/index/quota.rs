//! What one tenant may take: a tenant at its quota makes room among its own blocks.
//!
//! So a tenant that floods the store evicts itself, never another below its own quota. The unnamed
//! tenant, which is all there is where nobody is told apart, is not limited.

use super::{Index, NodeId};

/// Victims of others looked at to find one of a tenant's own.
const LOOKED_AT: usize = 512;

impl Index {
    /// Evict leaves of the node's tenant until `bytes` more are within its quota. False if that
    /// cannot be; then it may have lost blocks all the same.
    pub(super) fn room_in_quota(&mut self, node: NodeId, bytes: u64) -> bool {
        let row = self.nodes[node as usize].tenant();
        let Some(size) = self.alloc.rounded(bytes) else { return false };
        // As if it had one child more, so that it and its parent stay.
        let parent = self.nodes[node as usize].parent;
        self.nodes[node as usize].children += 1;
        self.warm_up(parent);
        while self.tenants.is_limited(row)
            && self.tenants.bytes(row) + size > self.limits.tenant_bytes
        {
            if !self.evict_of(row) {
                break;
            }
        }
        self.nodes[node as usize].children -= 1;
        self.cool_down(parent);
        !self.tenants.is_limited(row) || self.tenants.bytes(row) + size <= self.limits.tenant_bytes
    }

    /// Whether a tenant may have `bytes` more on disk.
    pub(super) fn disk_in_quota(&self, row: u32, bytes: u64) -> bool {
        let within = self.tenants.disk_bytes(row) + bytes <= self.limits.tenant_disk_bytes;
        within || !self.tenants.is_limited(row)
    }

    fn evict_of(&mut self, row: u32) -> bool {
        let (mut others, mut own) = (Vec::new(), None);
        while others.len() < LOOKED_AT && own.is_none() {
            let Some(node) = self.next_victim() else { break };
            if self.nodes[node as usize].tenant() == row {
                own = Some(node);
            } else {
                others.push(node);
            }
        }
        for node in others {
            self.offer(node);
        }
        own.inspect(|&node| self.evict_node(node)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use crate::index::usage::{Kind, Stored};
    use crate::index::{Eviction, Hint, Index, Limits, Refusal, Reserve, Wish};
    use crate::log::{Log, MAX_SEGMENT};

    const BLOCK: u64 = 64 * 1024;

    fn put(index: &mut Index, name: u8, tenant: &str) -> Reserve {
        let key = *blake3::hash(&[name]).as_bytes();
        let wish = Wish { key: &key, parent: None, bytes: BLOCK, tenant, hint: Hint::NONE };
        let reserved = index.reserve(&wish, name.into());
        if let Reserve::Granted(extent, _) = reserved {
            let kind = Kind { raw: BLOCK as u32, ..Kind::default() };
            index.publish(extent, Stored { len: BLOCK as u32, kind });
        }
        reserved
    }

    #[test]
    fn a_flood_of_one_tenant_takes_its_own_blocks_only() {
        let limits = Limits {
            max_blocks: 100,
            max_leases: 100,
            tenant_bytes: 4 * BLOCK,
            tenant_disk_bytes: u64::MAX,
        };
        let mut index = Index::new(16 * BLOCK, limits, Eviction::Lru.build(100));
        for name in 0..3 {
            put(&mut index, name, "quiet");
        }
        for name in 10..60 {
            assert!(matches!(put(&mut index, name, "flood"), Reserve::Granted(..)));
        }
        let tenants = index.snapshot().tenants;
        let bytes: Vec<_> = tenants.iter().map(|row| (row.name.as_str(), row.bytes)).collect();
        assert_eq!(bytes, [("quiet", 3 * BLOCK), ("flood", 4 * BLOCK)]);
        let session = index.open_session();
        for name in 56..60 {
            let key = *blake3::hash(&[name]).as_bytes();
            index.lease(session, &key, Hint::NONE, 100).expect("present");
        }
        assert_eq!(put(&mut index, 70, "flood"), Reserve::Refused(Refusal::OverQuota));
        for name in 80..90 {
            assert!(matches!(put(&mut index, name, ""), Reserve::Granted(..)), "not limited");
        }
    }

    #[test]
    fn what_is_being_written_counts_for_the_disk_quota() {
        let limits = Limits {
            max_blocks: 100,
            max_leases: 100,
            tenant_bytes: u64::MAX,
            tenant_disk_bytes: 2 * BLOCK,
        };
        let mut index = Index::new(16 * BLOCK, limits, Eviction::Lru.build(100));
        index.set_log(Log::new(4, MAX_SEGMENT));
        for name in 0..6 {
            put(&mut index, name, "t");
        }
        let (chosen, _) = index.next_drained(0, u64::MAX);
        assert_eq!(chosen.len(), 2, "one batch stays within the quota");
        assert!(index.next_drained(0, u64::MAX).0.is_empty(), "so does the next");
        assert!(!index.recharge(&chosen[0], 2 * BLOCK as u32), "nor may the form grow beyond it");
        assert!(index.recharge(&chosen[0], BLOCK as u32 / 2));
        assert!(
            index.recharge(&chosen[1], 3 * BLOCK as u32 / 2),
            "what one saves another may take"
        );
        for demotion in &chosen {
            index.demoted(demotion, None);
        }
        assert!(!index.is_demoting());
        let (again, _) = index.next_drained(0, u64::MAX);
        assert_eq!(again.len(), 2, "what was not written is not charged");
    }
}
