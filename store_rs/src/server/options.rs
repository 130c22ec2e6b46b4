//! What a store is started with, and how its memory is divided.
//!
//! `dram_bytes` is a hard cap on everything a store holds: the arena, the put buffers of its
//! clients, the index and its journal, the cluster index, and what the disk tier stages. The division
//! is fixed at start, so no later event can exceed it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::alloc::{GRANULE, MAX_CAPACITY};
use crate::cluster;
use crate::disk::{DiskOptions, writer_memory_bytes};
use crate::error::{Error, Result};
use crate::index::{Eviction, JOURNAL_BYTES, Limits};
use crate::peer::PeerSettings;
use crate::progress::Progress;

/// Memory one indexed block may take; a test measures that it is enough.
const INDEX_BYTES_PER_BLOCK: u64 = 128;

/// Of the memory: what the cluster index of a store with peers may take.
const CLUSTER_SHARE: u64 = 32;

const MIB: u64 = 1 << 20;

/// How a tier stores blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodecChoice {
    /// As they are.
    None,
    /// Coded on put so that reading them is as fast.
    Fast,
    /// Fast on put, and as small as possible once idle.
    Dense,
    /// Fast where this machine decodes as fast as it copies, else as they are.
    Auto,
}

impl CodecChoice {
    /// The choice a person writes as `name`.
    pub fn from_name(name: &str) -> Result<Self> {
        match name {
            "none" => Ok(Self::None),
            "fast" => Ok(Self::Fast),
            "dense" => Ok(Self::Dense),
            "auto" => Ok(Self::Auto),
            _ => Err(Error::config(
                "codec",
                format!("{name:?} is no codec; choose none, fast, dense or auto"),
            )),
        }
    }
}

/// Settings of one store.
#[derive(Debug, Clone)]
pub struct Options {
    /// Path of the Unix socket; its directory is created with mode 0700 if absent.
    pub socket: PathBuf,
    /// Hard cap: arena, put buffers and index together.
    pub dram_bytes: u64,
    /// Largest put buffer of one client.
    pub ingest_bytes_max: u64,
    /// All put buffers together; None chooses from the two above.
    pub ingest_bytes_total: Option<u64>,
    /// Memory of the index, which bounds the number of blocks; None takes 1/64 of `dram_bytes`.
    pub index_bytes: Option<u64>,
    /// Sessions at once. A client that puts has two.
    pub max_sessions: usize,
    /// Leases one session may hold at once.
    pub max_leases: usize,
    /// Which block goes when there is no room.
    pub eviction: Eviction,
    /// How blocks are stored in DRAM.
    pub codec: CodecChoice,
    /// Share of one core for coding idle blocks again.
    pub transcode_share: f64,
    /// Unused for so long, a block counts as idle.
    pub transcode_idle: Duration,
    /// Other nodes' stores.
    pub peer: PeerSettings,
    /// Most of the arena one tenant may take; None does not limit it.
    pub tenant_bytes: Option<u64>,
    /// Most of the disk one tenant may take; None does not limit it.
    pub tenant_disk_bytes: Option<u64>,
    /// The tier below DRAM; None keeps blocks in DRAM only.
    pub nvme: Option<DiskOptions>,
    /// Where the start tells how far it is.
    pub progress: Arc<Progress>,
}

/// How `dram_bytes` is divided.
pub(super) struct Budget {
    pub(super) arena: u64,
    pub(super) ingest: u64,
    /// Of the cluster index, also while it grows.
    pub(super) cluster: u64,
    pub(super) limits: Limits,
}

impl Options {
    /// Settings for a store of `dram_bytes` on `socket`, everything else at its default.
    pub fn new(socket: impl Into<PathBuf>, dram_bytes: u64) -> Self {
        Self {
            socket: socket.into(),
            dram_bytes,
            ingest_bytes_max: 64 * MIB,
            ingest_bytes_total: None,
            index_bytes: None,
            max_sessions: 128,
            max_leases: 65_536,
            eviction: Eviction::Ours,
            codec: CodecChoice::None,
            transcode_share: 0.1,
            transcode_idle: Duration::from_secs(2),
            peer: PeerSettings::default(),
            tenant_bytes: None,
            tenant_disk_bytes: None,
            nvme: None,
            progress: Arc::default(),
        }
    }

