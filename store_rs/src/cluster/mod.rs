//! The cluster index: which store holds which key in which tier, and how busy each replica is.
//!
//! Owned by each store for its node and written by it alone, into a sealed memfd that the node's
//! processes map read-only ([`ClusterView`]). It is soft state, fed by the stores' streams of
//! changes: a wrong entry costs a miss, never an error. A store whose stream ends is marked dead at
//! once, and its entries are dropped.

mod layout;
mod pools;
mod rows;
mod slot;
mod table;
#[cfg(test)]
mod tests;
mod view;

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use crate::error::{Error, Result};
use crate::index::Entry;
use crate::key::Key;
pub use layout::{NODES_MAX, REPLICAS_MAX};
pub(crate) use pools::PoolPart;
use pools::{POOLS, PoolLog};
pub use rows::{Load, NODE_NAME_MAX, NodeRow, REPLICA_NAME_MAX, Rate, ReplicaRow};
use table::Table;
pub use view::{ClusterView, NodeRun, PoolRun, Runs};

/// Row of the store that owns this index.
pub(crate) const OURS: u16 = 0;

/// Replicas report every second; one that is silent for so long is gone.
const SILENT_US: u64 = 10_000_000;

/// Most memory of a cluster index, unless told otherwise.
pub(crate) const BYTES_MAX: u64 = 256 << 20;

/// Memory of an index of `entries`, also while it grows.
pub(crate) fn bytes_for(entries: u64) -> u64 {
    table::bytes_for(entries)
}

/// The writer.
pub(crate) struct Cluster {
    table: Table,
    nodes: Vec<NodeRow>,
    replicas: HashMap<String, (usize, u16)>,
    spare_replicas: Vec<usize>,
    pools: PoolLog,
}

impl Cluster {
    /// An index that knows its own store, `name`.
    pub(crate) fn new(name: &str, bytes_max: u64) -> Result<Self> {
        let mut cluster = Self {
            table: Table::new(bytes_max)?,
            nodes: Vec::new(),
            replicas: HashMap::new(),
            spare_replicas: Vec::new(),
            pools: PoolLog::default(),
        };
        cluster.join(name)?;
        Ok(cluster)
    }

    /// A store answers: its row, without entries, alive.
    pub(crate) fn join(&mut self, name: &str) -> Result<u16> {
        if name.len() > NODE_NAME_MAX {
            return Err(Error::refused(format!(
                "node name {name:?} is above {NODE_NAME_MAX} bytes"
            )));
        }
        let fresh = NodeRow { name: name.to_owned(), alive: true, ..NodeRow::default() };
        let known = self.nodes.iter().position(|node| node.name == name);
        // A dead store's row is clean: its entries went when it did.
        let dead = || self.nodes.iter().position(|node| !node.alive && self.nodes.len() > 64);
        let at = match known.or_else(dead) {
            Some(at) => {
                let rates = (known.is_some()).then(|| self.nodes[at].clone());
                self.nodes[at] = rates.map_or(fresh, |row| NodeRow { alive: true, ..row });
                at
            }
            None if self.nodes.len() < NODES_MAX => {
                self.nodes.push(fresh);
                self.nodes.len() - 1
            }
            None => {
                return Err(Error::refused(format!("a cluster has at most {NODES_MAX} stores")));
            }
        };
        self.write_node(at);
        Ok(at as u16)
    }

    /// A store's stream ended: nothing it had counts any more.
    pub(crate) fn leave(&mut self, node: u16) {
        self.nodes[node as usize].alive = false;
        self.write_node(node as usize);
        self.table.purge(node);
        let gone: Vec<String> = self
            .replicas
            .iter()
            .filter(|(_, (_, at))| *at == node)
            .map(|(name, _)| name.clone())
            .collect();
        for name in gone {
            self.drop_replica(&name);
        }
    }

    /// Forget what a store had; a snapshot follows.
    pub(crate) fn clear(&mut self, node: u16) {
        self.table.purge(node);
    }

    /// A store's blocks came, moved or went. `now_s` is any clock.
    pub(crate) fn apply(&mut self, node: u16, entries: &[Entry], now_s: u64) -> Result<()> {
        let age = (now_s >> 4) as u16;
        entries.iter().try_for_each(|entry| self.table.set(entry, node, age))
    }

    /// A replica on `node` reports; not accepting takes its row away.
    pub(crate) fn report(&mut self, node: u16, load: Load, at_us: u64) {
        if !load.accepting {
            return self.drop_replica(&load.name);
        }
        let at = match self.replicas.get(&load.name) {
            Some((at, _)) => *at,
            None => {
                let Some(at) = self.spare_replicas.pop().or_else(|| {
                    (self.replicas.len() < REPLICAS_MAX).then_some(self.replicas.len())
                }) else {
                    return;
                };
                at
            }
        };
        self.replicas.insert(load.name.clone(), (at, node));
        self.table.region().replica(at).write(&ReplicaRow { load, node, at_us }.pack());
        self.table.region().header().replicas.fetch_max(at as u64 + 1, Ordering::Release);
    }

