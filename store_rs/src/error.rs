//! The one error type of the crate.
//!
//! Every failure is one of five kinds, mirrors of the Python classes in `mooncake_serve.errors`,
//! and carries a message that ends with what to do next. A miss is not an error.

use std::fmt;
use std::io;

/// Shorthand used throughout the crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, by who has to act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// No store answers: not started, dead, or the connection broke.
    Unavailable,
    /// The store did not answer before the deadline.
    Timeout,
    /// The store is up and said no: a limit, the cap, or a wrong argument.
    Refused,
    /// The two sides speak different versions, or a frame was malformed.
    Protocol,
    /// A setting is wrong; names the field.
    Config(&'static str),
}

/// A failure with its kind and a message for a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

impl Error {
    /// An error of `kind`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { kind, message }
    }

    /// No store answers.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unavailable, message)
    }

    /// The deadline passed.
    pub fn timeout(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Timeout, message)
    }

    /// The store said no.
    pub fn refused(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Refused, message)
    }

    /// A frame or version that cannot be understood.
    pub fn protocol(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Protocol, message)
    }

    /// A wrong setting.
    pub fn config(field: &'static str, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Config(field), message)
    }

    /// A failed system call while doing `what`.
    pub fn io(what: &str, source: impl Into<io::Error>) -> Self {
        let source = source.into();
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                Self::timeout(format!("{what}: no answer before the deadline; is the store hung?"))
            }
            _ => Self::unavailable(format!("{what}: {source}")),
        }
    }

    /// The kind.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The message, without the kind.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Whether the same call may succeed later, unchanged.
    pub fn retry(&self) -> bool {
        matches!(self.kind, ErrorKind::Unavailable | ErrorKind::Timeout)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            ErrorKind::Config(field) => write!(f, "{field}: {}", self.message),
            _ => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for Error {}
