//! How much memory this process may still take: the machine's free memory and its cgroup's room.
//!
//! Pages of a memfd count against the cgroup of whoever touches them first, and going over the
//! limit means the OOM killer, not an error. So the store compares before it reserves.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Room that stays free for everything else in the process.
const HEADROOM: u64 = 64 << 20;

/// Fail unless `bytes` can be reserved here, naming the limit that is in the way.
pub fn check_fits(field: &'static str, bytes: u64) -> Result<()> {
    let Some((room, limit)) = room() else { return Ok(()) };
    if bytes.saturating_add(HEADROOM) <= room {
        return Ok(());
    }
    Err(Error::config(
        field,
        format!(
            "wants {} MiB but {limit} leaves {} MiB; lower it, or give the machine or container \
             more memory",
            bytes >> 20,
            room.saturating_sub(HEADROOM) >> 20
        ),
    ))
}

/// The tightest limit: bytes it leaves, and its name. None if the kernel tells nothing.
pub fn room() -> Option<(u64, String)> {
    let machine = mem_available().map(|room| (room, "MemAvailable".to_owned()));
    let groups = cgroup_dirs().into_iter().filter_map(|dir| group_room(&dir));
    machine.into_iter().chain(groups).min_by_key(|(room, _)| *room)
}

/// Bytes of this process's own memory, shared mappings such as the arena left out; 0 if the kernel
/// does not tell.
pub fn private_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

fn mem_available() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// Directories of this process's memory cgroup and its ancestors, versions 1 and 2.
fn cgroup_dirs() -> Vec<PathBuf> {
    let Ok(text) = fs::read_to_string("/proc/self/cgroup") else { return Vec::new() };
    let mut dirs = Vec::new();
    for line in text.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let root = match controllers {
            "" => Path::new("/sys/fs/cgroup"),
            list if list.split(',').any(|name| name == "memory") => {
                Path::new("/sys/fs/cgroup/memory")
            }
            _ => continue,
        };
        let own = root.join(path.trim_start_matches('/'));
        dirs.extend(own.ancestors().take_while(|dir| dir.starts_with(root)).map(Path::to_owned));
    }
    dirs
}

/// What one cgroup leaves: limit - (use - page cache that can be dropped). None if unlimited.
fn group_room(dir: &Path) -> Option<(u64, String)> {
    let (limit_file, usage_file) = if dir.join("memory.max").exists() {
        ("memory.max", "memory.current")
    } else {
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
    };
    let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
    let limit = number(limit_file)?;
    let usage = number(usage_file)?;
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let cache = stat.lines().find_map(|line| line.strip_prefix("inactive_file "));
    let cache = cache.and_then(|bytes| bytes.parse::<u64>().ok()).unwrap_or(0);
    let room = limit.saturating_sub(usage.saturating_sub(cache));
    Some((room, dir.join(limit_file).display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impossible_size_names_the_field_and_the_limit() {
        let error = check_fits("dram_bytes", 1 << 60).expect_err("no machine has an exabyte");
        assert!(error.to_string().starts_with("dram_bytes: wants"), "{error}");
        assert!(error.message().contains("lower it"), "{error}");
        check_fits("dram_bytes", 1 << 20).expect("a mebibyte fits");
    }

    #[test]
    fn a_cgroup_counts_its_droppable_cache_as_room() {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).expect("write");
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        write("memory.stat", "anon 1\ninactive_file 300\n");
        assert_eq!(group_room(dir.path()).map(|(room, _)| room), Some(600));
        write("memory.max", "max\n");
        assert_eq!(group_room(dir.path()), None);
    }
}
