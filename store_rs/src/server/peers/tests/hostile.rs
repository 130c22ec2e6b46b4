//! Links and peers that misbehave: a miss, and nobody else is delayed.

use std::io::{self, IoSlice};
use std::sync::atomic::AtomicU8;

use super::*;
use crate::peer::{Accepting, FETCH_MAX, FETCHES_MAX};

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
fn a_peer_that_does_not_take_its_bytes_is_cut() {
    let a = node("a");
    let chain = keys(11, 64);
    a.put(&chain);
    let (one, other) = chain.split_at(FETCH_MAX);
    let mut link = greeted(&a);
    for keys in [one, other] {
        send_message(&mut *link, &Message::Fetch { keys }).expect("sends");
    }
    until("a sends", || a.value("leases") > 0 && a.value("peer_sent_blocks") > 0);
    until("a gives up, and its leases end", || a.value("leases") == 0);
}

#[test]
fn leases_end_once_the_peer_has_its_bytes() {
    let a = node("a");
    let chain = keys(12, 3);
    a.put(&chain);
    let mut link = greeted(&a);
    send_message(&mut *link, &Message::Fetch { keys: &chain }).expect("sends");
    until("all is sent", || a.value("peer_sent_blocks") == 3);
    assert_eq!(a.value("leases"), 3, "the pages may still be on their way");
    send_message(&mut *link, &Message::Taken).expect("sends");
    until("a lets go", || a.value("leases") == 0);
    send_message(&mut *link, &Message::Taken).expect("sends");
    until("nothing was on its way", || a.value("peer_failures") == 1);
}

#[test]
fn a_peer_that_asks_for_too_much_at_once_is_cut() {
    let a = node("a");
    let chain = keys(13, FETCH_MAX as u64 + 1);
    for (asked, times) in [(&chain[..], 1), (&chain[..1], FETCHES_MAX + 1)] {
        let before = a.value("peer_failures");
        let mut link = greeted(&a);
        for _ in 0..times {
            send_message(&mut *link, &Message::Fetch { keys: asked }).expect("sends");
        }
        until("it was counted", || a.value("peer_failures") > before);
    }
}

/// A peer that a test is, connected to `node`.
fn greeted(node: &Node) -> Box<dyn Link> {
    let tcp = Tcp::new(&settings("b")).expect("settings");
    let mut link = tcp.connect(&node.address(), Instant::now() + SOON).expect("connects");
    greet_server(&mut *link, &Secret::new(Some(b"secret"))).expect("proves itself");
    send_message(&mut *link, &Message::Hello { node: "b", epoch: 1 }).expect("sends");
    link
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
    let mut link = greeted(&a);
    // A frame that announces more than any may hold.
    let head = [0xff, 0xff, 0xff, 0x7f, crate::wire::VERSION, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    link.write(&[IoSlice::new(&head)]).expect("sends");
    until("it was counted", || a.value("peer_failures") > 0);
}
