//! The directory of the disk tier: who owns it, which store it is, and the log's file.
//!
//! `identity` holds the format, a UUID and the segments' size, as text; a lock on it, which the
//! kernel drops with the process, keeps a second store out. `blocks.log` holds a page of its own
//! for probes and then the segments. Neither the machine nor Ray names it: it is found again
//! wherever the directory is mounted.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{FlockOperation, flock};

use super::io::LogFile;
use crate::error::{Error, Result};
use crate::log::{MAX_SEGMENT, PAGE};

const FORMAT: &str = "mooncake-store-disk 1";
const MIB: u64 = 1 << 20;
/// What the identity, the directories and the file system's own bookkeeping may take of the cap.
const OVERHEAD: u64 = MIB;
/// The log needs one segment to append to, one to give up and one in reserve.
const SEGMENTS_MIN: u64 = 3;
const SEGMENT_MIN: u64 = 4 * MIB;

/// A directory that is ours until it is dropped.
pub(super) struct Directory {
    pub(super) file: Arc<LogFile>,
    #[cfg_attr(not(test), expect(dead_code, reason = "an operator reads it in the file"))]
    pub(super) uuid: String,
    pub(super) segment_bytes: u64,
    /// Segments that fit below the cap.
    pub(super) max_segments: usize,
    /// Segments that have space on disk already.
    pub(super) segments: usize,
    _lock: File,
}

struct Identity {
    uuid: String,
    segment_bytes: u64,
}

impl Directory {
    /// Take the directory, creating it if it is absent; `bytes` is the cap on all it may hold.
    pub(super) fn open(path: &Path, bytes: u64) -> Result<Self> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(|error| wrong(path, "cannot create", &error))?;
        let identity_path = path.join("identity");
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&identity_path)
            .map_err(|error| wrong(&identity_path, "cannot open", &error))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(Error::config(
                "nvme.path",
                format!(
                    "another store uses {}; stop it, or give this one a directory of its own",
                    path.display()
                ),
            ));
        }
        let identity = identity(&mut lock, &identity_path, bytes)?;
        let segment_bytes = identity.segment_bytes;
        let max_segments = bytes.saturating_sub(OVERHEAD) / segment_bytes;
        if max_segments < SEGMENTS_MIN {
            return Err(Error::config(
                "nvme.bytes",
                format!(
                    "{} MiB hold fewer than {SEGMENTS_MIN} segments of {} MiB; raise it{}",
                    bytes / MIB,
                    segment_bytes / MIB,
                    if segment_bytes > SEGMENT_MIN { ", or empty the directory" } else { "" }
                ),
            ));
        }
        let log_path = path.join("blocks.log");
        let failed = |error: std::io::Error| wrong(&log_path, "cannot open", &error);
        let file = LogFile::open(&log_path).map_err(failed)?;
        let len = file.len().map_err(failed)?.saturating_sub(PAGE as u64);
        let segments = (len / segment_bytes).min(max_segments);
        // A lower cap takes effect at once, and so does what a crash left of a segment's begin.
        file.truncate(PAGE as u64 + segments * segment_bytes).map_err(failed)?;
        Ok(Self {
            file: Arc::new(file),
            uuid: identity.uuid,
            segment_bytes,
            max_segments: max_segments as usize,
            segments: segments as usize,
            _lock: lock,
        })
    }
}

/// What the file says, or a new identity written to it.
fn identity(file: &mut File, path: &Path, bytes: u64) -> Result<Identity> {
    let failed = |error: std::io::Error| wrong(path, "cannot use", &error);
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(failed)?;
    if text.is_empty() {
        let segment = (bytes / 8).clamp(SEGMENT_MIN, MAX_SEGMENT) / MIB * MIB;
        let new = Identity { uuid: new_uuid()?, segment_bytes: segment };
        let text = format!("{FORMAT}\nuuid {}\nsegment_bytes {segment}\n", new.uuid);
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
        return Ok(new);
    }
    parse(&text).ok_or_else(|| {
        Error::config(
            "nvme.path",
            format!(
                "{} is not of this version's format ({FORMAT:?}); empty the directory, or choose \
                 another",
                path.display()
            ),
        )
    })
}

fn parse(text: &str) -> Option<Identity> {
    let mut lines = text.lines();
    if lines.next()? != FORMAT {
        return None;
    }
    let uuid = lines.next()?.strip_prefix("uuid ")?.to_owned();
    let segment_bytes: u64 = lines.next()?.strip_prefix("segment_bytes ")?.parse().ok()?;
    let usable = (SEGMENT_MIN..=MAX_SEGMENT).contains(&segment_bytes)
        && segment_bytes.is_multiple_of(PAGE as u64);
    usable.then_some(Identity { uuid, segment_bytes })
}

fn new_uuid() -> Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| Error::io("read /dev/urandom", error))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn wrong(path: &Path, what: &str, error: &std::io::Error) -> Error {
    Error::config("nvme.path", format!("{what} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_owner_and_keeps_its_identity() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("nvme");
        let first = Directory::open(&path, 64 * MIB).expect("free");
        assert_eq!((first.segment_bytes, first.max_segments, first.segments), (8 * MIB, 7, 0));
        let error = Directory::open(&path, 64 * MIB).err().expect("taken");
        assert!(error.to_string().starts_with("nvme.path: another store uses"), "{error}");
        let uuid = first.uuid.clone();
        drop(first);
        let again = Directory::open(&path, 32 * MIB).expect("free again");
        assert_eq!((again.uuid.as_str(), again.segment_bytes), (uuid.as_str(), 8 * MIB));
        assert_eq!(again.max_segments, 3);
    }

    #[test]
    fn what_is_not_ours_or_too_small_is_refused_by_field() {
        let dir = tempfile::tempdir().expect("a directory");
        let error = Directory::open(dir.path(), 12 * MIB).err().expect("too small");
        assert!(error.to_string().starts_with("nvme.bytes: 12 MiB hold fewer"), "{error}");
        std::fs::write(dir.path().join("identity"), "something else\n").expect("write");
        let error = Directory::open(dir.path(), 64 * MIB).err().expect("not ours");
        assert!(error.message().contains("empty the directory"), "{error}");
    }
}
