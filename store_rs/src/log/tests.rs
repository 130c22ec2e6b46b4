use proptest::prelude::*;

use super::*;

const SEGMENT: u64 = 64 * PAGE as u64;

fn log(segments: usize) -> Log {
    Log::new(segments, SEGMENT)
}

/// Begin the next segment, or say that there is none.
fn begin(log: &mut Log, reserve: bool) -> bool {
    let Some((at, _)) = log.candidate(reserve) else { return false };
    log.begin(at);
    true
}

#[test]
fn a_segment_fills_from_both_ends() {
    let mut log = log(3);
    assert_eq!(log.next(1), None, "nothing is open");
    assert!(begin(&mut log, false));
    let mut slots = 0;
    while let Some((_, place, slot)) = log.append(4096, 1) {
        assert_eq!((place.page, slot), (slots, slots));
        assert!(log.offset(&place) + 4096 <= log.directory_offset(0, slot));
        slots += 1;
    }
    assert_eq!(slots, 62, "62 pages of bytes and two of directory");
    assert!(log.takes((SEGMENT - PAGE as u64) as u32));
    assert!(!log.takes(SEGMENT as u32));
    assert_eq!(log.allocated_bytes(), SEGMENT);
}

#[test]
fn the_last_segment_is_kept_for_moving() {
    let mut log = log(2);
    assert!(begin(&mut log, false));
    log.seal();
    assert!(!begin(&mut log, false));
    assert!(begin(&mut log, true));
    assert_eq!(log.allocated_bytes(), 2 * SEGMENT);
    log.seal();
    assert_eq!(log.candidate(true), None);
}

#[test]
fn the_victim_loses_least_and_is_never_one_being_read() {
    let mut log = log(4);
    let mut ids = Vec::new();
    for _ in 0..3 {
        assert!(begin(&mut log, false));
        ids.push(log.append(5000, 1).expect("room").0);
        log.seal();
    }
    assert_eq!(log.victim(), Some(0), "of equals the oldest");
    let place = log.pin_for_read(ids[0]);
    assert_eq!(log.victim(), Some(1), "being read");
    log.unpin(place.segment);
    assert_eq!(log.victim(), Some(1), "0 was read since, so moving it would cost more");
    assert_eq!(log.entries_of(0, true), [ids[0]]);
    assert_eq!(log.drop_entry(ids[1]), (1, 0));
    log.free(1);
    assert_eq!(log.candidate(false), Some((1, false)));
    assert_eq!(log.live_bytes(), 2 * 8192);
}

#[test]
fn a_restart_takes_back_what_fits_and_nothing_else() {
    let mut log = log(2);
    log.restore_segments(2);
    let record = Record { segment: 1, slot: 0, page: 0, len: 5000, ..record::sample() };
    let first = log.restore(&record).expect("in place");
    assert_eq!(log.place(first).generation, record.generation);
    for wrong in [
        Record { slot: 0, page: 2, ..record },
        Record { slot: 1, page: 1, ..record },
        Record { slot: 1, page: 63, ..record },
        Record { slot: 1, page: u32::MAX, ..record },
        Record { slot: 1, page: 2, len: u32::MAX, ..record },
        Record { segment: 2, ..record },
        Record { slot: 1, page: 2, len: 0, ..record },
    ] {
        assert_eq!(log.restore(&wrong), None, "{wrong:?}");
    }
    assert!(log.restore(&Record { slot: 3, page: 2, ..record }).is_some(), "slots may be erased");
    assert_eq!(log.entries_of(1, false).len(), 2);
    assert!(begin(&mut log, true));
    assert!(log.append(1, 0).expect("room").1.generation > record.generation);
}

proptest! {
    #[test]
    fn random_work_keeps_the_cap_and_the_live_bytes(
        work in prop::collection::vec((0u8..6, 1u32..200_000, any::<prop::sample::Index>()), 1..300)
    ) {
        let mut log = log(4);
        let mut live: Vec<(EntryId, u32)> = Vec::new();
        let mut pinned: Vec<Place> = Vec::new();
        for (op, len, pick) in work {
            match op {
                0..3 => {
                    if let Some((id, place, _)) = log.append(len, 3) {
                        prop_assert!(pinned.iter().all(|p| p.segment != place.segment
                            || p.generation == place.generation));
                        live.push((id, len));
                    } else if log.takes(len) {
                        log.seal();
                        if !begin(&mut log, false) && let Some(victim) = log.victim() {
                            for wanted in [false, true] {
                                for id in log.entries_of(victim, wanted) {
                                    log.drop_entry(id);
                                    live.retain(|(other, _)| *other != id);
                                }
                            }
                            log.free(victim);
                        }
                    }
                }
                3 if !live.is_empty() => {
                    log.drop_entry(live.swap_remove(pick.index(live.len())).0);
                }
                4 if !live.is_empty() => {
                    pinned.push(log.pin_for_read(live[pick.index(live.len())].0));
                }
                _ if !pinned.is_empty() => {
                    let place = pinned.swap_remove(pick.index(pinned.len()));
                    log.unpin(place.segment);
                }
                _ => {}
            }
            let bytes: u64 = live.iter().map(|(_, len)| u64::from(pages(*len)) * 4096).sum();
            prop_assert_eq!((log.live_bytes(), log.len()), (bytes, live.len()));
            prop_assert!(log.allocated_bytes() <= 4 * SEGMENT);
        }
    }
}
