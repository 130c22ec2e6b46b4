//! The node-local KV-cache store.
//!
//! Pure state machines first, I/O around them, Python last; each layer uses only those above it:
//!
//! ```text
//! error, key      one error type; chained BLAKE3 keys
//! latency         histograms of durations
//! progress        how far a start is
//! alloc, index    extents of the arena; key tree, leases, eviction, accounting
//! log             records on disk, segments, what makes room there
//! wire            bounded, versioned frames
//! block           a block's container in the arena: the codec's format, verified reads
//! arena, memory   sealed shared memory; what the machine can give
//! peer, cluster   links between stores; what all nodes hold, in shared memory
//! server, disk    sessions on threads; the tier below DRAM, on threads of its own
//! client          blocking calls with deadlines
//! route           which replica a request goes to, over that index
//! python          the PyO3 face of all of it
//! ```

pub mod alloc;
pub mod arena;
pub mod block;
pub mod client;
pub mod cluster;
pub mod disk;
pub mod error;
mod fdpass;
pub mod index;
pub mod key;
pub mod latency;
pub mod log;
pub mod memory;
pub mod peer;
pub mod progress;
#[cfg(feature = "python")]
mod python;
pub mod route;
pub mod server;
pub mod wire;
mod written;
