//! Signs as changes since a token before.
//!
//! A channel with a lag of 1, 2 or 3 has its signs replaced by whether they differ from the sign that
//! many tokens before; before the first token no sign is set.

use std::ops::Range;

use crate::isa::per_isa;
use crate::masked::Masked;

/// Furthest token before that a sign is compared to.
pub(super) const LAG_MAX: usize = 3;
pub(super) const LAG_BITS: usize = 2;

per_isa! {
    /// For each channel, the lag that leaves its signs most one-sided; 0 for none.
    pub(super) fn choose(symbols: &[u8], channels: usize) -> Vec<u8> = choose_on
}

#[inline(always)]
unsafe fn choose_on<K: Masked>(symbols: &[u8], channels: usize) -> Vec<u8> {
    // Counters have 16 bits: a longer plane's first tokens stand for it.
    let tokens = (symbols.len() / channels).min(usize::from(u16::MAX));
    let symbols = &symbols[..tokens * channels];
    let mut lags = vec![0; channels];
    let mut best = minorities(symbols, &vec![0; symbols.len()], channels);
    for lag in 1..=LAG_MAX.min(tokens - 1) {
        let of_lag = minorities(&symbols[lag * channels..], symbols, channels);
        for ((best, lags), of_lag) in best.iter_mut().zip(&mut lags).zip(of_lag) {
            if of_lag < *best {
                (*best, *lags) = (of_lag, lag as u8);
            }
        }
    }
    lags
}

/// For each channel, how often its signs differ from those `before`, or how often they do not.
#[inline(always)]
fn minorities(now: &[u8], before: &[u8], channels: usize) -> Vec<u16> {
    let mut ones = vec![0u16; channels];
    for (now, before) in now.chunks_exact(channels).zip(before.chunks_exact(channels)) {
        for ((ones, now), before) in ones.iter_mut().zip(now).zip(before) {
            *ones += u16::from((now ^ before) & 1);
        }
    }
    let all = (now.len() / channels) as u16;
    ones.iter_mut().for_each(|ones| *ones = (*ones).min(all - *ones));
    ones
}

/// Where each lag applies.
#[derive(Debug, Default)]
pub(super) struct Lags {
    channels: usize,
    /// A mask of the channels per lag, repeated so that any word's part lies in one piece; nothing when
    /// no channel has a lag.
    masks: Vec<u8>,
}

/// Symbols worked on at a time, where no channel comes twice in so many.
const WORD: usize = 64;

impl Lags {
    /// Of channels with these lags, 0 to [`LAG_MAX`].
    pub(super) fn new(lags: &[u8]) -> Self {
        let mut masks = Vec::new();
        if lags.iter().any(|lag| *lag > 0) {
            masks.reserve(LAG_MAX * (lags.len() + WORD));
            for wanted in 1..=LAG_MAX as u8 {
                let start = masks.len();
                masks.extend(lags.iter().map(|lag| u8::from(*lag == wanted)));
                while masks.len() < start + lags.len() + WORD {
                    masks.extend_from_within(start..start + lags.len().min(WORD));
                }
                masks.truncate(start + lags.len() + WORD);
            }
        }
        Self { channels: lags.len(), masks }
    }

    /// Zeros that stand for tokens before the first one, at the beginning of a buffer of symbols.
    pub(super) fn zeros(&self) -> usize {
        if self.masks.is_empty() { 0 } else { LAG_MAX * self.channels }
    }

    /// Recover the signs of some symbols of a plane, which lies behind `zeros`, all before them having
    /// been recovered. It may go a word past the last.
    #[inline(always)]
    pub(super) fn undo(&self, symbols: &mut [u8], wanted: Range<usize>) {
        if self.masks.is_empty() {
            return;
        }
        if self.channels < WORD {
            return wanted.for_each(|at| self.change::<1>(symbols, at, at % self.channels));
        }
        let mut channel = wanted.start % self.channels;
        for at in wanted.step_by(WORD) {
            self.change::<WORD>(symbols, at, channel);
            channel += WORD;
            channel -= if channel >= self.channels { self.channels } else { 0 };
        }
    }

    /// Flip the `WIDTH` symbols from `at` on, the first of which is `channel`'s, if the sign a lag
    /// before is set.
    #[inline(always)]
    fn change<const WIDTH: usize>(&self, symbols: &mut [u8], at: usize, channel: usize) {
        let (channels, zeros, repeated) =
            (self.channels, LAG_MAX * self.channels, self.channels + WORD);
        assert!(channels >= WIDTH && channel < channels && self.masks.len() == LAG_MAX * repeated);
        let window = &mut symbols[at..at + zeros + WIDTH];
        // SAFETY: `WIDTH` bytes at each place are in the window or, of a mask that repeats beyond any
        // channel by a word, in the masks.
        unsafe {
            let now = window.as_mut_ptr().add(zeros).cast::<[u8; WIDTH]>();
            let mut changed = now.read();
            for lag in 1..=LAG_MAX {
                let before =
                    window.as_ptr().add(zeros - lag * channels).cast::<[u8; WIDTH]>().read();
                let mask = self.masks.as_ptr().add((lag - 1) * repeated + channel);
                let mask = mask.cast::<[u8; WIDTH]>().read();
                for ((symbol, before), mask) in changed.iter_mut().zip(before).zip(mask) {
                    *symbol ^= before & mask;
                }
            }
            now.write(changed);
        }
    }
}

per_isa! {
    /// Replace each sign of a plane, which lies behind `zeros`, by its change since the channel's lag.
    pub(super) fn apply(lags: &Lags, symbols: &mut [u8], len: usize) = apply_on
}

/// From the end on, so that the signs before are still themselves.
#[inline(always)]
unsafe fn apply_on<K: Masked>(lags: &Lags, symbols: &mut [u8], len: usize) {
    if lags.masks.is_empty() {
        return;
    }
    if lags.channels < WORD {
        (0..len).rev().for_each(|at| lags.change::<1>(symbols, at, at % lags.channels));
    } else {
        let words = (0..len).step_by(WORD).rev();
        words.for_each(|at| lags.change::<WORD>(symbols, at, at % lags.channels));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::isa::Isa;

    proptest! {
        #[test]
        fn signs_come_back(lags in proptest::collection::vec(0u8..=3, 1..150), tokens in 1usize..9,
                           seed: u64) {
            let lags = Lags::new(&lags);
            let elements = lags.channels * tokens;
            let symbol = |i: usize| (seed.wrapping_mul(2 * i as u64 + 1) >> 40) as u8;
            let mut symbols = vec![0; lags.zeros()];
            symbols.extend((0..elements).map(symbol));
            let want = symbols.clone();
            symbols.resize(symbols.len() + WORD, 0);
            apply(Isa::current(), &lags, &mut symbols, elements);
            for from in (0..elements).step_by(WORD) {
                lags.undo(&mut symbols, from..elements.min(from + WORD));
            }
            prop_assert_eq!(&symbols[..want.len()], &want[..]);
        }
    }
}
