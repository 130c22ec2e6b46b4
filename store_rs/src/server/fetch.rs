//! Blocks that DRAM lacks: found in the tiers below it and brought into the arena, before a lease
//! is granted.
//!
//! A tier reserves each block's extent like a put does, fills it without any lock and publishes it;
//! until then the block is invisible, and a second session that wants it waits for the first. What
//! has not landed by the deadline is a miss for this lease only: the extent stays reserved until
//! the tier's read has ended, because a device may write to it at any time before that. No failure
//! of a tier is an error here; the block is a miss.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::Shared;
use crate::alloc::ExtentId;
use crate::block;
use crate::error::{Error, Result};
use crate::index::{Hint, Reserve, Tick, Wish};
use crate::key::Key;
use crate::wire::Origin;

/// What a session wants to lease.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    /// Who asks.
    pub(crate) tenant: &'a str,
    /// What is known of the blocks' next use.
    pub(crate) hint: Hint,
    /// Which blocks.
    pub(crate) keys: &'a [Key],
    /// Of no use behind the first that is absent.
    pub(crate) prefix: bool,
    /// When it was asked for; what was used since stays in DRAM.
    pub(crate) since: Tick,
    /// The lease is answered once so many, from the first, have come; the rest may come later.
    pub(crate) enough: usize,
    /// When the lease is answered, whatever is still missing.
    pub(crate) deadline: Instant,
}

/// A place below DRAM that holds blocks.
pub(crate) trait Tier: Send + Sync {
    /// How many of `keys`, from the first, it holds as far as it knows. Answers from memory; blocks
    /// that the index itself places in a tier need not be counted.
    fn holds(&self, keys: &[Key]) -> usize;

    /// Start to bring those of `wanted.keys` that it holds; none of them is in DRAM. Takes a
    /// [`Landing`] for each before it returns, which it does at the deadline at the latest.
    fn fetch(&self, shared: &Arc<Shared>, wanted: &Wanted<'_>);

    /// Where its blocks are. Tiers on other nodes come last.
    fn origin(&self) -> Origin {
        Origin::Nvme
    }
}

/// The extent of a block on its way into the arena; given back on drop unless published.
pub(crate) struct Landing {
    shared: Arc<Shared>,
    extent: ExtentId,
    offset: u64,
    len: usize,
    published: bool,
}

impl Landing {
    /// Room for the `len` bytes of a block's container. None if the block is here or on its way, or
    /// if there is no room for it.
    pub(crate) fn reserve(
        shared: &Arc<Shared>,
        tenant: &str,
        key: &Key,
        parent: Option<&Key>,
        len: u32,
    ) -> Result<Option<Self>> {
        let now = shared.now();
        let wish = Wish { key, parent, bytes: len.into(), tenant, hint: Hint::NONE };
        let reserved = shared.index()?.reserve(&wish, now);
        let Reserve::Granted(extent, offset) = reserved else { return Ok(None) };
        Ok(Some(Self::new(shared, extent, offset, len)))
    }

    /// Of an extent the index reserved.
    pub(crate) fn new(shared: &Arc<Shared>, extent: ExtentId, offset: u64, len: u32) -> Self {
        let (shared, len) = (Arc::clone(shared), len as usize);
        Self { shared, extent, offset, len, published: false }
    }

    /// Where the container goes: `len` bytes that nobody else reads or writes until `publish`.
    pub(crate) fn at(&self) -> *mut u8 {
        self.shared.arena.at(self.offset, self.len)
    }

