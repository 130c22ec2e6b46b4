//! Connections between stores: who may connect, and what the two sides say.
//!
//! Owns everything below the store's own state: a [`Transport`] makes ordered byte streams (TCP is
//! built in, plain or under TLS; tests bring their own), `auth` proves both ends, `frames` is the
//! conversation, `pace` bounds the rate. A stream that fails in any way is cut and made anew: no
//! error here reaches a client of the store, whose blocks are then misses.

mod auth;
mod fabric;
mod frames;
mod link;
mod pace;
mod settings;
mod staging;
mod tcp;
mod tls;

pub(crate) use auth::{Secret, greet_client, greet_server};
pub use fabric::Fabric;
pub(crate) use frames::{
    BlockHead, ENTRY_BYTES, FETCH_MAX, FETCHES_MAX, FrameReader, Message, decode_entry,
    encode_entry, encode_message, send_message,
};
pub use link::{Accepting, Cutter, Link, Transport};
pub(crate) use link::{read_exact, write_all, write_all_of_block};
pub(crate) use pace::Pacer;
pub use settings::{PeerSettings, TlsFiles};
pub use staging::Engine;
pub use tcp::Tcp;

/// Whether these bytes are something that a store says to another.
pub fn is_message(op: u8, payload: &[u8]) -> bool {
    Message::decode(op, payload).is_ok()
}