    /// Take away the rows of replicas that fell silent, whatever ended them.
    pub(crate) fn drop_silent(&mut self, now_us: u64) {
        let region = self.table.region();
        let silent = |at: usize| {
            let at_us =
                region.replica(at).read().map_or(0, |words| ReplicaRow::unpack(&words).at_us);
            at_us + SILENT_US < now_us
        };
        let gone = self.replicas.iter().filter(|(_, (at, _))| silent(*at));
        for name in gone.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            self.drop_replica(&name);
        }
    }

    /// Loads of the replicas on `node` that were reported after `since_us`, and when the newest was.
    pub(crate) fn loads(&self, node: u16, since_us: u64) -> (Vec<Load>, u64) {
        let here = self.replicas.values().filter(|(_, at)| *at == node);
        let rows = here.filter_map(|(at, _)| self.table.region().replica(*at).read());
        let rows = rows.map(|words| ReplicaRow::unpack(&words));
        let rows: Vec<_> = rows.filter(|row| row.at_us > since_us).collect();
        let newest_us = rows.iter().map(|row| row.at_us).max().unwrap_or(since_us);
        (rows.into_iter().map(|row| row.load).collect(), newest_us)
    }

    /// Blocks came from the store `name`: `bytes` of KV in `seconds`, the first after `latency_s`.
    pub(crate) fn measured(&mut self, name: &str, bytes: u64, seconds: f64, latency_s: f64) {
        const WEIGHT: f64 = 0.2;
        let Some(node) = self.nodes.iter().position(|node| node.name == name) else { return };
        let rate = bytes as f64 / seconds.max(1e-9);
        let blend = |old: f64, new: f64| if old == 0.0 { new } else { old + WEIGHT * (new - old) };
        let blended = |old: Rate| Rate {
            bytes_per_s: blend(old.bytes_per_s, rate),
            latency_s: blend(old.latency_s, latency_s),
        };
        self.nodes[node].from = blended(self.nodes[node].from);
        self.nodes[OURS as usize].fetch = blended(self.nodes[OURS as usize].fetch);
        self.write_node(node);
        self.write_node(OURS as usize);
    }

    /// What fetching costs the store `node`, as it measured.
    pub(crate) fn fetch_rate(&self, node: u16) -> Rate {
        self.nodes[node as usize].fetch
    }

    /// The store `node` says what fetching costs it.
    pub(crate) fn report_rate(&mut self, node: u16, fetch: Rate) {
        self.nodes[node as usize].fetch = fetch;
        self.write_node(node as usize);
    }

    /// The live store to fetch `key` from: in memory rather than on disk, the faster first.
    pub(crate) fn source(&self, key: &Key) -> Option<u16> {
        let mut best: Option<(u8, f64, u16)> = None;
        view::holders(self.table.region(), key, |node, tier| {
            let Some(row) = self.nodes.get(node as usize) else { return };
            let rate = row.from.bytes_per_s;
            let slowness = if rate > 0.0 { 1.0 / rate } else { 0.0 };
            let offer = (tier, slowness, node);
            if node != OURS && row.alive && best.is_none_or(|best| offer < best) {
                best = Some(offer);
            }
        });
        best.map(|(_, _, node)| node)
    }

    /// What to pass to a process of this node, and its size.
    pub(crate) fn fd(&self) -> (BorrowedFd<'_>, u64) {
        (self.table.arena().fd(), self.table.arena().size())
    }

    /// Figures for the store's statistics.
    pub(crate) fn values(&self) -> [(&'static str, u64); 4] {
        let alive = self.nodes.iter().filter(|node| node.alive).count() as u64;
        [
            ("cluster_nodes", alive),
            ("cluster_entries", self.table.entries() as u64),
            ("cluster_bytes", self.table.bytes()),
            ("cluster_replaced", self.table.replaced),
        ]
    }

    fn write_node(&self, at: usize) {
        self.table.region().node(at).write(&self.nodes[at].pack());
        let known = &self.table.region().header().nodes;
        known.fetch_max(at as u64 + 1, Ordering::Release);
    }

    fn drop_replica(&mut self, name: &str) {
        let Some((at, node)) = self.replicas.remove(name) else { return };
        let gone = ReplicaRow { load: Load::default(), node, at_us: 0 };
        self.table.region().replica(at).write(&gone.pack());
        self.table.purge(POOLS | at as u16);
        if node == OURS {
            // Its row may be another's soon.
            self.pools.forget();
        }
        self.spare_replicas.push(at);
    }
}
