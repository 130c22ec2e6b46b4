//! Stores that meet over loopback: `proof` who may, `hostile` what becomes of those that misbehave,
//! `fabric` blocks over a transfer engine.

mod fabric;
mod hostile;
mod proof;

use std::time::Duration;

use super::*;
use crate::client::{Client, Deadline, PutBlock};
use crate::cluster::Runs;
use crate::peer::Tcp;
use crate::server::{Options, Server};
use crate::wire::{BlockShape, PutStatus};

const SHAPE: BlockShape = BlockShape { dtype: 1, planes: 6, tokens: 64, channels: 128 };
const RAW: usize = 6 * 64 * 128 * 2;
const SOON: Duration = Duration::from_secs(20);

struct Node {
    server: Server,
    client: Client,
    _dir: tempfile::TempDir,
}

fn soon() -> Deadline {
    Deadline::after(SOON)
}

fn settings(name: &str) -> PeerSettings {
    PeerSettings {
        node: name.into(),
        listen: Some("127.0.0.1:0".into()),
        token: Some(b"secret".to_vec()),
        ..PeerSettings::default()
    }
}

fn node_over(settings: PeerSettings, transport: Option<Box<dyn Transport>>) -> Result<Node> {
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("private/store.sock");
    let mut options = Options::new(&socket, 32 << 20);
    options.peer = settings;
    let transport = match transport {
        Some(transport) => transport,
        None => Box::new(Tcp::new(&options.peer)?),
    };
    let server = Server::start_over(options, Vec::new(), transport)?;
    let client = Client::connect(&socket, 4 << 20, false, SOON)?;
    Ok(Node { server, client, _dir: dir })
}

fn node(name: &str) -> Node {
    node_over(settings(name), None).expect("starts")
}

impl Node {
    fn address(&self) -> String {
        self.server.peer_address().expect("it listens").to_owned()
    }

    fn meet(&self, others: &[&Node]) {
        let addresses: Vec<_> = others.iter().map(|other| other.address()).collect();
        self.server.set_peers(&addresses).expect("peers");
    }

    fn put(&self, keys: &[Key]) {
        let bodies: Vec<_> = keys.iter().map(block).collect();
        let parents = std::iter::once(None).chain(keys.iter().map(|key| Some(*key)));
        let blocks: Vec<_> = keys
            .iter()
            .zip(parents)
            .zip(&bodies)
            .map(|((key, parent), bytes)| PutBlock { key: *key, parent, bytes })
            .collect();
        let put = self.client.put(&blocks, SHAPE, "", soon()).expect("puts");
        assert!(put.iter().all(|status| *status == PutStatus::Stored), "{put:?}");
    }

    fn read(&self, keys: &[Key], within: Duration) -> usize {
        let mut buffers = vec![vec![0; RAW]; keys.len()];
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        let read = self.client.read_into(keys, &mut slices, 1, "", Deadline::after(within));
        let read = read.expect("answers");
        for (key, buffer) in keys.iter().zip(&buffers).take(read) {
            assert!(*buffer == block(key), "wrong bytes");
        }
        read
    }

    fn matches(&self, keys: &[Key]) -> usize {
        self.client.match_prefix(keys, "", soon()).expect("answers")
    }

    fn value(&self, name: &str) -> u64 {
        let stats = self.server.stats().expect("stats");
        let found = stats.values.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| *value).expect("a known name")
    }
}

fn keys(chain: u64, count: u64) -> Vec<Key> {
    let key = |at: u64| *blake3::hash(&[chain.to_le_bytes(), at.to_le_bytes()].concat()).as_bytes();
    (0..count).map(key).collect()
}

