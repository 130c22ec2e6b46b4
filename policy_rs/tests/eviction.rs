//! Every eviction policy against a naive model of the same cache.
//!
//! The model knows which blocks are resident, who their parents are and who is pinned; it checks
//! that victims are unpinned leaves, that no handle is shared, and, for LRU, which block it is.

use std::collections::HashMap;

use mooncake_policy::evict::{BlockId, EvictionPolicy, Hint, PolicyKind, Touch};
use proptest::prelude::*;

const CAPACITY: usize = 12;
const KINDS: [PolicyKind; 4] =
    [PolicyKind::Ours, PolicyKind::Lru, PolicyKind::Arc, PolicyKind::S3Fifo];

#[derive(Clone, Debug)]
enum Step {
    /// A request for the first `length` blocks of conversation `chain`.
    Request {
        chain: u64,
        length: u64,
        hint: i8,
    },
    Pin {
        pick: usize,
    },
    Unpin {
        pick: usize,
    },
    Drop {
        pick: usize,
    },
    Copied {
        pick: usize,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..8u64, 1..6u64, -1..2i8)
            .prop_map(|(chain, length, hint)| Step::Request { chain, length, hint }),
        1 => any::<usize>().prop_map(|pick| Step::Pin { pick }),
        1 => any::<usize>().prop_map(|pick| Step::Unpin { pick }),
        1 => any::<usize>().prop_map(|pick| Step::Drop { pick }),
        1 => any::<usize>().prop_map(|pick| Step::Copied { pick }),
    ];
    proptest::collection::vec(step, 1..200)
}

#[derive(Debug)]
struct Block {
    id: BlockId,
    parent: Option<u64>,
    used: u64,
    pins: u32,
}

struct Model {
    kind: PolicyKind,
    policy: Box<dyn EvictionPolicy>,
    blocks: HashMap<u64, Block>,
    now: u64,
}

impl Model {
    fn new(kind: PolicyKind) -> Self {
        Self { kind, policy: kind.build(CAPACITY), blocks: HashMap::new(), now: 0 }
    }

    fn pick(&self, pick: usize) -> Option<u64> {
        let mut keys: Vec<u64> = self.blocks.keys().copied().collect();
        keys.sort_unstable();
        (!keys.is_empty()).then(|| keys[pick % keys.len()])
    }

    fn is_leaf(&self, key: u64) -> bool {
        // A dropped parent adopts nobody: its children keep naming it, and stay until evicted.
        !self.blocks.values().any(|block| block.parent == Some(key))
    }

    fn evictable(&self) -> Vec<u64> {
        let free = |(key, block): (&u64, &Block)| (block.pins == 0).then_some(*key);
        self.blocks.iter().filter_map(free).filter(|&key| self.is_leaf(key)).collect()
    }

    fn make_room(&mut self) -> bool {
        while self.policy.len() >= CAPACITY {
            let evictable = self.evictable();
            let Some(victim) = self.policy.victim() else {
                assert!(evictable.is_empty(), "{evictable:?} could have gone");
                return false;
            };
            let found = self.blocks.iter().find(|(_, block)| block.id == victim);
            let key = *found.expect("the victim is resident").0;
            assert!(evictable.contains(&key), "{key} is pinned or has children");
            if self.kind == PolicyKind::Lru {
                let oldest = evictable.iter().min_by_key(|key| self.blocks[key].used);
                assert_eq!(oldest, Some(&key));
            }
            self.policy.remove(victim, key, true);
            self.blocks.remove(&key);
        }
        true
    }

    fn request(&mut self, chain: u64, length: u64, hint: i8) {
        let mut parent: Option<u64> = None;
        for depth in 0..length {
            let key = chain * 100 + depth;
            let partial = depth + 1 == length && chain.is_multiple_of(2);
            let touch = Touch { hint: Hint::new(f32::from(hint)), partial };
            self.now += 1;
            if let Some(block) = self.blocks.get_mut(&key) {
                block.used = self.now;
                self.policy.touch(block.id, touch);
            } else {
                if let Some(parent) = parent {
                    self.pin(parent);
                }
                let room = self.make_room();
                if let Some(parent) = parent {
                    self.unpin(parent);
                }
                if !room {
                    return;
                }
                let id = self.policy.insert(key, parent.map(|key| self.blocks[&key].id), touch);
                let taken = self.blocks.values().any(|block| block.id == id);
                assert!(!taken, "handle {id} was given twice");
                self.blocks.insert(key, Block { id, parent, used: self.now, pins: 0 });
            }
            parent = Some(key);
        }
    }

