//! Values of a few bits, packed for vectors.
//!
//! Elements come in strips of 512, eight rows of 64. A field of 1, 2 or 4 bits of byte `j` in each row
//! shares the packed byte `j`, so packing and unpacking shift whole vectors by constants on any
//! instruction set; other widths are a field of 4, one of 2 and one of 1 behind each other. The last
//! strip of a plane has shorter rows ("lanes") and wastes less than eight elements.

/// Elements of a whole strip.
pub(crate) const STRIP: usize = 512;
const ROWS: usize = 8;

/// Bytes in a row of a strip of `elements`.
#[inline(always)]
pub(crate) fn lanes(elements: usize) -> usize {
    elements.div_ceil(ROWS)
}

/// Pack the low `width` bits of `8 × lanes` values into `width × lanes` bytes.
#[inline(always)]
pub(crate) fn pack(values: &[u8], lanes: usize, width: u32, packed: &mut [u8]) {
    let (mut at, mut shift) = (0, 0);
    if width & 4 != 0 {
        pack_field::<4>(values, lanes, shift, &mut packed[at..at + 4 * lanes]);
        (at, shift) = (at + 4 * lanes, shift + 4);
    }
    if width & 2 != 0 {
        pack_field::<2>(values, lanes, shift, &mut packed[at..at + 2 * lanes]);
        (at, shift) = (at + 2 * lanes, shift + 2);
    }
    if width & 1 != 0 {
        pack_field::<1>(values, lanes, shift, &mut packed[at..at + lanes]);
    }
}

/// Inverse of `pack`; bits above `width` come out clear.
#[inline(always)]
pub(crate) fn unpack(packed: &[u8], lanes: usize, width: u32, values: &mut [u8]) {
    values[..ROWS * lanes].fill(0);
    let (mut at, mut shift) = (0, 0);
    if width & 4 != 0 {
        unpack_field::<4>(&packed[at..at + 4 * lanes], lanes, shift, values);
        (at, shift) = (at + 4 * lanes, shift + 4);
    }
    if width & 2 != 0 {
        unpack_field::<2>(&packed[at..at + 2 * lanes], lanes, shift, values);
        (at, shift) = (at + 2 * lanes, shift + 2);
    }
    if width & 1 != 0 {
        unpack_field::<1>(&packed[at..at + lanes], lanes, shift, values);
    }
}

#[inline(always)]
fn pack_field<const BITS: usize>(values: &[u8], lanes: usize, shift: u32, packed: &mut [u8]) {
    let mask = ((1u16 << BITS) - 1) as u8;
    let per = 8 / BITS;
    for (group, packed) in packed.chunks_exact_mut(lanes).enumerate() {
        for part in 0..per {
            let row = &values[(group * per + part) * lanes..][..lanes];
            let place = (part * BITS) as u32;
            for (byte, value) in packed.iter_mut().zip(row) {
                let bits = (value >> shift & mask) << place;
                *byte = if part == 0 { bits } else { *byte | bits };
            }
        }
    }
}

#[inline(always)]
fn unpack_field<const BITS: usize>(packed: &[u8], lanes: usize, shift: u32, values: &mut [u8]) {
    let mask = ((1u16 << BITS) - 1) as u8;
    let per = 8 / BITS;
    for (group, packed) in packed.chunks_exact(lanes).enumerate() {
        for part in 0..per {
            let row = &mut values[(group * per + part) * lanes..][..lanes];
            let place = (part * BITS) as u32;
            for (value, byte) in row.iter_mut().zip(packed) {
                *value |= (byte >> place & mask) << shift;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn packing_is_lossless(values in proptest::collection::vec(any::<u8>(), STRIP),
                               lanes in 1usize..=64, width in 1u32..=7) {
            let mut packed = vec![0; width as usize * lanes];
            pack(&values, lanes, width, &mut packed);
            let mut back = vec![0xFF; STRIP];
            unpack(&packed, lanes, width, &mut back);
            for (value, back) in values.iter().zip(&back).take(8 * lanes) {
                prop_assert_eq!(value & ((1 << width) - 1), *back);
            }
        }
    }
}
