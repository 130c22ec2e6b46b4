//! What the index counts: bytes by category, events, and use per tenant.

use std::collections::HashMap;
use std::ops;

use super::leases::Leases;
use super::node::MAX_TENANTS;
use super::usage::Usage;
use super::{Index, Node, Tick};
use crate::log::tenant_print;

#[derive(Debug, Clone, Copy)]
pub(super) enum Category {
    Reserved,
    Resident,
    Leased,
    Quarantined,
}

/// Bytes in use, each in exactly one category.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bytes {
    /// A put is copying into them.
    pub reserved: u64,
    /// Blocks that may be evicted once they are leaves.
    pub resident: u64,
    /// Blocks being read.
    pub leased: u64,
    /// Blocks whose only readers broke the protocol and may still be alive.
    pub quarantined: u64,
}

impl Bytes {
    pub(super) fn total(&self) -> u64 {
        self.reserved + self.resident + self.leased + self.quarantined
    }
}

impl ops::Index<Category> for Bytes {
    type Output = u64;

    fn index(&self, category: Category) -> &u64 {
        match category {
            Category::Reserved => &self.reserved,
            Category::Resident => &self.resident,
            Category::Leased => &self.leased,
            Category::Quarantined => &self.quarantined,
        }
    }
}

impl ops::IndexMut<Category> for Bytes {
    fn index_mut(&mut self, category: Category) -> &mut u64 {
        match category {
            Category::Reserved => &mut self.reserved,
            Category::Resident => &mut self.resident,
            Category::Leased => &mut self.leased,
            Category::Quarantined => &mut self.quarantined,
        }
    }
}

/// Events since the store started.
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct Counters {
    pub match_calls: u64,
    pub matched_blocks: u64,
    pub lease_hits: u64,
    /// Of these, blocks that were in DRAM when they were asked for, or on their way.
    pub lease_hits_dram: u64,
    pub lease_misses: u64,
    pub invalid_releases: u64,
    pub puts_stored: u64,
    pub puts_present: u64,
    pub refused_full: u64,
    pub refused_too_large: u64,
    pub refused_parent_absent: u64,
    pub refused_over_quota: u64,
    pub evicted_for_room: u64,
    pub evicted_on_request: u64,
    pub corrupt_dropped: u64,
    pub transcoded: u64,
    pub transcode_kept: u64,
    pub blocks_landed: u64,
    pub promoted: u64,
    pub demoted: u64,
    pub disk_misses: u64,
    pub disk_dropped: u64,
    pub evicted_to_disk: u64,
    pub sessions_opened: u64,
    pub sessions_violated: u64,
}

/// What one tenant occupies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TenantUse {
    /// The name the clients gave; the last row may stand for all later ones.
    pub name: String,
    /// Physical bytes of its blocks.
    pub bytes: u64,
    /// Its blocks.
    pub blocks: u64,
    /// Bytes of its blocks on disk.
    pub disk_bytes: u64,
}

#[derive(Default)]
pub(super) struct Tenants {
    rows: Vec<TenantUse>,
    /// By the fingerprint that records on disk carry.
    by_print: HashMap<u64, u32>,
}

impl Tenants {
    /// Add a block of `bytes` to a tenant's row.
    pub(super) fn charge(&mut self, row: u32, bytes: u64) {
        self.rows[row as usize].bytes += bytes;
        self.rows[row as usize].blocks += 1;
    }

    /// A block of a tenant takes other bytes than before.
    pub(super) fn resize(&mut self, row: u32, before: u64, now: u64) {
        self.rows[row as usize].bytes += now;
        self.rows[row as usize].bytes -= before;
    }

    pub(super) fn refund(&mut self, row: u32, bytes: u64) {
        self.rows[row as usize].bytes -= bytes;
        self.rows[row as usize].blocks -= 1;
    }

    /// Whether quotas hold for it: not for the unnamed tenant.
    pub(super) fn is_limited(&self, row: u32) -> bool {
        !self.rows[row as usize].name.is_empty()
    }

    pub(super) fn bytes(&self, row: u32) -> u64 {
        self.rows[row as usize].bytes
    }

    pub(super) fn disk_bytes(&self, row: u32) -> u64 {
        self.rows[row as usize].disk_bytes
    }

    pub(super) fn charge_disk(&mut self, row: u32, bytes: u64) {
        self.rows[row as usize].disk_bytes += bytes;
    }

    pub(super) fn refund_disk(&mut self, row: u32, bytes: u64) {
        self.rows[row as usize].disk_bytes -= bytes;
    }

    /// The row of a tenant; later ones share the last row, so the table stays bounded.
    pub(super) fn row(&mut self, name: &str) -> u32 {
        let print = tenant_print(name);
        let row = self.row_of_print(print);
        let shown = &mut self.rows[row as usize].name;
        if shown.starts_with('#') && *shown == unnamed(print) {
            name.clone_into(shown);
        }
        row
    }

    /// The row of a tenant whose name is not known yet.
    pub(super) fn row_of_print(&mut self, print: u64) -> u32 {
        if let Some(&row) = self.by_print.get(&print) {
            return row;
        }
        if self.rows.len() == MAX_TENANTS {
            return MAX_TENANTS as u32 - 1;
        }
        let last = self.rows.len() + 1 == MAX_TENANTS;
        let name = if last { "(others)".to_owned() } else { unnamed(print) };
        let row = self.rows.len() as u32;
        self.rows.push(TenantUse { name, ..TenantUse::default() });
        self.by_print.insert(print, row);
        row
    }

    pub(super) fn print(&self, row: u32) -> u64 {
        let name = &self.rows[row as usize].name;
        let unnamed = name.strip_prefix('#').and_then(|hex| u64::from_str_radix(hex, 16).ok());
        unnamed.unwrap_or_else(|| tenant_print(name))
    }
}

