//! A seeded generator (SplitMix64): small, fast, and the same everywhere.

/// See the module.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator for `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in `0..bound`; `bound` must not be 0.
    pub fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The candidate with the smallest score; equal ones have equal chances.
    pub fn argmin<S: PartialOrd>(
        &mut self,
        scored: impl Iterator<Item = (usize, S)>,
    ) -> Option<usize> {
        let mut best: Option<(usize, S)> = None;
        let mut ties = 0;
        for (candidate, score) in scored {
            match &best {
                Some((_, least)) if score > *least => {}
                Some((_, least)) if score == *least => {
                    ties += 1;
                    if self.below(ties) == 0 {
                        best = Some((candidate, score));
                    }
                }
                _ => {
                    ties = 1;
                    best = Some((candidate, score));
                }
            }
        }
        best.map(|(candidate, _)| candidate)
    }
}
