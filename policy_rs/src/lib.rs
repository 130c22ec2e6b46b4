//! Pure decisions of mooncake_serve: which block to evict, which replica to send a request to, and
//! a simulator that runs both against a trace.
//!
//! Nothing here does I/O, reads a clock or draws from an unseeded generator.

pub mod evict;
#[cfg(feature = "python")]
pub mod python;
pub mod route;
pub mod sim;