    pub(super) fn budget(&self) -> Result<Budget> {
        if self.max_sessions == 0 || self.max_leases == 0 {
            return Err(Error::config("max_sessions", "sessions and leases must be at least 1"));
        }
        let ingest = self.ingest_bytes_total.unwrap_or_else(|| self.default_ingest());
        let index = self.index_bytes.unwrap_or((self.dram_bytes / 64).max(MIB));
        let max_blocks = index.saturating_sub(JOURNAL_BYTES) / INDEX_BYTES_PER_BLOCK;
        let cluster = self.cluster_bytes(max_blocks);
        let staging =
            self.nvme.as_ref().map_or(0, |disk| writer_memory_bytes(disk, self.dram_bytes));
        let arena = [index, cluster, staging]
            .into_iter()
            .try_fold(ingest, u64::checked_add)
            .and_then(|others| self.dram_bytes.checked_sub(others))
            .map_or(0, |arena| arena / (16 * GRANULE) * (16 * GRANULE));
        if arena < MIB {
            return Err(Error::config(
                "dram_bytes",
                format!(
                    "{} MiB leave no arena beside {} MiB of put buffers and {} MiB of index; \
                     raise it, or lower ingest_bytes_total",
                    self.dram_bytes / MIB,
                    ingest / MIB,
                    index.saturating_add(cluster) / MIB
                ),
            ));
        }
        if arena > MAX_CAPACITY {
            let most = MAX_CAPACITY >> 40;
            return Err(Error::config("dram_bytes", format!("one store holds at most {most} TiB")));
        }
        Ok(Budget {
            arena,
            ingest,
            cluster,
            limits: Limits {
                max_blocks: usize::try_from(max_blocks).unwrap_or(usize::MAX),
                max_leases: self.max_leases,
                tenant_bytes: self.tenant_bytes.unwrap_or(u64::MAX),
                tenant_disk_bytes: self.tenant_disk_bytes.unwrap_or(u64::MAX),
            },
        })
    }

    /// What all nodes hold, as it is told to routers. Without peers that is what this store and the
    /// pools of its replicas hold; with them a share of the memory, unless it was chosen.
    fn cluster_bytes(&self, max_blocks: u64) -> u64 {
        let own = cluster::bytes_for(max_blocks.saturating_mul(2));
        match (self.peer.index_bytes, &self.peer.listen) {
            (Some(chosen), _) => chosen,
            (None, None) => own,
            (None, Some(_)) => own.max((self.dram_bytes / CLUSTER_SHARE).min(cluster::BYTES_MAX)),
        }
    }

    /// An eighth of the memory, more in a small store so that one client gets a whole buffer, and
    /// never more than all sessions could ask for. A session gets half of what is left at most,
    /// hence the factor of two.
    fn default_ingest(&self) -> u64 {
        let one = (2 * self.ingest_bytes_max).min(self.dram_bytes / 4);
        let all = self.ingest_bytes_max.saturating_mul(2 * self.max_sessions as u64);
        (self.dram_bytes / 8).max(one).min(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_add_up_to_the_cap() {
        for mib in [16, 64, 256, 2048, 1 << 18] {
            let options = Options::new("/tmp/s", mib * MIB);
            let budget = options.budget().expect("possible");
            let index = budget.limits.max_blocks as u64 * INDEX_BYTES_PER_BLOCK + JOURNAL_BYTES;
            let total = budget.arena + budget.ingest + budget.cluster + index;
            assert!(total <= mib * MIB && total + 8192 > mib * MIB, "{mib} MiB: {total}");
            assert!(budget.arena >= mib * MIB / 2);
        }
    }

    #[test]
    fn impossible_divisions_name_the_field() {
        let mut options = Options::new("/tmp/s", 8 * MIB);
        options.ingest_bytes_total = Some(8 * MIB);
        let error = options.budget().err().expect("no room");
        assert!(error.to_string().starts_with("dram_bytes: 8 MiB leave no arena"), "{error}");
        assert!(Options::new("/tmp/s", 1 << 50).budget().is_err());
    }
}
