//! The log's file: direct I/O where the file system has it, else buffered. Where it cannot reserve
//! space either, zeros are written, which takes the space as well, only slower.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;

use super::{Io, is_passing};
use crate::disk::buffer::Buffer;
use crate::log::PAGE;

/// Times a transfer is tried again without any progress before it is given up.
const RETRIES: u32 = 100;
/// Zeros written at once.
const ZEROS: usize = 1 << 20;

pub(in crate::disk) struct LogFile {
    file: File,
    direct: bool,
}

impl LogFile {
    /// Open or create the file, readable by us alone.
    pub(in crate::disk) fn open(path: &Path) -> io::Result<Self> {
        let open = |flags| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            options.mode(0o600).custom_flags(flags).open(path)
        };
        match open(libc::O_DIRECT) {
            Ok(file) => Ok(Self { file, direct: true }),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Ok(Self { file: open(0)?, direct: false })
            }
            Err(error) => Err(error),
        }
    }

    /// Whether transfers bypass the page cache.
    pub(in crate::disk) fn is_direct(&self) -> bool {
        self.direct
    }

    /// Bytes of the file.
    pub(in crate::disk) fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Cut the file.
    pub(in crate::disk) fn truncate(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    pub(in crate::disk) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Io for LogFile {
    fn read_at(&self, offset: u64, target: &mut [u8]) -> io::Result<()> {
        let len = target.len();
        transfer(len, |done| match self.file.read_at(&mut target[done..], offset + done as u64) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            other => other,
        })
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        transfer(bytes.len(), |done| {
            match self.file.write_at(&bytes[done..], offset + done as u64) {
                Ok(0) => Err(io::ErrorKind::WriteZero.into()),
                other => other,
            }
        })
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        match fallocate(&self.file, FallocateFlags::empty(), offset, len) {
            Err(Errno::OPNOTSUPP) => zero(self, offset, len),
            other => Ok(other?),
        }
    }
}

/// Take the space by writing it.
fn zero(io: &dyn Io, offset: u64, len: u64) -> io::Result<()> {
    let zeros = Buffer::new(ZEROS);
    let end = offset + len;
    for at in (offset..end).step_by(ZEROS) {
        io.write_at(at, &zeros[..ZEROS.min((end - at) as usize)])?;
    }
    Ok(())
}

/// Call `some` until `len` bytes went, from where the last call stopped.
fn transfer(len: usize, mut some: impl FnMut(usize) -> io::Result<usize>) -> io::Result<()> {
    let (mut done, mut idle) = (0, 0);
    while done < len {
        match some(done) {
            // Direct I/O goes on at a page only; what came of the next one is read again.
            Ok(more) => (done, idle) = (next_start(done + more, len), 0),
            Err(error) if is_passing(&error) && idle < RETRIES => idle += 1,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Where a transfer of `len` bytes goes on after `done` of them.
pub(super) fn next_start(done: usize, len: usize) -> usize {
    if done == len { len } else { done / PAGE * PAGE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_that_cannot_be_reserved_is_taken_by_zeros() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = LogFile::open(&dir.path().join("log")).expect("opens");
        let len = 2 * ZEROS as u64 + PAGE as u64;
        zero(&file, PAGE as u64, len).expect("room");
        let meta = file.file.metadata().expect("stat");
        assert_eq!(meta.len(), PAGE as u64 + len);
        assert!(std::os::unix::fs::MetadataExt::blocks(&meta) * 512 >= len);
    }

    #[test]
    fn short_transfers_and_storms_end_whole_or_in_an_error() {
        let mut starts = Vec::new();
        let whole = transfer(3 * PAGE, |done| {
            starts.push(done);
            match starts.len() {
                1 => Ok(PAGE + 100),
                2 | 3 => Err(io::ErrorKind::Interrupted.into()),
                4 => Err(io::ErrorKind::WouldBlock.into()),
                _ => Ok(3 * PAGE - done),
            }
        });
        assert!(whole.is_ok());
        assert_eq!(starts, [0, PAGE, PAGE, PAGE, PAGE]);
        let storm = transfer(PAGE, |_| Err(io::ErrorKind::Interrupted.into()));
        assert_eq!(storm.map_err(|error| error.kind()), Err(io::ErrorKind::Interrupted));
        let broken = transfer(PAGE, |_| Err(io::Error::from_raw_os_error(libc::EIO)));
        assert_eq!(broken.map_err(|error| error.raw_os_error()), Err(Some(libc::EIO)));
    }
}