    fn pin(&mut self, key: u64) {
        let block = self.blocks.get_mut(&key).expect("resident");
        block.pins += 1;
        self.policy.pin(block.id);
    }

    fn unpin(&mut self, key: u64) {
        let block = self.blocks.get_mut(&key).expect("resident");
        block.pins -= 1;
        self.policy.unpin(block.id);
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Request { chain, length, hint } => self.request(chain, length, hint),
            Step::Pin { pick } => self.pick(pick).into_iter().for_each(|key| self.pin(key)),
            Step::Unpin { pick } => {
                let key = self.pick(pick).filter(|key| self.blocks[key].pins > 0);
                key.into_iter().for_each(|key| self.unpin(key));
            }
            Step::Drop { pick } => {
                // Only leaves: the model has no hollow nodes. `holes` covers the others.
                let key = self.pick(pick).filter(|&key| self.evictable().contains(&key));
                if let Some(key) = key {
                    let block = self.blocks.remove(&key).expect("resident");
                    self.policy.remove(block.id, key, false);
                }
            }
            Step::Copied { pick } => {
                if let Some(key) = self.pick(pick) {
                    self.policy.copied(self.blocks[&key].id);
                }
            }
        }
        assert_eq!(self.policy.len(), self.blocks.len());
        assert!(self.policy.len() <= CAPACITY);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn victims_are_unpinned_leaves(steps in steps()) {
        for kind in KINDS {
            let mut model = Model::new(kind);
            for step in &steps {
                model.step(step);
            }
        }
    }
}

#[test]
fn holes_keep_their_handle_until_the_last_child_has_gone() {
    for kind in KINDS {
        let mut policy = kind.build(8);
        let root = policy.insert(1, None, Touch::default());
        let child = policy.insert(2, Some(root), Touch::default());
        policy.remove(root, 1, false);
        assert_eq!(policy.len(), 1);
        let other = policy.insert(3, None, Touch::default());
        assert_ne!(other, root, "{kind:?}: the child still names its parent");
        policy.remove(child, 2, false);
        let reused = [4, 5].map(|key| policy.insert(key, None, Touch::default()));
        assert!(reused.contains(&root) && reused.contains(&child), "{kind:?}");
    }
}

#[test]
fn everything_pinned_means_no_victim() {
    for kind in KINDS {
        let mut policy = kind.build(4);
        let root = policy.insert(1, None, Touch::default());
        let leaf = policy.insert(2, Some(root), Touch::default());
        policy.pin(leaf);
        assert_eq!(policy.victim(), None, "{kind:?}");
        policy.unpin(leaf);
        assert_eq!(policy.victim(), Some(leaf), "{kind:?}");
    }
}

#[test]
fn state_is_small() {
    const BLOCKS: u64 = 100_000;
    for kind in KINDS {
        let mut policy = kind.build(BLOCKS as usize);
        let mut parent = None;
        for key in 0..BLOCKS {
            // Chains of 20 blocks, as long prompts are.
            parent = policy.insert(key, parent.filter(|_| key % 20 != 0), Touch::default()).into();
        }
        let per_block = policy.state_bytes() as f64 / BLOCKS as f64;
        assert!(per_block <= 64.0, "{kind:?}: {per_block} bytes a block, vectors' slack included");
    }
}

#[test]
fn a_hint_that_proved_right_outweighs_recency() {
    let mut policy = PolicyKind::Ours.build(100);
    let hinted = |strength| Touch { hint: Hint::new(strength), partial: false };
    // Sessions hinted good come back twenty touches later, the others never do.
    let mut good = Vec::new();
    for round in 0..2000 {
        good.push(policy.insert(2 * round, None, hinted(1.0)));
        policy.insert(2 * round + 1, None, hinted(-1.0));
        if round >= 10 {
            policy.touch(good[round as usize - 10], hinted(1.0));
        }
    }
    let older = policy.insert(1 << 20, None, hinted(1.0));
    let newer = policy.insert(1 << 21, None, hinted(-1.0));
    let mut left = Vec::new();
    while let Some(victim) = policy.victim() {
        left.push(victim);
        policy.remove(victim, u64::from(victim), false);
    }
    let place = |block| left.iter().position(|&victim| victim == block);
    assert!(place(newer) < place(older), "the older block was hinted to come back");
}
