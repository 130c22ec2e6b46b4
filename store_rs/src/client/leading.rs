//! A run of work on several threads, of which only the part before the first failure counts.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Give the items to the workers, in order, until one fails; how many items before it succeeded.
///
/// The first worker is the caller's thread, each other one gets its own. If the machine has no more
/// threads to give, those that exist do all the work.
pub(super) fn leading<T, W>(items: impl Iterator<Item = T> + Send, workers: Vec<W>) -> usize
where
    W: FnMut(T) -> bool + Send,
{
    let items = Mutex::new(items.enumerate());
    let (taken, failed) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    let (items, taken, failed) = (&items, &taken, &failed);
    let work = move |mut worker: W| {
        loop {
            let next = items.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((index, item)) = next else { return };
            // The scope's end makes all of this visible: no order is needed here.
            taken.fetch_max(index + 1, Ordering::Relaxed);
            if index > failed.load(Ordering::Relaxed) {
                return;
            }
            if !worker(item) {
                failed.fetch_min(index, Ordering::Relaxed);
                return;
            }
        }
    };
    let mut workers = workers.into_iter();
    let own = workers.next();
    thread::scope(|scope| {
        for worker in workers {
            let named = thread::Builder::new().name("kv-reader".to_owned());
            if named.spawn_scoped(scope, move || work(worker)).is_err() {
                break;
            }
        }
        own.map(work)
    });
    taken.load(Ordering::Relaxed).min(failed.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_counts_ends_at_the_first_failure(
            outcomes in proptest::collection::vec(prop::bool::weighted(0.9), 0..60),
            threads in 1usize..5,
        ) {
            let done: Vec<AtomicUsize> = outcomes.iter().map(|_| AtomicUsize::new(0)).collect();
            let worker = |index: usize| {
                done[index].fetch_add(1, Ordering::Relaxed);
                outcomes[index]
            };
            let counted = leading(0..outcomes.len(), vec![worker; threads]);
            let first = outcomes.iter().position(|good| !good).unwrap_or(outcomes.len());
            prop_assert_eq!(counted, first);
            prop_assert!(done[..first].iter().all(|times| times.load(Ordering::Relaxed) == 1));
            prop_assert!(done.iter().all(|times| times.load(Ordering::Relaxed) <= 1));
        }
    }
}
