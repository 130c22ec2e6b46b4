//! CPU kernels whose bits do not depend on how the work was cut.
//!
//! Owns: paged attention and a Llama-family forward pass in C++ units (one for each instruction
//! set), and the Rust that feeds them: memory, bounds, threads, schedule.
//!
//! Invariants:
//! - A token's numbers depend on the tokens before it and on nothing else: not on the batch, the
//!   chunking, the thread count, or which thread computed them.
//! - The C++ trusts its arguments, so every size, offset and index is checked here, first.
//! - No state is shared between models: a process may hold several.
//!
//! Fails with [`Error`], before any kernel runs.

pub mod attention;
mod error;
mod ffi;
mod forward;
mod gate;
mod geometry;
mod isa;
mod loader;
mod memory;
mod model;
mod pool;
#[cfg(feature = "python")]
pub mod python;

pub use error::{Error, Result};
pub use forward::Item;
pub use gate::LayerGate;
pub use geometry::{Dtype, Geometry, Span};
pub use isa::Isa;
pub use loader::Loader;
pub use memory::Buffer;
pub use model::{KvPool, Model, Shape};
pub use pool::{Member, Pool};

/// Digest of the kernels' sources, compiler and flags.
pub const FINGERPRINT: &str = env!("MK_FINGERPRINT");