    /// The container is complete and verified; it stands for a block of `raw` bytes.
    pub(crate) fn publish(mut self, raw: u32) -> Result<()> {
        // SAFETY: an extent reserved for us alone, which nobody writes any more.
        let container = unsafe { std::slice::from_raw_parts(self.at(), self.len) };
        let damaged = |_| Error::refused("a block that came from a lower tier has no header");
        let stored = block::describe(container).map_err(damaged)?;
        debug_assert_eq!(stored.kind.raw, raw);
        self.shared.index()?.land(self.extent, stored);
        self.published = true;
        self.shared.notify_published();
        Ok(())
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if self.published {
            return;
        }
        if let Ok(mut index) = self.shared.index() {
            index.abort(self.extent);
        }
        self.shared.notify_published();
    }
}

/// How many of `keys`, from the first, some tier holds.
pub(super) fn match_prefix(shared: &Shared, keys: &[Key], hint: Hint) -> Result<usize> {
    let now = shared.now();
    let mut matched = shared.index()?.match_prefix(keys, hint, now);
    loop {
        let before = matched;
        for tier in &shared.tiers {
            matched += tier.holds(&keys[matched..]);
        }
        if matched == before || matched == keys.len() {
            return Ok(matched);
        }
        matched += shared.index()?.match_prefix(&keys[matched..], hint, now);
    }
}

/// Bring what `wanted` names into DRAM as far as the tiers hold it and time allows: which keys were
/// not there, nor on their way, each with the tier that was asked last.
pub(super) fn bring(shared: &Arc<Shared>, wanted: &Wanted<'_>) -> Result<HashMap<Key, Origin>> {
    bring_from(shared, &shared.tiers, wanted)
}

/// The same, from this node's own tiers: what is asked on behalf of a peer is not asked of another.
pub(super) fn bring_from_node(shared: &Arc<Shared>, wanted: &Wanted<'_>) -> Result<()> {
    let remote = shared.tiers.iter().position(|tier| tier.origin() == Origin::Peer);
    bring_from(shared, &shared.tiers[..remote.unwrap_or(shared.tiers.len())], wanted)?;
    Ok(())
}

fn bring_from(
    shared: &Arc<Shared>,
    tiers: &[Box<dyn Tier>],
    wanted: &Wanted<'_>,
) -> Result<HashMap<Key, Origin>> {
    let mut brought = HashMap::new();
    if tiers.is_empty() {
        return Ok(brought);
    }
    if shared.index()?.missing(wanted.keys).is_empty() {
        wait_landed(shared, wanted)?;
        return Ok(brought);
    }
    let held = match wanted.prefix {
        true => match_prefix(shared, wanted.keys, Hint::NONE)?,
        false => wanted.keys.len(),
    };
    let within = Wanted { keys: &wanted.keys[..held], ..*wanted };
    for tier in tiers {
        let missing = shared.index()?.missing(within.keys);
        if missing.is_empty() || Instant::now() >= wanted.deadline {
            break;
        }
        tier.fetch(shared, &Wanted { keys: &missing, ..within });
        wait_landed(shared, &within)?;
        brought.extend(missing.into_iter().map(|key| (key, tier.origin())));
    }
    wait_landed(shared, &within)?;
    Ok(brought)
}

/// Wait until none of the first blocks is on its way, or for the deadline.
fn wait_landed(shared: &Shared, wanted: &Wanted<'_>) -> Result<()> {
    let mut index = shared.index()?;
    for key in &wanted.keys[..wanted.enough.min(wanted.keys.len())] {
        while index.is_pending(key) {
            let left = wanted.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            index = shared.wait_published_for(index, left)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::thread;
    use std::time::Duration;

    use mooncake_codec::{Codec, Encoder};

    use super::*;
    use crate::block::Layout;
    use crate::client::{Client, Deadline};
    use crate::server::{Options, Server};
    use crate::wire::BlockShape;

    const SHAPE: BlockShape = BlockShape { dtype: 0, planes: 1, tokens: 1, channels: 3000 };
    const SOON: Duration = Duration::from_secs(20);

    /// Blocks in plain memory, filled in by a thread of their own; a slow one takes two seconds.
    struct Elsewhere {
        blocks: HashMap<Key, Vec<u8>>,
        slow: Option<Key>,
    }

    impl Tier for Elsewhere {
        fn holds(&self, keys: &[Key]) -> usize {
            keys.iter().take_while(|key| self.blocks.contains_key(*key)).count()
        }

        fn fetch(&self, shared: &Arc<Shared>, wanted: &Wanted<'_>) {
            for key in wanted.keys {
                let Some(container) = self.blocks.get(key).cloned() else { continue };
                let len = container.len() as u32;
                let landing = Landing::reserve(shared, wanted.tenant, key, None, len);
                let Some(landing) = landing.expect("an index") else { continue };
                let slow = self.slow == Some(*key);
                thread::spawn(move || {
                    if slow {
                        thread::sleep(Duration::from_secs(2));
                    }
                    // SAFETY: `at` gives as many bytes as were reserved, to us alone.
                    unsafe { landing.at().copy_from(container.as_ptr(), container.len()) };
                    landing.publish(SHAPE.channels).expect("an index");
                });
            }
        }
    }

    fn container(fill: u8) -> Vec<u8> {
        let layout = Layout::new(SHAPE, Codec::None).expect("a shape");
        let raw = vec![fill; layout.raw_bytes()];
        let mut container = vec![0; layout.container_bytes()];
        // SAFETY: `raw` has the size that the layout names.
        unsafe { layout.write(&mut Encoder::new(), raw.as_ptr(), |_| Ok(()), &mut container) }
            .expect("all there")
            .expect("fits");
        container
    }

    #[test]
    fn blocks_of_a_lower_tier_match_and_are_brought_and_a_late_one_ends_the_prefix() {
        let dir = tempfile::tempdir().expect("a directory");
        let socket = dir.path().join("private/store.sock");
        let keys = [[1; 32], [2; 32], [3; 32], [4; 32]];
        let blocks = keys[..3].iter().map(|key| (*key, container(key[0]))).collect();
        let tier = Elsewhere { blocks, slow: Some(keys[2]) };
        let server = Server::start_above(Options::new(&socket, 16 << 20), vec![Box::new(tier)]);
        let _server = server.expect("starts");
        let client = Client::connect(&socket, 0, false, SOON).expect("connects");
        let soon = || Deadline::after(SOON);
        assert_eq!(client.match_prefix(&keys, "", soon()).expect("matches"), 3);
        let mut buffers = vec![vec![0; 3000]; 4];
        let mut slices: Vec<&mut [u8]> = buffers.iter_mut().map(Vec::as_mut_slice).collect();
        let short = Deadline::after(Duration::from_millis(500));
        assert_eq!(client.read_into(&keys, &mut slices, 1, "", short).expect("reads"), 2);
        // The second caller waits for what the first one started.
        assert_eq!(client.read_into(&keys, &mut slices, 1, "", soon()).expect("reads"), 3);
        assert_eq!([buffers[0][9], buffers[1][9], buffers[2][9]], [1, 2, 3]);
        let stats = client.stats(soon()).expect("stats");
        let value = |name: &str| stats.values.iter().find(|(n, _)| n == name).map(|(_, v)| *v);
        assert_eq!((value("blocks"), value("reserved_bytes")), (Some(3), Some(0)));
    }
}
