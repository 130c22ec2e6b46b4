//! Lossless coding of KV blocks, without I/O.
//!
//! A block is coded into a [container](Header): a header with the shape and a table of planes,
//! then each plane's bytes. Planes (one per layer and K or V) decode independently, each under a
//! checksum of its raw bytes. Whatever bytes are given to a decoder, it answers with the block or
//! with a [`CodecError`]: it never panics, never reads out of bounds, and allocates nothing that the
//! input's own length does not bound.

mod block;
mod checksum;
mod coder;
mod container;
mod dense;
mod error;
mod fast;
mod fields;
mod float;
#[cfg(feature = "zstd")]
mod interchange;
mod isa;
mod masked;
#[cfg(feature = "python")]
pub mod python;
mod shape;

pub use block::{BlockWriter, decode_into, decode_plane_into, encode, encode_raw, verify};
pub use checksum::{checksum, copy_checksum};
pub use coder::{Decoder, Encoder};
pub use container::{Header, Plane, header_len, max_encoded_len};
pub use error::CodecError;
pub use isa::{Isa, limit_isa};
pub use shape::{Codec, Dtype, Shape};