fn block(key: &Key) -> Vec<u8> {
    let mut bytes = vec![0; RAW];
    blake3::Hasher::new().update(key).finalize_xof().fill(&mut bytes);
    bytes
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let patience = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < patience, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn blocks_of_a_peer_match_are_fetched_and_stay() {
    let (a, b) = (node("a"), node("b"));
    let chain = keys(1, 40);
    a.put(&chain);
    b.meet(&[&a]);
    until("b knows a's blocks", || b.matches(&chain) == 40);
    assert_eq!(b.read(&chain, SOON), 40);
    assert_eq!((b.value("peer_fetched_blocks"), a.value("peer_sent_blocks")), (40, 40));
    assert_eq!((b.value("blocks"), b.value("reserved_bytes"), a.value("leases")), (40, 0, 0));
    drop(a);
    assert_eq!(b.read(&chain, SOON), 40, "they are b's own now");
}

#[test]
fn evicted_blocks_and_dead_peers_are_forgotten() {
    let (a, b) = (node("a"), node("b"));
    let chain = keys(2, 8);
    b.meet(&[&a]);
    a.put(&chain);
    until("b hears of the put", || b.matches(&chain) == 8);
    a.client.evict(&chain[4..], soon()).expect("evicts");
    until("b hears of the eviction", || b.matches(&chain) == 4);
    drop(a);
    until("b drops what a had", || b.matches(&chain) == 0);
    assert_eq!((b.value("cluster_entries"), b.value("cluster_nodes")), (0, 1));
    assert_eq!(b.read(&chain, SOON), 0);
}

#[test]
fn readers_see_the_cluster_and_the_loads_of_both_nodes() {
    let (a, b) = (node("a"), node("b"));
    let chain = keys(3, 6);
    a.put(&chain);
    b.put(&chain[..2]);
    b.meet(&[&a]);
    let load = Load { name: "r1".into(), prefill_tokens: 77, accepting: true, ..Load::default() };
    a.client.report(&load).expect("reports");
    let view = b.client.cluster(soon()).expect("maps");
    let mut runs = Runs::default();
    until("b sees all of it", || {
        view.runs(&chain, &mut runs);
        runs.cluster == 6 && runs.nodes.len() == 2 && !view.replicas().is_empty()
    });
    let names: HashMap<u16, String> =
        view.nodes().into_iter().map(|(at, row)| (at, row.name)).collect();
    let mut held: Vec<_> = runs.nodes.iter().map(|run| (&*names[&run.node], run.dram)).collect();
    held.sort_unstable();
    assert_eq!(held, [("a", 6), ("b", 2)]);
    assert_eq!(view.replicas()[0].1.load, load);
}

#[test]
fn two_readers_of_one_block_fetch_it_once() {
    let (a, b) = (node("a"), node("b"));
    let chain = keys(4, 32);
    a.put(&chain);
    b.meet(&[&a]);
    until("b knows a's blocks", || b.matches(&chain) == 32);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(b.read(&chain, SOON), 32));
        }
    });
    assert_eq!(a.value("peer_sent_blocks"), 32);
}

#[test]
fn a_full_store_fetches_what_fits_and_stays_accounted() {
    let (a, b) = (node("a"), node("b"));
    let chains: Vec<_> = (100..112).map(|chain| keys(chain, 20)).collect();
    b.meet(&[&a]);
    let mut fetched = 0;
    for chain in &chains {
        a.put(chain);
        until("b hears of the put", || b.matches(&chain[..1]) == 1);
        fetched += b.read(chain, SOON);
    }
    assert!(fetched >= 200, "{fetched} of 240");
    let sum: u64 = ["free_bytes", "reserved_bytes", "resident_bytes", "leased_bytes"]
        .iter()
        .map(|name| b.value(name))
        .sum();
    assert_eq!(sum + b.value("quarantined_bytes"), b.value("capacity_bytes"));
    until("b's leases have ended", || b.value("leased_bytes") + b.value("reserved_bytes") == 0);
}

#[test]
fn a_paced_peer_sends_no_faster() {
    let paced = PeerSettings { max_bytes_per_s: Some(4_000_000), ..settings("a") };
    let (a, b) = (node_over(paced, None).expect("starts"), node("b"));
    let chain = keys(10, 10);
    a.put(&chain);
    b.meet(&[&a]);
    until("b knows a's blocks", || b.matches(&chain) == 10);
    let begun = Instant::now();
    assert_eq!(b.read(&chain, SOON), 10);
    let bytes = a.value("peer_sent_bytes") as f64;
    // Slower is the machine's affair, faster would be ours.
    assert!(bytes / begun.elapsed().as_secs_f64() < 5_000_000.0);
}
