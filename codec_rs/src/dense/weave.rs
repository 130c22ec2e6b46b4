//! Which cluster each element of a plane belongs to.
//!
//! Channels follow each other in the same order in every token, so the masks that pick a cluster's
//! elements out of a plane repeat after a few words of 64. Nothing of them is stored: they follow from
//! the channels' labels.

use super::cluster::CLUSTERS_MAX;
use super::wavelet::make_room;
use crate::isa::per_isa;
use crate::masked::Masked;

/// The masks of every cluster, for the words of a period.
#[derive(Debug, Default)]
pub(super) struct Pattern {
    masks: Vec<[u64; CLUSTERS_MAX]>,
}

per_isa! {
    /// The pattern of channels with these labels over a plane of `elements`.
    pub(super) fn pattern(labels: &[u8], elements: usize, pattern: &mut Pattern) = pattern_on
}

#[inline(always)]
unsafe fn pattern_on<K: Masked>(labels: &[u8], elements: usize, pattern: &mut Pattern) {
    let period = (labels.len() >> labels.len().trailing_zeros().min(6)).min(elements.div_ceil(64));
    pattern.masks.clear();
    let mut channels = labels.iter().cycle();
    for _ in 0..period {
        let mut word = [0; 64];
        word.iter_mut().zip(&mut channels).for_each(|(to, label)| *to = *label);
        let masks = std::array::from_fn(|cluster| {
            // SAFETY: by the caller's promise, of 64 labels.
            unsafe {
                K::at_least64(word.as_ptr(), cluster as u8)
                    & !K::at_least64(word.as_ptr(), cluster as u8 + 1)
            }
        });
        pattern.masks.push(masks);
    }
}

per_isa! {
    /// The elements of one cluster, in order, from the first `len` of `symbols`; how many they are.
    pub(super) fn pick(
        pattern: &Pattern, cluster: usize, symbols: &[u8], len: usize, out: &mut Vec<u8>,
    ) -> usize = pick_on
}

#[inline(always)]
unsafe fn pick_on<K: Masked>(
    pattern: &Pattern,
    cluster: usize,
    symbols: &[u8],
    len: usize,
    out: &mut Vec<u8>,
) -> usize {
    make_room(out, len);
    let words = symbols[..len.next_multiple_of(64)].chunks_exact(64);
    let mut count = 0;
    for ((word, masks), at) in words.zip(pattern.masks.iter().cycle()).zip((0..len).step_by(64)) {
        let mask = masks[cluster] & (u64::MAX >> (64 - (len - at).min(64)));
        // SAFETY: both pointers are to 64 bytes of a slice; the caller vouches for the features.
        unsafe { K::compress64(mask, word.as_ptr(), out[count..count + 64].as_mut_ptr()) };
        count += mask.count_ones() as usize;
    }
    count
}

/// Inverse of `pick`, for all clusters at once and a few words at a time.
pub(super) struct Weaver<'a> {
    pattern: &'a Pattern,
    word: usize,
    /// The elements of each cluster, one cluster behind the other.
    streams: &'a [u8],
    /// Where in `streams` each cluster's next element is.
    next: [usize; CLUSTERS_MAX],
    clusters: usize,
}

impl<'a> Weaver<'a> {
    /// Weave clusters that begin at these places of `streams`.
    pub(super) fn new(pattern: &'a Pattern, streams: &'a [u8], starts: &[usize]) -> Self {
        let next = std::array::from_fn(|cluster| starts.get(cluster).copied().unwrap_or(0));
        Self { pattern, word: 0, streams, next, clusters: starts.len() }
    }

    /// The next elements, as many whole words as `out` has.
    ///
    /// # Safety
    /// The features of `K` are there.
    ///
    /// # Panics
    /// When less than as many bytes are left from where any cluster is.
    #[inline(always)]
    pub(super) unsafe fn weave<K: Masked>(&mut self, out: &mut [u8]) {
        // SAFETY: by the caller's promise.
        unsafe {
            match self.clusters {
                1 => self.weave_of::<K, 1>(out),
                2 => self.weave_of::<K, 2>(out),
                3 => self.weave_of::<K, 3>(out),
                4 => self.weave_of::<K, 4>(out),
                // The masks of those that are not there are empty.
                _ => self.weave_of::<K, CLUSTERS_MAX>(out),
            }
        }
    }

    #[inline(always)]
    unsafe fn weave_of<K: Masked, const N: usize>(&mut self, out: &mut [u8]) {
        let out = out.as_chunks_mut::<64>().0;
        let mut streams: [*const u8; N] =
            std::array::from_fn(|at| self.streams[self.next[at]..][..64 * out.len()].as_ptr());
        let mut masks = self.pattern.masks[self.word..].iter();
        for out in out {
            if masks.as_slice().is_empty() {
                masks = self.pattern.masks.iter();
            }
            let Some(masks) = masks.next() else { return };
            let mut word = [0; 64];
            for (mask, stream) in masks.iter().zip(&mut streams) {
                // SAFETY: a word takes at most 64 bytes, and as many for every word are in the stream;
                // the caller vouches for the features.
                unsafe {
                    K::expand_onto64(*mask, *stream, word.as_mut_ptr());
                    *stream = stream.add(mask.count_ones() as usize);
                }
            }
            *out = word;
        }
        self.word = self.pattern.masks.len() - masks.as_slice().len();
        for (next, stream) in self.next.iter_mut().zip(streams) {
            *next = stream as usize - self.streams.as_ptr() as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::isa::Isa;
    use crate::masked::Scalar;

    proptest! {
        #[test]
        fn what_is_picked_is_woven(labels in proptest::collection::vec(0u8..8, 1..150),
                                   tokens in 1usize..20) {
            let elements = labels.len() * tokens;
            let room = elements.next_multiple_of(64);
            let symbols: Vec<u8> = (0..room).map(|i| ((i * 31) >> 3) as u8).collect();
            let mut pattern = Pattern::default();
            super::pattern(Isa::current(), &labels, elements, &mut pattern);
            let (mut streams, mut starts, mut stream) = (Vec::new(), Vec::new(), Vec::new());
            for cluster in 0..CLUSTERS_MAX {
                let len = pick(Isa::current(), &pattern, cluster, &symbols, elements, &mut stream);
                let here = labels.iter().filter(|label| usize::from(**label) == cluster).count();
                prop_assert_eq!(len, tokens * here);
                starts.push(streams.len());
                streams.extend_from_slice(&stream[..len]);
            }
            make_room(&mut streams, elements + room);
            let mut weaver = Weaver::new(&pattern, &streams, &starts);
            let mut woven = vec![0; room];
            let (first, rest) = woven.split_at_mut(room / 128 * 64);
            // SAFETY: the oracle needs no feature.
            unsafe {
                weaver.weave::<Scalar>(first);
                weaver.weave::<Scalar>(rest);
            }
            prop_assert_eq!(&woven[..elements], &symbols[..elements]);
        }
    }
}
