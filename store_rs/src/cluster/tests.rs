//! The index against what it should hold: growth, removal, replacement, and readers' runs.

use std::collections::HashSet;

use super::*;
use crate::index::Tier;

fn key(number: u64) -> Key {
    *blake3::hash(&number.to_le_bytes()).as_bytes()
}

fn view(cluster: &Cluster) -> ClusterView {
    let (fd, bytes) = cluster.fd();
    ClusterView::open(fd.try_clone_to_owned().expect("an fd"), bytes).expect("maps")
}

fn runs(cluster: &Cluster, keys: &[Key]) -> (Vec<NodeRun>, u32) {
    let mut runs = Runs::default();
    view(cluster).runs(keys, &mut runs);
    runs.nodes.sort_by_key(|run| run.node);
    (runs.nodes, runs.cluster)
}

fn apply(cluster: &mut Cluster, node: u16, numbers: impl IntoIterator<Item = u64>, tier: Tier) {
    let entries: Vec<_> = numbers.into_iter().map(|n| Entry::new(&key(n), tier)).collect();
    cluster.apply(node, &entries, 0).expect("applies");
}

#[test]
fn runs_are_counted_by_node_tier_and_over_all() {
    let mut cluster = Cluster::new("a", BYTES_MAX).expect("memory");
    let (b, c) = (cluster.join("b").expect("room"), cluster.join("c").expect("room"));
    let keys: Vec<_> = (0..6).map(key).collect();
    apply(&mut cluster, OURS, 0..2, Tier::Dram);
    apply(&mut cluster, b, [0], Tier::Dram);
    apply(&mut cluster, b, 1..4, Tier::Nvme);
    apply(&mut cluster, c, [0, 4], Tier::Dram);
    let run = |node, dram, nvme| NodeRun { node, dram, nvme };
    let (nodes, all) = runs(&cluster, &keys);
    assert_eq!(nodes, [run(OURS, 2, 2), run(b, 1, 4), run(c, 1, 1)]);
    assert_eq!(all, 5);
    assert_eq!(cluster.source(&key(1)), Some(b));
    assert_eq!(cluster.source(&key(4)), Some(c));
    assert_eq!(cluster.source(&key(5)), None);

    cluster.leave(b);
    let (nodes, all) = runs(&cluster, &keys);
    assert_eq!((nodes, all), (vec![run(OURS, 2, 2), run(c, 1, 1)], 2));
    apply(&mut cluster, c, [0], Tier::Gone);
    assert_eq!(runs(&cluster, &keys), (vec![run(OURS, 2, 2)], 2));
}

#[test]
fn a_million_entries_come_move_and_go() {
    let mut cluster = Cluster::new("a", BYTES_MAX).expect("memory");
    let node = cluster.join("b").expect("room");
    let before = view(&cluster);
    let count = 1_000_000;
    apply(&mut cluster, node, 0..count, Tier::Dram);
    assert!(before.moved(), "the first table was too small");
    assert_eq!(view(&cluster).entries(), count);
    let values = cluster.values();
    let bytes = values.iter().find(|(name, _)| *name == "cluster_bytes").expect("there").1;
    assert!(bytes <= 24 * count, "{} bytes an entry", bytes / count);
    for number in (0..count).step_by(9973) {
        assert_eq!(runs(&cluster, &[key(number)]).1, 1, "{number}");
        assert_eq!(runs(&cluster, &[key(count + number)]).1, 0);
    }
    apply(&mut cluster, node, (0..count).filter(|n| n % 2 == 0), Tier::Gone);
    let held: HashSet<u64> = (0..2000).filter(|n| runs(&cluster, &[key(*n)]).1 == 1).collect();
    assert_eq!(held, (0..2000).filter(|n| n % 2 == 1).collect());
    cluster.leave(node);
    assert_eq!(view(&cluster).entries(), 0);
}

#[test]
fn a_full_index_replaces_old_remote_entries_and_keeps_its_own() {
    let mut cluster = Cluster::new("a", 1 << 20).expect("memory");
    let node = cluster.join("b").expect("room");
    apply(&mut cluster, OURS, 0..1000, Tier::Dram);
    apply(&mut cluster, node, 1000..100_000, Tier::Dram);
    assert!(cluster.values().iter().any(|(name, n)| *name == "cluster_bytes" && *n <= 1 << 20));
    let kept = (0..1000).filter(|n| runs(&cluster, &[key(*n)]).1 == 1).count();
    assert_eq!(kept, 1000);
    let replaced = cluster.values().into_iter().find(|(name, _)| *name == "cluster_replaced");
    assert!(replaced.is_some_and(|(_, n)| n > 0));
}

#[test]
fn replicas_report_and_go_with_their_node() {
    let mut cluster = Cluster::new("a", BYTES_MAX).expect("memory");
    let node = cluster.join("b").expect("room");
    let load = |name: &str, tokens| Load {
        name: name.into(),
        prefill_tokens: tokens,
        accepting: true,
        ..Load::default()
    };
    cluster.report(OURS, load("near", 5), 10);
    cluster.report(node, load("far", 7), 11);
    cluster.report(node, load("far", 8), 12);
    let rows = view(&cluster).replicas();
    let said: Vec<_> =
        rows.iter().map(|(_, row)| (&*row.load.name, row.load.prefill_tokens)).collect();
    assert_eq!(said, [("near", 5), ("far", 8)]);
    assert_eq!(cluster.loads(OURS, 0), (vec![load("near", 5)], 10));
    assert_eq!(cluster.loads(OURS, 10), (vec![], 10));
    cluster.leave(node);
    assert_eq!(view(&cluster).replicas().len(), 1);
    cluster.report(OURS, Load { accepting: false, ..load("near", 0) }, 13);
    assert!(view(&cluster).replicas().is_empty());
    cluster.report(OURS, load("near", 5), 20);
    cluster.drop_silent(20 + SILENT_US);
    assert_eq!(view(&cluster).replicas().len(), 1);
    cluster.drop_silent(21 + SILENT_US);
    assert!(view(&cluster).replicas().is_empty(), "killed: nobody took its row away");
}
