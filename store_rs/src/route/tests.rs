//! Choices over a real index: prefixes, loads, bursts, and replicas that come and go.

use std::os::fd::AsFd;

use super::*;
use crate::cluster::{Cluster, Load as ReplicaLoad, OURS, Rate};

const ASSUMED: Assumed = Assumed { token_s: 1e-3, dram_bytes_per_s: 1e9, peer_bytes_per_s: 1e8 };

struct World {
    cluster: Cluster,
    router: Router,
    far: u16,
}

/// Replicas `a` and `b` on this node, `c` on another.
fn world() -> World {
    let mut cluster = Cluster::new("here", 1 << 22).expect("memory");
    let far = cluster.join("there").expect("room");
    let mut router = Router::new(ASSUMED, None, 7);
    router.set_model(100, 1000.0);
    let running = [("a", "here"), ("b", "here"), ("c", "there")];
    let running = running.map(|(name, node)| (name.to_owned(), node.to_owned()));
    router.set_replicas(&running, 0.0);
    let (fd, bytes) = cluster.fd();
    let fd = fd.as_fd().try_clone_to_owned().expect("an fd");
    router.set_view(Some(ClusterView::open(fd, bytes).expect("maps")));
    World { cluster, router, far }
}

fn keys(count: u8) -> Vec<Key> {
    (1..=count).map(|fill| [fill; 32]).collect()
}

fn hold(cluster: &mut Cluster, node: u16, keys: &[Key]) {
    let entries: Vec<_> =
        keys.iter().map(|key| Entry::new(key, crate::index::Tier::Dram)).collect();
    cluster.apply(node, &entries, 0).expect("room");
}

fn report(cluster: &mut Cluster, node: u16, name: &str, prefill_tokens: u32, at_s: f64) {
    let prefill = [0.0, 2e-3, 0.0];
    let load = ReplicaLoad {
        name: name.into(),
        prefill_tokens,
        prefill,
        accepting: true,
        ..ReplicaLoad::default()
    };
    cluster.report(node, load, (at_s * 1e6) as u64);
}

#[test]
fn the_node_that_holds_the_prefix_wins_until_it_is_busy() {
    let mut world = world();
    hold(&mut world.cluster, world.far, &keys(9));
    let route = world.router.plan(1, 1000, &keys(9), Choice::default(), 1.0).expect("a plan");
    assert_eq!((&*route.replica, route.blocks), ("c", [0, 9, 0, 0]));
    report(&mut world.cluster, world.far, "c", 100_000, 2.0);
    let route = world.router.plan(2, 1000, &keys(9), Choice::default(), 2.0).expect("a plan");
    assert_ne!(route.replica, "c");
    assert_eq!(route.blocks, [0, 0, 0, 9], "fetched from there");
    assert!((world.router.costs().prefill.token_s - 2e-3).abs() < 1e-9, "as measured");
}

#[test]
fn the_replica_whose_pool_holds_the_prefix_wins_on_its_node() {
    let mut world = world();
    hold(&mut world.cluster, OURS, &keys(9));
    report(&mut world.cluster, OURS, "a", 0, 1.0);
    report(&mut world.cluster, OURS, "b", 0, 1.0);
    let pooled: Vec<_> =
        keys(7).iter().map(|key| Entry::new(key, crate::index::Tier::Pool)).collect();
    world.cluster.report_pool(OURS, "b", true, &pooled, 0).expect("room");
    for id in 0..5 {
        let route = world.router.plan(id, 1000, &keys(9), Choice::default(), 1.0).expect("one");
        assert_eq!((&*route.replica, route.blocks), ("b", [7, 2, 0, 0]));
        world.router.end(id);
    }
}

#[test]
fn each_node_pays_its_own_price_for_fetches() {
    let mut world = world();
    let third = world.cluster.join("third").expect("room");
    hold(&mut world.cluster, third, &keys(9));
    let rate = |bytes_per_s| Rate { bytes_per_s, latency_s: 1e-3 };
    world.cluster.report_rate(OURS, rate(1e9));
    world.cluster.report_rate(world.far, rate(1e4));
    let near = world.router.plan(1, 1000, &keys(9), Choice::default(), 1.0).expect("a plan");
    assert_ne!(near.replica, "c");
    assert_eq!(near.blocks, [0, 0, 0, 9]);
    let only = Choice { only: Some("c"), ..Choice::default() };
    let far = world.router.plan(2, 1000, &keys(9), only, 1.0).expect("a plan");
    assert_eq!(far.blocks, [0; 4], "its link is slower than computing");
}

#[test]
fn a_burst_spreads_and_ends_free_the_replicas() {
    let mut world = world();
    let mut chosen: Vec<_> = (0..3)
        .map(|id| world.router.plan(id, 500, &[], Choice::default(), 1.0).expect("one").replica)
        .collect();
    chosen.sort();
    assert_eq!(chosen, ["a", "b", "c"]);
    assert_eq!(world.router.queued_tokens(1.0), 1500);
    (0..3).for_each(|id| world.router.end(id));
    assert_eq!(world.router.queued_tokens(1.0), 0);
}

#[test]
fn silent_replicas_are_judged_by_our_own_requests() {
    let mut world = world();
    let first = world.router.plan(1, 4000, &[], Choice::default(), 1.0).expect("a plan");
    let only = Choice { only: Some(&first.replica), ..Choice::default() };
    let later = world.router.plan(2, 10, &[], only, 3.0).expect("a plan");
    assert!((later.queue_s - 2.0).abs() < 0.01, "4 s of work, 2 s ago: {}", later.queue_s);
    world.router.first_token(1);
    let idle = world.router.plan(3, 10, &[], only, 4.0).expect("a plan");
    assert!(idle.queue_s < 0.1, "{}", idle.queue_s);
}

#[test]
fn gone_and_avoided_replicas_get_nothing() {
    let mut world = world();
    let avoid = ["a".to_owned()];
    let among = Choice { avoid: &avoid, ..Choice::default() };
    world.router.drop_replica("b", 1.0);
    for id in 0..5 {
        let route = world.router.plan(id, 100, &[], among, 1.0).expect("c is left");
        assert_eq!(route.replica, "c");
    }
    world.router.set_replicas(&[], 2.0);
    assert_eq!(world.router.plan(9, 100, &[], Choice::default(), 2.0), Err(f64::INFINITY));
    let running = [("b".to_owned(), "here".to_owned())];
    world.router.set_replicas(&running, 3.0);
    let back = world.router.plan(10, 100, &[], Choice::default(), 3.0).expect("b is back");
    assert_eq!(back.replica, "b");
}

#[test]
fn the_preferred_replica_wins_ties_only() {
    let mut world = world();
    let prefer = Choice { prefer: Some("b"), ..Choice::default() };
    for id in 0..10 {
        let route = world.router.plan(id, 100, &[], prefer, 1.0).expect("a plan");
        assert_eq!(route.replica, "b");
        world.router.end(id);
    }
    hold(&mut world.cluster, world.far, &keys(2));
    let route = world.router.plan(20, 300, &keys(2), prefer, 2.0).expect("a plan");
    assert_eq!(route.replica, "c");
}

#[test]
fn without_a_view_it_still_plans() {
    let mut world = world();
    world.router.set_view(None);
    assert!(world.router.wants_view());
    let route = world.router.plan(1, 300, &keys(2), Choice::default(), 1.0).expect("a plan");
    assert_eq!(route.blocks, [0; 4]);
    assert_eq!(OURS, 0);
}
