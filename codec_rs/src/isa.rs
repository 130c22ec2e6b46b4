//! Which instruction set a call runs on, decided at run time.
//!
//! Every path gives the same bits; the scalar one is the oracle of the tests. Loops are written once,
//! `#[inline(always)]`, and compiled once per instruction set by [`per_isa!`], so the compiler
//! vectorizes each copy for its registers; only the few operations it cannot find by itself (expanding
//! and compressing bytes under a mask, see `masked`) are written with intrinsics.

use std::sync::atomic::{AtomicU8, Ordering};

/// An instruction set the codec has a path for, least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Isa {
    /// No vectors.
    Scalar = 0,
    /// 128-bit vectors of aarch64.
    Neon = 1,
    /// 256-bit vectors of x86-64.
    Avx2 = 2,
    /// 512-bit vectors of x86-64 with byte expand and compress (VBMI2).
    Avx512 = 3,
}

static LIMIT: AtomicU8 = AtomicU8::new(Isa::Avx512 as u8);

/// Use no instruction set above `limit` from now on, in the whole process. For tests and benchmarks:
/// results do not depend on it.
pub fn limit_isa(limit: Isa) {
    LIMIT.store(limit as u8, Ordering::Relaxed);
}

impl Isa {
    /// The best one this machine has, below the limit set by [`limit_isa`].
    pub fn current() -> Self {
        let limit = LIMIT.load(Ordering::Relaxed);
        let usable = |isa: &Self| *isa as u8 <= limit && isa.available();
        [Self::Avx512, Self::Avx2, Self::Neon].into_iter().find(usable).unwrap_or(Self::Scalar)
    }

    /// Whether this machine has it.
    pub fn available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi2"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vbmi2")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }
}

/// How far to look ahead in memory that is read once, in bytes.
pub(crate) const AHEAD: usize = 4096;

/// Ask for the lines of `bytes[from..from + len]`, as far as there are any.
#[inline(always)]
pub(crate) fn prefetch(bytes: &[u8], from: usize, len: usize) {
    (from..(from + len).min(bytes.len())).step_by(64).for_each(|at| prefetch_line(bytes, at));
}

/// Ask for the line `at` bytes from the start of `bytes`; behind their end, in vain.
#[inline(always)]
pub(crate) fn prefetch_line(bytes: &[u8], at: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 has SSE, and a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (bytes, at);
}

/// Compile `$body::<…, K>` for every instruction set, `K` being its `Masked` operations, and choose
/// between the copies at run time.
macro_rules! per_isa {
    ($(#[$doc:meta])* $vis:vis fn $name:ident$(<$F:ident: $bound:path>)?
     ($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? = $body:ident) => {
        $(#[$doc])*
        $vis fn $name$(<$F: $bound>)?(isa: $crate::isa::Isa, $($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2,avx2,bmi1,bmi2,popcnt")]
            fn avx512$(<$F: $bound>)?($($arg: $type),*) $(-> $result)? {
                // SAFETY: this copy runs only where the features are.
                unsafe { $body::<$($F,)? $crate::masked::Avx512>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
            fn avx2$(<$F: $bound>)?($($arg: $type),*) $(-> $result)? {
                // SAFETY: as above.
                unsafe { $body::<$($F,)? $crate::masked::Avx2>($($arg),*) }
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: an `Isa` comes from `Isa::current`, which checks the features.
                $crate::isa::Isa::Avx512 => unsafe { avx512$(::<$F>)?($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                $crate::isa::Isa::Avx2 => unsafe { avx2$(::<$F>)?($($arg),*) },
                #[cfg(target_arch = "aarch64")]
                // SAFETY: NEON is part of the baseline of aarch64.
                $crate::isa::Isa::Neon => unsafe {
                    $body::<$($F,)? $crate::masked::Neon>($($arg),*)
                },
                // SAFETY: needs no feature.
                _ => unsafe { $body::<$($F,)? $crate::masked::Scalar>($($arg),*) },
            }
        }
    };
}

pub(crate) use per_isa;
