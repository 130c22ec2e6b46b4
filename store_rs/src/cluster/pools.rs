//! What the replicas' own pools hold, as entries of the index, and the changes that peers follow.
//!
//! The holder of such an entry is the replica's row, above [`POOLS`]. Only that replica can use the
//! block, so it is no source for anybody else. A replica's reports arrive in order over one
//! connection or it begins anew, and so do followers that fell behind the last [`KEPT`] changes.

use std::collections::VecDeque;

use super::{Cluster, OURS};
use crate::error::Result;
use crate::index::Entry;
use crate::wire::MAX_ITEMS;

/// Holders from here on are replicas.
pub(super) const POOLS: u16 = 1 << 15;
/// Changes kept for followers.
const KEPT: usize = 1 << 14;

/// A part of what is new in one replica's pool.
#[derive(Debug, PartialEq)]
pub(crate) struct PoolPart {
    /// The replica's name.
    pub(crate) replica: String,
    /// What was known of the pool is void.
    pub(crate) anew: bool,
    /// Blocks that came (`Tier::Pool`) or went (`Tier::Gone`).
    pub(crate) entries: Vec<Entry>,
}

/// The last changes of this node's pools, numbered.
#[derive(Default)]
pub(super) struct PoolLog {
    ring: VecDeque<(u16, Entry)>,
    next: u64,
}

impl PoolLog {
    fn record(&mut self, row: u16, entry: Entry) {
        if self.ring.len() == KEPT {
            self.ring.pop_front();
        }
        self.ring.push_back((row, entry));
        self.next += 1;
    }

    /// Every follower begins anew.
    pub(super) fn forget(&mut self) {
        self.ring.clear();
        self.next += 1;
    }

    fn since(&self, from: u64) -> Option<impl Iterator<Item = (u16, Entry)>> {
        let behind = usize::try_from(self.next.checked_sub(from)?).ok()?;
        let seen = self.ring.len().checked_sub(behind)?;
        Some(self.ring.iter().skip(seen).copied())
    }
}

impl Cluster {
    /// The pool of a replica on `node` changed; one that has not reported a load is not known.
    pub(crate) fn report_pool(
        &mut self,
        node: u16,
        replica: &str,
        anew: bool,
        entries: &[Entry],
        now_s: u64,
    ) -> Result<()> {
        let Some(&(row, at)) = self.replicas.get(replica) else { return Ok(()) };
        if at != node {
            return Ok(());
        }
        let (row, age) = (row as u16, (now_s >> 4) as u16);
        if anew {
            self.table.purge(POOLS | row);
            if node == OURS {
                self.pools.forget();
            }
        }
        for entry in entries {
            self.table.set(entry, POOLS | row, age)?;
            if node == OURS {
                self.pools.record(row, *entry);
            }
        }
        Ok(())
    }

    /// What a follower that stands at `from` has yet to hear of this node's pools, and where it
    /// stands then.
    pub(crate) fn pools_since(&self, from: Option<u64>) -> (Vec<PoolPart>, u64) {
        let mut parts: Vec<PoolPart> = Vec::new();
        match from.and_then(|from| self.pools.since(from)) {
            Some(changes) => {
                for (row, entry) in changes {
                    let Some(replica) = self.replica_at(row) else { continue };
                    match parts.last_mut() {
                        Some(part) if part.replica == replica && part.entries.len() < MAX_ITEMS => {
                            part.entries.push(entry);
                        }
                        _ => parts.push(PoolPart {
                            replica: replica.to_owned(),
                            anew: false,
                            entries: vec![entry],
                        }),
                    }
                }
            }
            None => {
                for (replica, (row, _)) in self.replicas.iter().filter(|(_, (_, at))| *at == OURS) {
                    let held = self.table.held_by(POOLS | *row as u16);
                    let mut chunks = held.chunks(MAX_ITEMS).map(<[Entry]>::to_vec);
                    let first = chunks.next().unwrap_or_default();
                    let part = |anew, entries| PoolPart { replica: replica.clone(), anew, entries };
                    parts.push(part(true, first));
                    parts.extend(chunks.map(|entries| part(false, entries)));
                }
            }
        }
        (parts, self.pools.next)
    }

