//! The listening socket: one store per path, in a directory only we can enter.
//!
//! Ownership of a path is a flock on `<socket>.lock`, held as long as the listener lives and
//! dropped by the kernel with its process. So a socket file left by a dead store is replaced, and one of a
//! living store never.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;

use crate::error::{Error, Result};

/// Longest path of a Unix socket on Linux.
const MAX_PATH: usize = 107;

pub(super) struct Listener {
    pub(super) socket: UnixListener,
    path: PathBuf,
    _lock: File,
}

impl Listener {
    pub(super) fn bind(path: &Path) -> Result<Self> {
        if path.as_os_str().len() > MAX_PATH {
            return Err(Error::config(
                "socket",
                format!(
                    "{} is longer than {MAX_PATH} bytes; choose a shorter path",
                    path.display()
                ),
            ));
        }
        private_directory(path)?;
        let lock = take_lock(path)?;
        match fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(socket_error(path, "cannot replace", &error));
            }
            _ => {}
        }
        let socket =
            UnixListener::bind(path).map_err(|error| socket_error(path, "cannot bind", &error))?;
        Ok(Self { socket, path: path.to_owned(), _lock: lock })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // While the lock is still held: nobody else can have bound the path yet.
        let _ = fs::remove_file(&self.path);
    }
}

/// The socket's directory: created 0700, or checked to be ours and closed to others.
fn private_directory(path: &Path) -> Result<()> {
    let parent = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let dir = parent.unwrap_or(Path::new("."));
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|error| socket_error(dir, "cannot create", &error))?;
    let meta = fs::metadata(dir).map_err(|error| socket_error(dir, "cannot stat", &error))?;
    if meta.uid() == geteuid().as_raw() && meta.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(Error::config(
        "socket",
        format!(
            "directory {} is open to other users (mode {:o}, uid {}); use one of your own with \
             mode 0700",
            dir.display(),
            meta.mode() & 0o7777,
            meta.uid()
        ),
    ))
}

fn take_lock(path: &Path) -> Result<File> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let name = PathBuf::from(name);
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&name)
        .map_err(|error| socket_error(&name, "cannot open", &error))?;
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut owner = String::new();
        // The pid is a courtesy; without it the message still says what to do.
        let _ = file.read_to_string(&mut owner);
        return Err(Error::config(
            "socket",
            format!(
                "a store (pid {}) already serves {}; stop it, or choose another socket",
                owner.trim(),
                path.display()
            ),
        ));
    }
    file.set_len(0)
        .and_then(|()| write!(file, "{}", std::process::id()))
        .map_err(|error| socket_error(&name, "cannot write", &error))?;
    Ok(file)
}

fn socket_error(path: &Path, what: &str, error: &std::io::Error) -> Error {
    Error::config("socket", format!("{what} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn one_store_per_socket_and_a_stale_file_is_replaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("private/store.sock");
        let first = Listener::bind(&path).expect("free");
        let error = Listener::bind(&path).err().expect("taken");
        assert!(error.message().contains(&format!("pid {}", std::process::id())), "{error}");
        drop(first);
        fs::write(&path, "stale").expect("write");
        Listener::bind(&path).expect("replaces what a dead store left");
    }

    #[test]
    fn a_shared_directory_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
        let error = Listener::bind(&dir.path().join("s")).err().expect("open to others");
        assert!(error.message().contains("mode 0700"), "{error}");
    }
}
