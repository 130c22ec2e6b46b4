//! One block on its way in: received into its extent and verified, plane by plane.
//!
//! A plane is checked as soon as its last byte is here, while it is still in the cache. Nothing is
//! visible before the last plane matched.

use std::io;

use crate::block::Arriving;
use crate::error::{Error, Result};
use crate::peer::{Link, read_exact};

/// Bytes taken at once: a share of the cache.
const CHUNK: usize = 256 << 10;

/// What became of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Received {
    /// Complete and verified; it stands for this many bytes.
    Whole(u32),
    /// Complete, but not what its checksums say.
    Corrupt,
}

/// Fill `target` from the link.
pub(super) fn container(link: &mut dyn Link, target: &mut [u8]) -> Result<Received> {
    let failed = |error| Error::io("receive a block", error);
    let mut arriving = Arriving::default();
    let (mut filled, mut sound) = (0, true);
    while filled < target.len() {
        let end = target.len().min(filled + CHUNK);
        match link.read(&mut target[filled..end]) {
            Ok(0) => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
        // After a mismatch the rest is read all the same: the next block follows it.
        sound = sound && arriving.check(target, filled).is_ok();
    }
    let raw = arriving.raw_bytes().filter(|_| sound);
    Ok(raw.map_or(Received::Corrupt, Received::Whole))
}

/// Read `len` bytes and forget them.
pub(super) fn discard(link: &mut dyn Link, len: usize) -> Result<()> {
    let mut scratch = vec![0; len.min(CHUNK)];
    let mut left = len;
    while left > 0 {
        let part = left.min(scratch.len());
        read_exact(link, &mut scratch[..part]).map_err(|error| Error::io("skip a block", error))?;
        left -= part;
    }
    Ok(())
}