    fn replica_at(&self, row: u16) -> Option<&str> {
        let mut ours = self.replicas.iter().filter(|(_, (_, node))| *node == OURS);
        ours.find(|(_, (at, _))| *at == row as usize).map(|(name, _)| name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{BYTES_MAX, ClusterView, Load, PoolRun, Runs};
    use crate::index::Tier;
    use crate::key::Key;

    fn key(fill: u8) -> Key {
        *blake3::hash(&[fill]).as_bytes()
    }

    fn entries(fills: impl IntoIterator<Item = u8>, tier: Tier) -> Vec<Entry> {
        fills.into_iter().map(|fill| Entry::new(&key(fill), tier)).collect()
    }

    fn load(name: &str) -> Load {
        Load { name: name.into(), accepting: true, ..Load::default() }
    }

    fn pool_runs(cluster: &Cluster, fills: std::ops::Range<u8>) -> (Vec<PoolRun>, u32) {
        let (fd, bytes) = cluster.fd();
        let fd = fd.try_clone_to_owned().expect("an fd");
        let keys: Vec<_> = fills.map(key).collect();
        let mut runs = Runs::default();
        ClusterView::open(fd, bytes).expect("maps").runs(&keys, &mut runs);
        runs.pools.sort_by_key(|run| run.replica);
        (runs.pools, runs.cluster)
    }

    /// What `follower` hears goes into `far`, as node 1.
    fn follow(from: &Cluster, cursor: &mut Option<u64>, far: &mut Cluster) {
        let (parts, next) = from.pools_since(*cursor);
        *cursor = Some(next);
        for PoolPart { replica, anew, entries } in parts {
            far.report_pool(1, &replica, anew, &entries, 0).expect("room");
        }
    }

    #[test]
    fn pools_are_runs_of_their_own_and_no_source() {
        let mut cluster = Cluster::new("a", BYTES_MAX).expect("memory");
        for name in ["r0", "r1"] {
            cluster.report(OURS, load(name), 1);
        }
        cluster.report_pool(OURS, "r0", true, &entries(0..3, Tier::Pool), 0).expect("room");
        cluster.report_pool(OURS, "r1", true, &entries([0, 2], Tier::Pool), 0).expect("room");
        cluster.report_pool(OURS, "who", true, &entries(0..9, Tier::Pool), 0).expect("ignored");
        cluster.apply(OURS, &entries(0..1, Tier::Dram), 0).expect("room");
        let run = |replica, blocks| PoolRun { replica, blocks };
        assert_eq!(pool_runs(&cluster, 0..5), (vec![run(0, 3), run(1, 1)], 1));
        assert_eq!(cluster.source(&key(1)), None);
        cluster.report_pool(OURS, "r0", false, &entries([2], Tier::Gone), 0).expect("room");
        assert_eq!(pool_runs(&cluster, 0..5).0[0], run(0, 2));
        cluster.report(OURS, Load { accepting: false, ..load("r0") }, 2);
        assert_eq!(pool_runs(&cluster, 0..5), (vec![run(1, 1)], 1));
    }

    #[test]
    fn a_follower_hears_everything_whenever_it_comes_and_however_far_it_falls_behind() {
        let mut near = Cluster::new("a", BYTES_MAX).expect("memory");
        let mut far = Cluster::new("b", BYTES_MAX).expect("memory");
        far.join("a").expect("room");
        for cluster_and_node in [(&mut near, OURS), (&mut far, 1)] {
            let (cluster, node) = cluster_and_node;
            cluster.report(node, load("r0"), 1);
        }
        let run = |blocks| vec![PoolRun { replica: 0, blocks }];
        near.report_pool(OURS, "r0", true, &entries(0..2, Tier::Pool), 0).expect("room");
        let mut cursor = None;
        follow(&near, &mut cursor, &mut far);
        assert_eq!(pool_runs(&far, 0..9).0, run(2));
        near.report_pool(OURS, "r0", false, &entries(2..5, Tier::Pool), 0).expect("room");
        follow(&near, &mut cursor, &mut far);
        assert_eq!(pool_runs(&far, 0..9).0, run(5));
        assert_eq!(near.pools_since(cursor).0, []);
        // Begun anew: the follower forgets what it had.
        near.report_pool(OURS, "r0", true, &entries(0..1, Tier::Pool), 0).expect("room");
        follow(&near, &mut cursor, &mut far);
        assert_eq!(pool_runs(&far, 0..9).0, run(1));
        // Too far behind: a snapshot.
        for _ in 0..=KEPT {
            near.report_pool(OURS, "r0", false, &entries(1..2, Tier::Pool), 0).expect("room");
        }
        assert!(near.pools_since(cursor).0[0].anew);
        follow(&near, &mut cursor, &mut far);
        assert_eq!(pool_runs(&far, 0..9).0, run(2));
    }
}
