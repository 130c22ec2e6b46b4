//! What the rows say: a store of the cluster, and the load of a replica.

use super::layout::{NODE_WORDS, REPLICA_WORDS};

/// Longest name of a node: a Ray node id has 56 characters.
pub const NODE_NAME_MAX: usize = 64;
/// Longest name of a replica.
pub const REPLICA_NAME_MAX: usize = 16;

/// A measured transfer; both are 0 before the first.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Rate {
    /// Bytes of KV a second.
    pub bytes_per_s: f64,
    /// Seconds from asking to the first byte.
    pub latency_s: f64,
}

/// One store.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeRow {
    /// The node's name, as every process of the cluster knows it.
    pub name: String,
    /// Its stream is connected; entries of others count for nothing.
    pub alive: bool,
    /// How blocks come from there to this node.
    pub from: Rate,
    /// How blocks come there, from wherever: what it measured itself.
    pub fetch: Rate,
}

/// What a replica says about itself.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Load {
    /// Its name, as the router knows it.
    pub name: String,
    /// Prompt tokens accepted and not yet computed or loaded.
    pub prefill_tokens: u32,
    /// Requests whose prompt has not ended.
    pub waiting: u16,
    /// Requests that decode.
    pub running: u16,
    /// Blocks its pool could still hand out.
    pub free_blocks: u32,
    /// Measured prefill: seconds of any, a token, and a token and token of context.
    pub prefill: [f32; 3],
    /// Measured rate of loads from its node's memory; 0 if none was yet.
    pub load_bytes_per_s: f32,
    /// It takes requests.
    pub accepting: bool,
}

/// A replica's row: its load, where it runs, and when it said so.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicaRow {
    /// What it said.
    pub load: Load,
    /// Row of its node.
    pub node: u16,
    /// `CLOCK_MONOTONIC` of this machine when it arrived, in µs.
    pub at_us: u64,
}

impl Rate {
    fn of(bytes_per_s: u64, latency_s: u64) -> Self {
        Self { bytes_per_s: f64::from_bits(bytes_per_s), latency_s: f64::from_bits(latency_s) }
    }
}

impl NodeRow {
    pub(super) fn pack(&self) -> [u64; NODE_WORDS] {
        let mut words = [0; NODE_WORDS];
        let name = name_bytes::<NODE_NAME_MAX>(&self.name);
        words[0] = u64::from(self.alive) << 8 | self.name.len().min(NODE_NAME_MAX) as u64;
        words[1..5].copy_from_slice(&self.rates().map(f64::to_bits));
        for (word, bytes) in words[5..].iter_mut().zip(name.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        words
    }

    fn rates(&self) -> [f64; 4] {
        let Self { from, fetch, .. } = self;
        [from.bytes_per_s, from.latency_s, fetch.bytes_per_s, fetch.latency_s]
    }

    pub(super) fn is_alive(words: &[u64; NODE_WORDS]) -> bool {
        words[0] >> 8 & 1 == 1
    }

    pub(super) fn unpack(words: &[u64; NODE_WORDS]) -> Self {
        Self {
            name: name_of(&words[5..], words[0] as u8),
            alive: Self::is_alive(words),
            from: Rate::of(words[1], words[2]),
            fetch: Rate::of(words[3], words[4]),
        }
    }
}

impl ReplicaRow {
    pub(super) fn pack(&self) -> [u64; REPLICA_WORDS] {
        let mut words = self.load.pack();
        words[0] |= u64::from(self.node);
        words[1] = self.at_us;
        words
    }

    pub(super) fn unpack(words: &[u64; REPLICA_WORDS]) -> Self {
        Self { load: Load::unpack(words), node: words[0] as u16, at_us: words[1] }
    }
}

impl Load {
    fn pack(&self) -> [u64; REPLICA_WORDS] {
        let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        let name = name_bytes::<REPLICA_NAME_MAX>(&self.name);
        let [fixed, token, attention] = self.prefill.map(f32::to_bits);
        let flags =
            u32::from(self.accepting) << 24 | (self.name.len().min(REPLICA_NAME_MAX) as u32) << 16;
        let requests = u32::from(self.running) << 16 | u32::from(self.waiting);
        let mut words = [0; REPLICA_WORDS];
        words[0] = pair(flags, fixed);
        words[2] = pair(self.prefill_tokens, self.load_bytes_per_s.to_bits());
        words[3] = pair(requests, self.free_blocks);
        words[4] = pair(token, attention);
        for (word, bytes) in words[5..].iter_mut().zip(name.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        words
    }

    fn unpack(words: &[u64; REPLICA_WORDS]) -> Self {
        let high = |word: u64| (word >> 32) as u32;
        let float = |bits: u32| f32::from_bits(bits);
        Self {
            name: name_of(&words[5..], (words[0] >> 16) as u8),
            prefill_tokens: words[2] as u32,
            waiting: words[3] as u16,
            running: (words[3] >> 16) as u16,
            free_blocks: high(words[3]),
            prefill: [high(words[0]), words[4] as u32, high(words[4])].map(float),
            load_bytes_per_s: float(high(words[2])),
            accepting: words[0] >> 24 & 1 == 1,
        }
    }

    /// As it is sent.
    pub(crate) fn encode(&self) -> [u8; 8 * REPLICA_WORDS] {
        let mut bytes = [0; 8 * REPLICA_WORDS];
        for (target, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(self.pack()) {
            *target = word.to_le_bytes();
        }
        bytes
    }

    /// From any bytes; a name that is no text is cut.
    pub(crate) fn decode(bytes: &[u8; 8 * REPLICA_WORDS]) -> Self {
        let mut words = [0; REPLICA_WORDS];
        for (word, source) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*source);
        }
        Self::unpack(&words)
    }
}

fn name_bytes<const N: usize>(name: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let len = name.len().min(N);
    bytes[..len].copy_from_slice(&name.as_bytes()[..len]);
    bytes
}

fn name_of(words: &[u64], len: u8) -> String {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let len = bytes.len().min(len as usize);
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_survive_packing() {
        let from = Rate { bytes_per_s: 1.25e8, latency_s: 2e-4 };
        let fetch = Rate { bytes_per_s: 1e9, latency_s: 1e-3 };
        let node = NodeRow { name: "f".repeat(NODE_NAME_MAX), alive: true, from, fetch };
        assert_eq!(NodeRow::unpack(&node.pack()), node);
        let load = Load {
            name: "a1b2c3d4".into(),
            prefill_tokens: 70_000,
            waiting: 7,
            running: 31,
            free_blocks: 1 << 20,
            prefill: [0.01, 7e-4, 1e-8],
            load_bytes_per_s: 9e9,
            accepting: true,
        };
        let row = ReplicaRow { load: load.clone(), node: 513, at_us: 1 << 40 };
        assert_eq!(ReplicaRow::unpack(&row.pack()), row);
        assert_eq!(Load::decode(&load.encode()), load);
    }
}
