use super::*;
use proptest::prelude::*;

#[test]
fn rounding_wastes_at_most_a_sixty_fourth() {
    for bytes in [1, 255, 256, 257, 16_384, 16_385, 5_898_240 + 1664, 1 << 30] {
        let taken = u64::from(round_up(bytes).expect("fits")) * GRANULE;
        assert!(taken >= bytes);
        assert!(taken - bytes < GRANULE + bytes / 64, "{bytes} took {taken}");
    }
}

#[test]
fn a_class_never_holds_an_extent_below_what_it_serves() {
    for granules in (1..5000).chain([1 << 20, (1 << 20) + 1, u32::MAX]) {
        let rounded = round_up(u64::from(granules) * GRANULE);
        if let Some(rounded) = rounded {
            assert!(rounded >= granules);
            assert!(class_of(rounded) >= class_of(granules));
        }
    }
}

#[test]
fn everything_freed_is_one_extent_again() {
    let mut alloc = Allocator::<u8>::new(1 << 20);
    let ids: Vec<_> = (0..16).map(|_| alloc.allocate(60_000, GRANULE, 7).expect("room")).collect();
    assert_eq!(alloc.allocate(60_000 + 4096 * 16, GRANULE, 7), None);
    for id in ids.iter().step_by(2).chain(ids.iter().skip(1).step_by(2)) {
        alloc.free(*id);
        alloc.check();
    }
    let whole = alloc.allocate(1 << 20, GRANULE, 7).expect("one extent");
    assert_eq!(alloc.offset(whole), 0);
    assert_eq!(alloc.free_bytes(), 0);
}

#[test]
#[should_panic(expected = "freed twice")]
fn a_double_free_is_caught() {
    let mut alloc = Allocator::<u8>::new(1 << 20);
    let id = alloc.allocate(1000, GRANULE, 7).expect("room");
    let _keep = alloc.allocate(1000, GRANULE, 7).expect("room");
    alloc.free(id);
    alloc.free(id);
}

#[test]
fn what_is_shrunk_away_is_free_again() {
    let mut alloc = Allocator::<u8>::new(1 << 20);
    let id = alloc.allocate(1 << 20, GRANULE, 7).expect("all of it");
    assert_eq!(alloc.largest_free(), 0);
    assert_eq!(alloc.shrink(id, 1 << 20), 0);
    assert_eq!(alloc.shrink(id, 300_000), (1 << 20) - alloc.size(id));
    assert!(alloc.size(id) >= 300_000);
    alloc.check();
    let rest = alloc.allocate(700_000, GRANULE, 7).expect("room behind it");
    alloc.free(id);
    alloc.free(rest);
    assert_eq!(alloc.largest_free(), 1 << 20);
}

/// What the proptest does to the allocator.
#[derive(Debug, Clone)]
enum Op {
    Take(u64),
    Free(prop::sample::Index),
    Shrink(prop::sample::Index, u64),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let bytes = 1u64..300_000;
    let op = prop_oneof![
        3 => bytes.clone().prop_map(Op::Take),
        2 => any::<prop::sample::Index>().prop_map(Op::Free),
        2 => (any::<prop::sample::Index>(), bytes).prop_map(|(at, bytes)| Op::Shrink(at, bytes)),
    ];
    prop::collection::vec(op, 1..200)
}

proptest! {
    #[test]
    fn random_work_keeps_the_invariants(ops in ops()) {
        let mut alloc = Allocator::<u8>::new(4 << 20);
        let mut held: Vec<ExtentId> = Vec::new();
        for op in ops {
            match op {
                Op::Take(bytes) => {
                    let align = if bytes % 2 == 0 { GRANULE } else { 4096 };
                    if let Some(id) = alloc.allocate(bytes, align, 7) {
                        prop_assert!(alloc.size(id) >= bytes);
                        prop_assert_eq!(alloc.offset(id) % align, 0);
                        held.push(id);
                    }
                }
                Op::Free(at) if !held.is_empty() => {
                    alloc.free(held.swap_remove(at.index(held.len())));
                }
                Op::Shrink(at, bytes) if !held.is_empty() => {
                    let id = *at.get(&held);
                    let (offset, size, free) = (alloc.offset(id), alloc.size(id), alloc.free_bytes());
                    let freed = alloc.shrink(id, bytes);
                    prop_assert_eq!(alloc.offset(id), offset, "an extent never moves");
                    prop_assert_eq!(alloc.size(id), size - freed);
                    prop_assert_eq!(alloc.free_bytes(), free + freed);
                    prop_assert!(alloc.size(id) >= bytes.min(size));
                }
                Op::Free(_) | Op::Shrink(..) => {}
            }
            alloc.check();
            let used: u64 = held.iter().map(|&id| alloc.size(id)).sum();
            prop_assert_eq!(used + alloc.free_bytes(), alloc.capacity());
            prop_assert!(alloc.largest_free() <= alloc.free_bytes());
        }
    }
}
