//! Which kernels this machine can run.

use crate::{Error, Result, ffi};

/// An instruction set with kernels of its own, best last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Plain C++; the oracle of the tests, and slow.
    Portable,
    /// AVX2, FMA, F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ.
    Avx512,
    /// AVX-512 with bf16 products.
    Avx512Bf16,
    /// AMX tiles with bf16 products, beside AVX-512-BF16.
    Amx,
}

impl Isa {
    /// Every instruction set, worst first.
    pub const ALL: [Self; 5] =
        [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// The name that configuration and numerics ids use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Amx => "amx",
        }
    }

    /// The best one here.
    pub fn best() -> Self {
        Self::ALL.into_iter().rfind(|isa| isa.available()).unwrap_or(Self::Portable)
    }

    /// By name, or the best one; refused where the machine lacks it.
    pub fn choose(name: Option<&str>) -> Result<Self> {
        let Some(name) = name else { return Ok(Self::best()) };
        match Self::ALL.into_iter().find(|isa| isa.name() == name) {
            Some(isa) if isa.available() => Ok(isa),
            _ => Err(Error::Unavailable(name.into(), Self::best().name().into())),
        }
    }

    /// Whether the CPU and the operating system offer it to this process.
    #[cfg(target_arch = "x86_64")]
    pub fn available(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Self::Avx512 => {
                Self::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
            Self::Avx512Bf16 => Self::Avx512.available() && is_x86_feature_detected!("avx512bf16"),
            Self::Amx => Self::Avx512Bf16.available() && amx_granted(),
        }
    }

    /// Whether the CPU and the operating system offer it to this process.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn available(self) -> bool {
        self == Self::Portable
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn kernels(self) -> &'static ffi::Kernels {
        match self {
            Self::Portable => ffi::mk_portable(),
            Self::Avx2 => ffi::mk_avx2(),
            Self::Avx512 => ffi::mk_avx512(),
            Self::Avx512Bf16 => ffi::mk_avx512_bf16(),
            Self::Amx => ffi::mk_amx(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn kernels(self) -> &'static ffi::Kernels {
        ffi::mk_portable()
    }
}

/// Tile state is large, so Linux gives it to a process only on request; all threads have it then.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx_granted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    static GRANTED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *GRANTED.get_or_init(|| {
        let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
        if features & (AMX_BF16 | AMX_TILE) != AMX_BF16 | AMX_TILE {
            return false;
        }
        // SAFETY: the call changes which registers the kernel saves, and no memory of ours.
        let answer =
            unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
        answer == 0
    })
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn amx_granted() -> bool {
    false
}
