//! What the past says about the next use of a block: how likely, and after how long.
//!
//! Owns: for every class of blocks, how many entered it and how many were used again, and the mean
//! gap between uses. Counts are halved when they grow old, so a change of workload shows.
//! Invariant: a class without history has the odds of the prior: a block used `n` times has `n`
//! times the odds of a new one, a partial block a fraction of them, everything else is average.

/// What is known about a block when it is touched. Small and dense: 256 classes.
///
/// A block that was used before is classed by how often, a new one by how deep its conversation is
/// and how far behind the matched prefix it lies, either one by the request's hint. Which of these
/// matter is learnt, not assumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Class(u8);

/// Kinds 0 to 13: used 2 to 15 times or more. 16 to 31: new. 32: partial.
const KIND_MASK: u8 = 0x3f;
const USED_MOST: u8 = 13;
const NEW: u8 = 16;
const PARTIAL: u8 = 32;
const POSITIONS: u8 = 4;
const HINT_BAD: u8 = 0x40;
const HINT_GOOD: u8 = 0x80;
/// Weaker hints say nothing.
const HINT_MIN: f32 = 0.25;

impl Class {
    pub(super) fn from_byte(byte: u8) -> Self {
        Self(byte)
    }

    pub(super) fn byte(self) -> u8 {
        self.0
    }

    fn kind(self) -> u8 {
        self.0 & KIND_MASK
    }

    pub(super) fn is_new(self) -> bool {
        self.kind() >= NEW
    }

    /// Used all the time, as a system prompt is.
    fn is_hot(self) -> bool {
        (10..NEW).contains(&self.kind())
    }

    /// What to believe of the class before it has a history, against a new block.
    fn prior_log_odds(self) -> f64 {
        match self.kind() {
            PARTIAL => PARTIAL_LOG_ODDS,
            kind @ ..NEW => f64::from(kind + 2).ln(),
            _ => 0.0,
        }
    }

    /// A block that is not full.
    pub(super) fn partial() -> Self {
        Self(PARTIAL)
    }

    /// The `run`-th new block behind a matched prefix whose last block is of class `matched`, or
    /// behind a new block of class `matched`.
    pub(super) fn new_block(matched: Option<Self>, run: u16) -> Self {
        let turns = match matched.map(Self::kind) {
            None => 0,
            Some(kind @ NEW..) => (kind - NEW) / POSITIONS % 4,
            Some(0) => 1,
            Some(1..4) => 2,
            Some(4..12) => 3,
            // So many uses are a prompt that conversations share: this is a first turn.
            Some(_) => 0,
        };
        let position = match run {
            0..3 => 0,
            3..9 => 1,
            9..25 => 2,
            _ => 3,
        };
        Self(NEW + turns * POSITIONS + position)
    }

    /// The class after one more use.
    pub(super) fn used_again(self) -> Self {
        Self(if self.is_new() { 0 } else { USED_MOST.min(self.kind() + 1) })
    }

    pub(super) fn with_hint(self, strength: f32) -> Self {
        let hint = match strength {
            HINT_MIN.. => HINT_GOOD,
            _ if strength <= -HINT_MIN => HINT_BAD,
            _ => 0,
        };
        Self(self.0 | hint)
    }

    /// The same in place of the hint it has.
    pub(super) fn rehinted(self, strength: f32) -> Self {
        Self(self.kind()).with_hint(strength)
    }
}

/// Entries after which the counts are halved.
const MEMORY: f64 = 200_000.0;
/// Blocks' worth of evidence in the prior. Blocks of one prompt share their fate, so this is no
/// more than a dozen prompts.
const PRIOR: f64 = 200.0;
/// Logarithm of the prior odds of a partial block.
const PARTIAL_LOG_ODDS: f64 = -2.0;
/// Gaps to see before their mean is believed.
const GAPS_MIN: f64 = 100.0;

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    entered: f64,
    reused: f64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct ReuseStats {
    classes: [Tally; 256],
    /// New blocks of all classes: the average that others are compared with.
    new: Tally,
    entered: f64,
    gap_sum: f64,
    gaps: f64,
}

