//! A whole store with its tier on this machine's disk.

use std::path::Path;
use std::time::Duration;

use crate::client::{Client, Deadline, PutBlock};
use crate::disk::DiskOptions;
use crate::key::Key;
use crate::server::{Options, Server};
use crate::wire::{BlockShape, PutStatus};

const MIB: u64 = 1 << 20;
const BLOCK: usize = 600_000;
const SHAPE: BlockShape = BlockShape { dtype: 0, planes: 1, tokens: 1, channels: BLOCK as u32 };

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(30))
}

fn start(dir: &Path, no_uring: bool) -> (Server, Client) {
    let socket = dir.join("private/store.sock");
    let mut options = Options::new(&socket, 24 * MIB);
    options.ingest_bytes_max = 2 * MIB;
    let (path, bytes) = (dir.join("nvme"), 64 * MIB);
    let codec = None;
    options.nvme = Some(DiskOptions { path, bytes, write_bytes_per_s: 0, no_uring, codec });
    let server = Server::start(options).expect("starts");
    let client = Client::connect(&socket, MIB, false, Duration::from_secs(30)).expect("connects");
    (server, client)
}

fn keys(blocks: u8) -> Vec<Key> {
    (0..blocks).map(|name| *blake3::hash(&[name]).as_bytes()).collect()
}

fn block(name: u8) -> Vec<u8> {
    (0..BLOCK).map(|at| (at as u8).wrapping_mul(31) ^ name).collect()
}

fn value(server: &Server, name: &str) -> u64 {
    let stats = server.stats().expect("stats");
    stats.values.iter().find(|(other, _)| other == name).map_or(0, |(_, value)| *value)
}

fn put(client: &Client, keys: &[Key]) {
    for (at, key) in keys.iter().enumerate() {
        let bytes = block(at as u8);
        let parent = at.checked_sub(1).map(|above| keys[above]);
        let put = [PutBlock { key: *key, parent, bytes: &bytes }];
        let status = client.put(&put, SHAPE, "t", soon()).expect("puts");
        assert_eq!(status, [PutStatus::Stored]);
    }
}

fn read(client: &Client, keys: &[Key]) -> usize {
    let mut buffers = vec![vec![0; BLOCK]; keys.len()];
    let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
    let read = client.read_into(keys, &mut slices, 1, "t", soon()).expect("reads");
    for (at, buffer) in buffers.iter().take(read).enumerate() {
        assert!(*buffer == block(at as u8), "block {at}");
    }
    read
}

fn blocks_go_down_come_up_and_survive_a_restart(no_uring: bool) {
    let dir = tempfile::tempdir().expect("a directory");
    // More than DRAM holds; less than the disk does.
    let keys = keys(50);
    {
        let (server, client) = start(dir.path(), no_uring);
        put(&client, &keys[..12]);
        assert_eq!(server.drain(Duration::from_secs(30)).expect("drains"), 12);
        for (at, key) in keys.iter().enumerate().skip(12) {
            let bytes = block(at as u8);
            let put = [PutBlock { key: *key, parent: Some(keys[at - 1]), bytes: &bytes }];
            let status = client.put(&put, SHAPE, "t", soon()).expect("puts");
            assert_eq!(status, [PutStatus::Stored], "block {at}");
            server.drain(Duration::from_secs(30)).expect("drains");
        }
        assert_eq!(value(&server, "evicted_for_room"), 0, "all that went is on disk");
        assert_eq!(client.match_prefix(&keys, "t", soon()).expect("matches"), 50);
        assert_eq!(read(&client, &keys), 50);
        assert!(value(&server, "nvme_promoted") > 20);
        assert_eq!(value(&server, "nvme_read_errors"), 0);
        assert_eq!(value(&server, "nvme_io_uring"), u64::from(!no_uring));
    }
    let (server, client) = start(dir.path(), no_uring);
    assert_eq!(value(&server, "nvme_recovered_blocks"), 50);
    assert!(value(&server, "nvme_recovery_read_bytes") < 8 * 32 * 1024, "no block was read");
    assert_eq!(client.evict(&keys[30..31], soon()).expect("evicts"), 1);
    assert_eq!(client.match_prefix(&keys, "t", soon()).expect("matches"), 30);
    assert_eq!(read(&client, &keys), 30);
}

#[test]
fn blocks_survive_a_restart_with_io_uring() {
    blocks_go_down_come_up_and_survive_a_restart(false);
}

#[test]
fn blocks_survive_a_restart_with_threads() {
    blocks_go_down_come_up_and_survive_a_restart(true);
}
