//! How much of a put its client has written: the store copies a block while it is still coming.
//!
//! One word in shared memory, counted by the client only, in bytes from the start of its put buffer.
//! It goes back to 0 before a put is announced, and forward after each part was written; so a store
//! that has been told of a put and then sees a count reads the bytes of that put below it, never
//! those of the put before. A client that lies gets its own block wrong: what it stored is what the
//! checksum was made of. Checked with loom (`make loom`).

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// See the module.
#[repr(transparent)]
pub(crate) struct Written(AtomicU64);

impl Written {
    #[cfg(all(test, loom))]
    fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// The client is about to announce a put, of which nothing is written.
    pub(crate) fn begin(&self) {
        self.0.store(0, Ordering::Release);
    }

    /// The client has written all before `end`.
    pub(crate) fn reached(&self, end: u64) {
        self.0.store(end, Ordering::Release);
    }

    /// The store may read all before this.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

#[cfg(all(test, loom))]
mod tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, Ordering};
    use loom::thread;

    use super::Written;

    const PARTS: u64 = 2;

    struct Buffer {
        written: Written,
        parts: [AtomicU64; PARTS as usize],
    }

    /// What the store does for put number `put`, once it was announced.
    fn follow(buffer: &Buffer, put: u64) {
        let written = buffer.written.bytes();
        for part in &buffer.parts[..written as usize] {
            assert_eq!(part.load(Ordering::Relaxed), put, "a part of another put");
        }
    }

    #[test]
    fn a_part_is_never_read_before_the_clients_bytes_of_it() {
        loom::model(|| {
            let parts = std::array::from_fn(|_| AtomicU64::new(0));
            let buffer = Arc::new(Buffer { written: Written::new(), parts });
            for put in 1..=2 {
                buffer.written.begin();
                // Starting the thread is the request, joining it the answer: each is ordered after
                // what its sender did before, as a socket's bytes are.
                let store = {
                    let buffer = Arc::clone(&buffer);
                    thread::spawn(move || follow(&buffer, put))
                };
                for (part, end) in buffer.parts.iter().zip(1..) {
                    part.store(put, Ordering::Relaxed);
                    buffer.written.reached(end);
                }
                store.join().expect("the store");
            }
        });
    }
}
