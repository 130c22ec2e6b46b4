//! Lossless coding of KV blocks, without I/O.
//!
//! A block is coded into a [container](Header): a header with the shape and a table of planes,
//! then each plane's bytes. Planes (one per layer and K or V) decode independently, each under a
//! checksum of its raw bytes. Whatever bytes are given to a decoder, it answers with the block or
//! with a [`CodecError`]: it never panics, never reads out of bounds, and allocates nothing that the
//! input's own length does not bound.

mod checksum;
mod container;
mod error;
mod shape;

pub use checksum::{checksum, copy_checksum};
pub use container::{
    Header, Plane, decode_into, decode_plane_into, encode_raw, header_len, max_encoded_len, verify,
};
pub use error::CodecError;
pub use shape::{Codec, Dtype, Shape};
