//! Stores that meet over loopback, and over links that misbehave.

use std::io::{self, IoSlice};
use std::path::PathBuf;
use std::sync::atomic::AtomicU8;
use std::time::Duration;

use super::*;
use crate::client::{Client, Deadline, PutBlock};
use crate::cluster::Runs;
use crate::peer::{Accepting, Tcp, TlsFiles};
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
        let read = self.client.read_into(keys, &mut slices, "", Deadline::after(within));
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
fn another_token_is_refused() {
    let a = node("a");
    let other = PeerSettings { token: Some(b"other".to_vec()), ..settings("b") };
    let b = node_over(other, None).expect("starts");
    let chain = keys(5, 2);
    a.put(&chain);
    b.meet(&[&a]);
    until("b was refused", || b.value("peer_failures") > 1);
    assert_eq!((b.matches(&chain), b.value("peers_connected")), (0, 0));
}

#[test]
fn open_addresses_need_a_token() {
    let open = PeerSettings { listen: Some("0.0.0.0:0".into()), token: None, ..settings("a") };
    let error = node_over(open, None).err().expect("refused");
    assert!(error.to_string().starts_with("store.peer.listen: 0.0.0.0:0 is open"), "{error}");
}

#[test]
fn peers_meet_under_mutual_tls_and_strangers_do_not() {
    let dir = tempfile::tempdir().expect("a directory");
    let files = |name: &str, ca: &str| certify(dir.path(), name, ca);
    let with = |name: &str, ca: &str| PeerSettings {
        tls: Some(files(name, ca)),
        token: None,
        ..settings(name)
    };
    let a = node_over(with("a", "ours"), None).expect("starts");
    let b = node_over(with("b", "ours"), None).expect("starts");
    let stranger = node_over(with("c", "theirs"), None).expect("starts");
    let plain = node("d");
    let chain = keys(6, 20);
    a.put(&chain);
    for other in [&b, &stranger, &plain] {
        other.meet(&[&a]);
    }
    until("b knows a's blocks", || b.matches(&chain) == 20);
    assert_eq!(b.read(&chain, SOON), 20);
    for refused in [&stranger, &plain] {
        until("it was refused", || refused.value("peer_failures") > 0);
        assert_eq!(refused.value("peers_connected"), 0);
    }
}

/// A certificate for `name` by the authority `ca`, which is made if it is new.
fn certify(dir: &std::path::Path, name: &str, ca: &str) -> TlsFiles {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    let file = |name: String, text: &str| -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, text).expect("writes");
        path
    };
    let (ca_file, ca_key) = (dir.join(format!("{ca}.pem")), dir.join(format!("{ca}.key")));
    let mut params = CertificateParams::new(Vec::new()).expect("params");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    if !ca_file.exists() {
        let key = KeyPair::generate().expect("a key");
        let certificate = params.self_signed(&key).expect("signs");
        std::fs::write(&ca_file, certificate.pem()).expect("writes");
        std::fs::write(&ca_key, key.serialize_pem()).expect("writes");
    }
    let key = KeyPair::from_pem(&std::fs::read_to_string(&ca_key).expect("reads")).expect("a key");
    let issuer = Issuer::new(params, key);
    let own = KeyPair::generate().expect("a key");
    let leaf = CertificateParams::new(vec!["mooncake-peer".to_owned()]).expect("params");
    let leaf = leaf.signed_by(&own, &issuer).expect("signs");
    TlsFiles {
        ca: ca_file,
        certificate: file(format!("{name}.pem"), &leaf.pem()),
        key: file(format!("{name}.key"), &own.serialize_pem()),
        name: "mooncake-peer".into(),
    }
}

/// TCP whose incoming bytes can be stopped or damaged once blocks flow.
struct Faulty {
    tcp: Tcp,
    fault: Arc<AtomicU8>,
}

const SOUND: u8 = 0;
const HUNG: u8 = 1;
const DAMAGED: u8 = 2;

struct FaultyLink(Box<dyn Link>, Arc<AtomicU8>);

impl Transport for Faulty {
    fn connect(&self, address: &str, deadline: Instant) -> Result<Box<dyn Link>> {
        let link = self.tcp.connect(address, deadline)?;
        Ok(Box::new(FaultyLink(link, Arc::clone(&self.fault))))
    }

    fn listen(&self) -> Result<Option<Box<dyn Accepting>>> {
        self.tcp.listen()
    }
}