impl ReuseStats {
    pub(super) fn new() -> Self {
        Self {
            classes: [Tally::default(); 256],
            new: Tally::default(),
            entered: 0.0,
            gap_sum: 0.0,
            gaps: 0.0,
        }
    }

    /// A block entered `class`.
    pub(super) fn entered(&mut self, class: Class) {
        self.classes[class.0 as usize].entered += 1.0;
        self.new.entered += f64::from(u8::from(class.is_new()));
        self.entered += 1.0;
        if self.entered > MEMORY {
            self.forget_half();
        }
    }

    /// A block of `class` was used again, `gap` touches after its last use.
    pub(super) fn reused(&mut self, class: Class, gap: u32) {
        self.classes[class.0 as usize].reused += 1.0;
        self.new.reused += f64::from(u8::from(class.is_new()));
        if !class.is_hot() {
            self.gap_sum += f64::from(gap);
            self.gaps += 1.0;
        }
    }

    /// Mean touches between two uses of a block, if enough were seen.
    pub(super) fn mean_gap(&self) -> Option<f64> {
        (self.gaps >= GAPS_MIN).then(|| self.gap_sum / self.gaps)
    }

    /// Logarithm of the odds that a block of `class` is used again, against a new block's.
    pub(super) fn log_odds(&self, class: Class) -> f64 {
        let average = (self.new.reused + 1.0) / (self.new.entered + 3.0);
        let prior = sigmoid(logit(average) + class.prior_log_odds());
        let tally = &self.classes[class.0 as usize];
        let share = (tally.reused + PRIOR * prior) / (tally.entered + PRIOR);
        logit(share) - logit(average)
    }

    fn forget_half(&mut self) {
        for tally in self.classes.iter_mut().chain([&mut self.new]) {
            tally.entered /= 2.0;
            tally.reused /= 2.0;
        }
        self.entered /= 2.0;
        self.gap_sum /= 2.0;
        self.gaps /= 2.0;
    }
}

fn logit(share: f64) -> f64 {
    let share = share.clamp(0.001, 0.999);
    (share / (1.0 - share)).ln()
}

fn sigmoid(log_odds: f64) -> f64 {
    1.0 / (1.0 + (-log_odds).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_history_the_prior_speaks() {
        let stats = ReuseStats::new();
        assert!(stats.log_odds(Class::new_block(None, 1)).abs() < 1e-9);
        assert!((stats.log_odds(Class::from_byte(2)) - 4.0_f64.ln()).abs() < 1e-9);
        assert!((stats.log_odds(Class::partial()) - PARTIAL_LOG_ODDS).abs() < 1e-9);
        assert_eq!(stats.mean_gap(), None);
    }

    #[test]
    fn what_is_reused_more_has_better_odds() {
        let mut stats = ReuseStats::new();
        let (good, bad) = (Class::new_block(None, 1), Class::partial());
        let other = Class::new_block(None, 30);
        for round in 0..4000 {
            for class in [good, bad, other] {
                stats.entered(class);
            }
            if round % 2 == 0 {
                stats.reused(good, 100);
            }
        }
        assert!(stats.log_odds(good) > 0.5);
        assert!(stats.log_odds(other) < -1.0, "new blocks differ by where they are");
        assert!(stats.log_odds(bad) < -2.0);
        assert_eq!(stats.mean_gap(), Some(100.0));
    }

    #[test]
    fn hints_split_classes_and_weak_ones_do_not() {
        let class = Class::new_block(None, 1);
        assert_eq!(class.with_hint(0.1), class);
        assert_ne!(class.with_hint(1.0), class.with_hint(-1.0));
        assert_eq!(class.with_hint(1.0).used_again(), Class::from_byte(0));
    }

    #[test]
    fn lineage_is_inherited_and_uses_saturate() {
        let second_turn = Class::from_byte(0);
        let first = Class::new_block(Some(second_turn), 1);
        assert_eq!(Class::new_block(Some(first), 2), first);
        assert_ne!(Class::new_block(Some(first), 30), first);
        assert_ne!(first, Class::new_block(None, 1));
        let mut class = Class::partial();
        for _ in 0..40 {
            class = class.used_again();
        }
        assert_eq!(class, Class::from_byte(USED_MOST));
    }
}
