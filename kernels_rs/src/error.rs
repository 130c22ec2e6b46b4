//! What can go wrong before a kernel runs.

/// Why a call was refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// An argument is out of bounds; nothing was computed.
    #[error("{0}")]
    Invalid(String),
    /// The CPU or the operating system lacks an instruction set.
    #[error("{0} is not available on this machine; it has {1}")]
    Unavailable(String, String),
    /// The operating system gave no memory.
    #[error("no memory for {0} bytes: {1}; lower the pool's size")]
    Memory(usize, String),
    /// A kernel thread died; the object cannot be used any more.
    #[error("a kernel thread panicked; load the model again")]
    Panicked,
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// `Err(Invalid)` with a message unless the condition holds.
macro_rules! require {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::Error::Invalid(format!($($message)+)));
        }
    };
}
pub(crate) use require;
