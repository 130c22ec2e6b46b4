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
}

impl Isa {
    const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// The name that configuration and numerics ids use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// The best one here.
    pub fn best() -> Self {
        Self::ALL
            .into_iter()
            .rfind(|isa| isa.available())
            .unwrap_or(Self::Portable)
    }

    /// By name, or the best one; refused where the machine lacks it.
    pub fn choose(name: Option<&str>) -> Result<Self> {
        let Some(name) = name else {
            return Ok(Self::best());
        };
        match Self::ALL.into_iter().find(|isa| isa.name() == name) {
            Some(isa) if isa.available() => Ok(isa),
            _ => Err(Error::Unavailable(name.into(), Self::best().name().into())),
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn available(self) -> bool {
        let avx2 = || {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
        };
        let avx512 = || {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
        };
        match self {
            Self::Portable => true,
            Self::Avx2 => avx2(),
            Self::Avx512 => avx2() && avx512(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn available(self) -> bool {
        self == Self::Portable
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn kernels(self) -> &'static ffi::Kernels {
        match self {
            Self::Portable => ffi::mk_portable(),
            Self::Avx2 => ffi::mk_avx2(),
            Self::Avx512 => ffi::mk_avx512(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn kernels(self) -> &'static ffi::Kernels {
        ffi::mk_portable()
    }
}
