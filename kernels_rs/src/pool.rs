//! A small team of threads that runs one closure at a time, with barriers inside.
//!
//! Owns: `threads - 1` workers; the caller is member 0. Idle workers spin for some microseconds,
//! then sleep, so that replicas that share a machine do not take each other's cores.
//! Invariants: `run` returns after every member has; one run at a time.
//! Fails: a panic in a member poisons the barriers, so that no other member waits for ever, and
//! every later `run` returns [`Error::Panicked`].

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::*, fence},
    },
    thread::JoinHandle,
};

use crate::{Error, Result};

/// Spins before a waiter sleeps: about 50 µs with the pause instruction of a current CPU.
const SPINS: usize = 1000;

/// Blocks until a condition holds: spins, then sleeps.
pub(crate) struct Gate {
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Self { sleepers: AtomicUsize::new(0), lock: Mutex::new(()), changed: Condvar::new() }
    }

    pub(crate) fn wait(&self, ready: impl Fn() -> bool) {
        for _ in 0..SPINS {
            if ready() {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = lock(&self.lock);
        self.sleepers.fetch_add(1, SeqCst);
        fence(SeqCst);
        while !ready() {
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }

    /// Call after the change that a waiter looks for. The fences pair: either the waiter sees the
    /// change, or this sees the sleeper; so the usual wake-up costs no system call.
    pub(crate) fn wake(&self) {
        fence(SeqCst);
        if self.sleepers.load(SeqCst) > 0 {
            drop(lock(&self.lock));
            self.changed.notify_all();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type Job<'a> = dyn Fn(&Member<'_>) + Sync + 'a;

struct Shared {
    threads: usize,
    /// The current closure; valid while `remaining` is not zero.
    job: Mutex<Option<&'static Job<'static>>>,
    epoch: AtomicUsize,
    start: Gate,
    remaining: AtomicUsize,
    done: Gate,
    arrived: AtomicUsize,
    generation: AtomicUsize,
    barrier: Gate,
    poisoned: AtomicBool,
    stop: AtomicBool,
}

impl Shared {
    fn barrier(&self) {
        let generation = self.generation.load(Acquire);
        if self.arrived.fetch_add(1, AcqRel) + 1 == self.threads {
            self.arrived.store(0, Relaxed);
            self.generation.store(generation + 1, Release);
            self.barrier.wake();
        } else {
            self.barrier.wait(|| {
                self.generation.load(Acquire) != generation || self.poisoned.load(Acquire)
            });
        }
        assert!(!self.poisoned.load(Acquire), "another member of the team panicked");
    }

    fn work(&self, index: usize, job: &Job<'_>) {
        let member = Member { shared: self, index };
        if catch_unwind(AssertUnwindSafe(|| job(&member))).is_err() {
            self.poisoned.store(true, Release);
            self.barrier.wake();
        }
    }

    fn serve(&self, index: usize) {
        let mut seen = 0;
        loop {
            self.start.wait(|| self.epoch.load(Acquire) != seen || self.stop.load(Acquire));
            if self.stop.load(Acquire) {
                return;
            }
            seen = self.epoch.load(Acquire);
            let job = *lock(&self.job);
            if let Some(job) = job {
                self.work(index, job);
            }
            self.remaining.fetch_sub(1, AcqRel);
            self.done.wake();
        }
    }
}

/// One thread's place in a run.
pub struct Member<'a> {
    shared: &'a Shared,
    /// 0 for the caller.
    pub index: usize,
}

impl Member<'_> {
    /// Hands out [0, total) in pieces until `next` has passed it; every index goes to one member.
    pub fn share(
        &self,
        next: &AtomicUsize,
        total: usize,
        piece: usize,
        mut work: impl FnMut(std::ops::Range<usize>),
    ) {
        loop {
            let from = next.fetch_add(piece, Relaxed);
            if from >= total {
                return;
            }
            work(from..total.min(from + piece));
        }
    }

    /// Members of the team.
    pub fn threads(&self) -> usize {
        self.shared.threads
    }

    /// Waits until every member has come here; what they wrote before is visible after.
    pub fn barrier(&self) {
        self.shared.barrier();
    }
}

/// The team. Dropping it joins the workers.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    running: Mutex<()>,
}

impl Pool {
    /// A team of `threads` (at least 1), the caller included.
    pub fn new(threads: usize) -> Result<Self> {
        let threads = threads.max(1);
        let shared = Arc::new(Shared {
            threads,
            job: Mutex::new(None),
            epoch: AtomicUsize::new(0),
            start: Gate::new(),
            remaining: AtomicUsize::new(0),
            done: Gate::new(),
            arrived: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
            barrier: Gate::new(),
            poisoned: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let mut pool = Self { shared, workers: Vec::new(), running: Mutex::new(()) };
        for index in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = std::thread::Builder::new()
                .name(format!("mk-{index}"))
                .spawn(move || shared.serve(index))
                .map_err(|e| Error::Invalid(format!("cannot start {threads} threads: {e}")))?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Members of the team.
    pub fn threads(&self) -> usize {
        self.shared.threads
    }

    /// Runs `job` once on every member, and returns when all are done.
    pub fn run(&self, job: impl Fn(&Member<'_>) + Sync) -> Result<()> {
        let _one_at_a_time = lock(&self.running);
        let shared = &*self.shared;
        if shared.poisoned.load(Acquire) {
            return Err(Error::Panicked);
        }
        let job: &Job<'_> = &job;
        if shared.threads > 1 {
            // SAFETY: workers use the closure before they count `remaining` down, and this
            // function returns after it has reached zero, so the borrow outlives its uses.
            let lasting = unsafe { std::mem::transmute::<&Job<'_>, &'static Job<'static>>(job) };
            *lock(&shared.job) = Some(lasting);
            shared.remaining.store(shared.threads - 1, Release);
            shared.epoch.fetch_add(1, AcqRel);
            shared.start.wake();
        }
        shared.work(0, job);
        shared.done.wait(|| shared.remaining.load(Acquire) == 0);
        *lock(&shared.job) = None;
        if shared.poisoned.load(Acquire) { Err(Error::Panicked) } else { Ok(()) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Release);
        self.shared.start.wake();
        for worker in self.workers.drain(..) {
            // A worker that panicked has already poisoned the team; there is nothing to add.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_member_runs_and_barriers_order_their_writes() {
        for threads in 1..5 {
            let pool = Pool::new(threads).expect("a team");
            let counts: Vec<_> = (0..50).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..20 {
                pool.run(|member| {
                    for count in &counts {
                        count.fetch_add(1, Relaxed);
                        member.barrier();
                        assert_eq!(count.load(Relaxed) % threads, 0);
                        member.barrier();
                    }
                })
                .expect("no member fails");
            }
            assert!(counts.iter().all(|c| c.load(Relaxed) == 20 * threads));
        }
    }

    #[test]
    fn a_panic_frees_the_others_and_is_remembered() {
        let pool = Pool::new(3).expect("a team");
        let outcome = pool.run(|member| {
            assert!(member.index != 1, "told to fail");
            member.barrier();
        });
        assert_eq!(outcome, Err(Error::Panicked));
        assert_eq!(pool.run(|_| ()), Err(Error::Panicked));
    }
}
