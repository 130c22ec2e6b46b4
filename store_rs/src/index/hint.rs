//! What a caller knows about the next use of its blocks.

use mooncake_policy::evict::Hint as Strength;

use super::Tick;

const SECOND: u64 = 1_000_000;

/// Comes with a match, a lease or a put. Soft: it moves a block's place in the order of eviction and
/// never decides alone; how much it moves is learnt from how often such hints came true.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hint {
    /// -100 (let these go first) to 100 (keep these).
    pub priority: i8,
    /// No request will follow in this conversation.
    pub session_end: bool,
    /// When the blocks will be wanted again; 0 if unknown.
    pub expected_reuse_s: u32,
}

impl Hint {
    /// No opinion.
    pub const NONE: Self = Self { priority: 0, session_end: false, expected_reuse_s: 0 };

    /// In the policy's terms. `stays` is how long blocks stay that nobody uses, if any had to go: a
    /// use expected after that is as good as none.
    pub(super) fn strength(self, stays: Option<Tick>) -> Strength {
        let expected = u64::from(self.expected_reuse_s) * SECOND;
        let reuse = match stays {
            _ if expected == 0 => 0.0,
            Some(stays) if expected > stays => -1.0,
            _ => 1.0,
        };
        let end = if self.session_end { -1.0 } else { 0.0 };
        Strength::new(f32::from(self.priority) / 100.0 + reuse + end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_after_the_block_is_gone_is_no_use() {
        let soon = Hint { expected_reuse_s: 5, ..Hint::NONE };
        assert_eq!(soon.strength(None).strength(), 1.0);
        assert_eq!(soon.strength(Some(6 * SECOND)).strength(), 1.0);
        assert_eq!(soon.strength(Some(4 * SECOND)).strength(), -1.0);
        assert_eq!(Hint { session_end: true, ..Hint::NONE }.strength(None).strength(), -1.0);
        assert_eq!(Hint { priority: 50, ..Hint::NONE }.strength(None).strength(), 0.5);
        assert_eq!(Hint::NONE.strength(Some(0)).strength(), 0.0);
    }
}