impl Link for FaultyLink {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(into)?;
        match self.1.load(Ordering::Acquire) {
            HUNG => {
                std::thread::sleep(Duration::from_millis(200));
                Err(io::ErrorKind::TimedOut.into())
            }
            // Frames are small; this is a block.
            DAMAGED if into.len() > 10_000 => {
                into[read / 2] ^= 1;
                Ok(read)
            }
            _ => Ok(read),
        }
    }

    fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.write(parts)
    }

    fn set_patience(&mut self, read: Duration, write: Duration) -> io::Result<()> {
        self.0.set_patience(read, write)
    }

    fn cutter(&self) -> io::Result<Cutter> {
        self.0.cutter()
    }
}

fn faulty(name: &str) -> (Node, Arc<AtomicU8>) {
    let fault = Arc::new(AtomicU8::new(SOUND));
    let tcp = Tcp::new(&settings(name)).expect("settings");
    let transport = Box::new(Faulty { tcp, fault: Arc::clone(&fault) });
    (node_over(settings(name), Some(transport)).expect("starts"), fault)
}

#[test]
fn damaged_blocks_are_misses_and_their_sender_is_left_alone() {
    let (a, (b, fault)) = (node("a"), faulty("b"));
    let chain = keys(7, 10);
    a.put(&chain);
    b.meet(&[&a]);
    until("b knows a's blocks", || b.matches(&chain) == 10);
    fault.store(DAMAGED, Ordering::Release);
    assert_eq!(b.read(&chain, SOON), 0);
    assert_eq!(b.value("peer_corrupt_blocks"), 1);
    fault.store(SOUND, Ordering::Release);
    let asked = Instant::now();
    assert_eq!(b.read(&chain, SOON), 0, "not asked again so soon");
    assert!(asked.elapsed() < SOON / 2);
    assert_eq!((b.value("blocks"), b.value("reserved_bytes"), a.value("leases")), (0, 0, 0));
}

#[test]
fn a_hung_peer_is_a_miss_by_the_deadline_and_delays_nobody_else() {
    let (a, c, (b, fault)) = (node("a"), node("c"), faulty("b"));
    let (from_a, from_c) = (keys(8, 4), keys(9, 4));
    a.put(&from_a);
    c.put(&from_c);
    b.meet(&[&a]);
    until("b knows a's blocks", || b.matches(&from_a) == 4);
    fault.store(HUNG, Ordering::Release);
    assert_eq!(b.read(&from_a, Duration::from_millis(300)), 0);
    fault.store(SOUND, Ordering::Release);
    b.meet(&[&a, &c]);
    until("b knows c's blocks", || b.matches(&from_c) == 4);
    assert_eq!(b.read(&from_c, SOON), 4);
    until("b asks a again", || b.matches(&from_a) == 4 && b.read(&from_a, SOON) == 4);
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
    assert_eq!((b.value("reserved_bytes"), b.value("leased_bytes")), (0, 0));
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

#[test]
fn a_peer_that_does_not_take_its_bytes_is_cut() {
    let a = node("a");
    let chain = keys(11, 150);
    a.put(&chain);
    let tcp = Tcp::new(&settings("b")).expect("settings");
    let mut link = tcp.connect(&a.address(), Instant::now() + SOON).expect("connects");
    greet_server(&mut *link, &Secret::new(Some(b"secret"))).expect("proves itself");
    for message in [Message::Hello { node: "b", epoch: 1 }, Message::Fetch { keys: &chain }] {
        send_message(&mut *link, &message).expect("sends");
    }
    until("a sends, and gets stuck", || a.value("leases") > 0 && a.value("peer_sent_blocks") > 0);
    until("a gives up, and its leases end", || a.value("leases") == 0);
    assert!(a.value("peer_sent_blocks") < 150, "the buffers took it all: the test proves nothing");
}

#[test]
fn frames_that_are_not_ours_end_the_connection() {
    let a = node("a");
    let tcp = Tcp::new(&settings("b")).expect("settings");
    for garbage in [&[0xff; 64][..], b"GET / HTTP/1.1\r\n\r\n                                  "] {
        let mut link = tcp.connect(&a.address(), Instant::now() + SOON).expect("connects");
        link.write(&[IoSlice::new(garbage)]).expect("sends");
        let mut answer = [0; 256];
        while link.read(&mut answer).is_ok_and(|read| read > 0) {}
    }
    let mut link = tcp.connect(&a.address(), Instant::now() + SOON).expect("connects");
    greet_server(&mut *link, &Secret::new(Some(b"secret"))).expect("proves itself");
    send_message(&mut *link, &Message::Hello { node: "b", epoch: 1 }).expect("sends");
    // A frame that announces more than any may hold.
    let head = [0xff, 0xff, 0xff, 0x7f, crate::wire::VERSION, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    link.write(&[IoSlice::new(&head)]).expect("sends");
    until("it was counted", || a.value("peer_failures") > 0);
}
