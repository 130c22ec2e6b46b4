//! Shuffle tables for instruction sets that merge and split eight bytes at a time.

/// For each mask: byte `i` takes the next of bytes 8… where bit `i` is set, else the next of 0….
pub(super) static MERGE: [[u8; 8]; 256] = merge_table();
/// For each mask: byte `i` takes the next of bytes 8… where bit `i` is set, else byte `i`.
pub(super) static ONTO: [[u8; 8]; 256] = onto_table();
/// For each mask: the positions of its clear bits, in order.
pub(super) static ZEROS: [[u8; 8]; 256] = positions(0);
/// For each mask: the positions of its set bits, in order.
pub(super) static ONES: [[u8; 8]; 256] = positions(1);

const fn merge_table() -> [[u8; 8]; 256] {
    let mut table = [[0; 8]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut zeros, mut ones, mut bit) = (0, 8, 0);
        while bit < 8 {
            if mask >> bit & 1 == 1 {
                table[mask][bit] = ones;
                ones += 1;
            } else {
                table[mask][bit] = zeros;
                zeros += 1;
            }
            bit += 1;
        }
        mask += 1;
    }
    table
}

const fn onto_table() -> [[u8; 8]; 256] {
    let mut table = merge_table();
    let mut mask = 0;
    while mask < 256 {
        let mut bit = 0;
        while bit < 8 {
            if mask >> bit & 1 == 0 {
                table[mask][bit] = bit as u8;
            }
            bit += 1;
        }
        mask += 1;
    }
    table
}

const fn positions(wanted: usize) -> [[u8; 8]; 256] {
    let mut table = [[0; 8]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut filled, mut bit) = (0, 0);
        while bit < 8 {
            if mask >> bit & 1 == wanted {
                table[mask][filled] = bit as u8;
                filled += 1;
            }
            bit += 1;
        }
        mask += 1;
    }
    table
}