fn unnamed(print: u64) -> String {
    format!("#{print:016x}")
}

/// A consistent view of everything the index counts.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub struct Snapshot {
    pub capacity: u64,
    pub free: u64,
    /// The largest free extent: what is free beyond it is fragmented.
    pub largest_free: u64,
    pub bytes: Bytes,
    /// Bytes of the blocks themselves, uncoded.
    pub logical: u64,
    pub blocks: u64,
    pub leases: u64,
    /// When the oldest lease was taken.
    pub oldest_lease: Option<Tick>,
    pub sessions: u64,
    pub index_bytes: u64,
    pub counters: Counters,
    pub tenants: Vec<TenantUse>,
    /// By element type and codec.
    pub usage: Vec<Usage>,
    pub pinned: u64,
    /// Bytes of hard pins.
    pub pinned_bytes: u64,
    /// What the log holds.
    pub disk: DiskUse,
}

/// What the log holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskUse {
    /// Blocks.
    pub blocks: u64,
    /// Bytes of them, in whole pages.
    pub live: u64,
    /// Bytes on disk.
    pub allocated: u64,
}

impl Snapshot {
    /// Every gauge and counter with its name.
    pub fn values(&self) -> Vec<(String, u64)> {
        let c = &self.counters;
        let mut all = Usage::default();
        self.usage.iter().for_each(|row| all.absorb(row));
        let named = [
            ("capacity_bytes", self.capacity),
            ("free_bytes", self.free),
            ("reserved_bytes", self.bytes.reserved),
            ("resident_bytes", self.bytes.resident),
            ("leased_bytes", self.bytes.leased),
            ("quarantined_bytes", self.bytes.quarantined),
            ("logical_bytes", self.logical),
            ("shared_saved_bytes", all.shared_saved),
            ("codec_saved_bytes", all.codec_saved),
            ("metadata_bytes", all.metadata),
            ("rounding_bytes", all.rounding),
            ("physical_bytes", all.physical),
            ("fragmented_bytes", self.free - self.largest_free),
            ("blocks", self.blocks),
            ("leases", self.leases),
            ("sessions", self.sessions),
            ("index_bytes", self.index_bytes),
            ("match_calls", c.match_calls),
            ("matched_blocks", c.matched_blocks),
            ("lease_hits", c.lease_hits),
            ("lease_hits_dram", c.lease_hits_dram),
            ("lease_misses", c.lease_misses),
            ("invalid_releases", c.invalid_releases),
            ("puts_stored", c.puts_stored),
            ("puts_present", c.puts_present),
            ("refused_full", c.refused_full),
            ("refused_too_large", c.refused_too_large),
            ("refused_parent_absent", c.refused_parent_absent),
            ("refused_over_quota", c.refused_over_quota),
            ("evicted_for_room", c.evicted_for_room),
            ("evicted_on_request", c.evicted_on_request),
            ("corrupt_dropped", c.corrupt_dropped),
            ("transcoded_blocks", c.transcoded),
            ("transcode_kept_blocks", c.transcode_kept),
            ("pinned_blocks", self.pinned),
            ("pinned_bytes", self.pinned_bytes),
            ("blocks_landed", c.blocks_landed),
            ("nvme_blocks", self.disk.blocks),
            ("nvme_live_bytes", self.disk.live),
            ("nvme_allocated_bytes", self.disk.allocated),
            ("nvme_promoted", c.promoted),
            ("nvme_demoted", c.demoted),
            ("nvme_read_misses", c.disk_misses),
            ("nvme_dropped", c.disk_dropped),
            ("evicted_to_nvme", c.evicted_to_disk),
            ("sessions_opened", c.sessions_opened),
            ("sessions_violated", c.sessions_violated),
        ];
        named.map(|(name, value)| (name.to_owned(), value)).to_vec()
    }
}

impl Index {
    /// So many of the blocks just leased needed no tier below DRAM.
    pub fn count_dram_hits(&mut self, blocks: u64) {
        self.counters.lease_hits_dram += blocks;
    }

    /// Everything counted, at one moment.
    pub fn snapshot(&self) -> Snapshot {
        let usage = self.usages.totals();
        Snapshot {
            capacity: self.alloc.capacity(),
            free: self.alloc.free_bytes(),
            largest_free: self.alloc.largest_free(),
            bytes: self.bytes,
            logical: usage.iter().map(|row| row.logical).sum(),
            blocks: self.tenants.rows.iter().map(|tenant| tenant.blocks).sum(),
            leases: self.sessions.values().map(|held| held.len() as u64).sum(),
            oldest_lease: self.sessions.values().filter_map(Leases::oldest).min(),
            sessions: self.sessions.len() as u64,
            index_bytes: self.memory_bytes(),
            counters: self.counters,
            tenants: self.tenants.rows.clone(),
            usage,
            pinned: self.pins.len() as u64,
            pinned_bytes: self.pins.hard_bytes(),
            disk: self.log().map_or_else(DiskUse::default, |log| DiskUse {
                blocks: log.len() as u64,
                live: log.live_bytes(),
                allocated: log.allocated_bytes(),
            }),
        }
    }

    fn memory_bytes(&self) -> u64 {
        let nodes = self.nodes.len() * size_of::<Node>();
        let table = self.table.allocation_size();
        let spare = self.spare.len() * size_of::<u32>();
        (nodes + table + spare) as u64
            + self.alloc.memory_bytes()
            + self.policy.memory_bytes()
            + self.leaves.memory_bytes()
            + self.usages.memory_bytes()
            + self.journal.memory_bytes()
            + self.log().map_or(0, crate::log::Log::memory_bytes)
    }
}
