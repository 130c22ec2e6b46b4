//! Why a container was not decoded.

/// A container or a call the codec refuses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The bytes are not a container, or one of another version.
    #[error("not a block container of version {}", crate::container::VERSION)]
    NotAContainer,
    /// A length or an offset contradicts the others or the input.
    #[error("damaged container header: {0}")]
    Damaged(&'static str),
    /// The decoded bytes do not match their checksum.
    #[error("plane {0} does not match its checksum")]
    Corrupt(u32),
    /// The caller's buffer has another size than the block.
    #[error("the buffer has {have} bytes, the block needs {want}")]
    WrongSize {
        /// Bytes given.
        have: usize,
        /// Bytes needed.
        want: usize,
    },
    /// The shape is empty or overflows.
    #[error("a block must have 1 byte to 4 GiB in at most 65536 planes")]
    BadShape,
    /// The block has fewer planes, or a writer was given too few.
    #[error("no plane {0} in this block")]
    NoSuchPlane(u32),
    /// A container does not fit into the memory given for it.
    #[error("the container needs more than {0} bytes")]
    NoRoom(usize),
    /// This build cannot decode a plane's codec.
    #[error("unknown codec {0}")]
    UnknownCodec(u8),
}
