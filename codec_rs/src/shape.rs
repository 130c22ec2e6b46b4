//! What a block holds: element type, planes, tokens, channels.

/// Most planes in a block.
pub(crate) const PLANES_MAX: u32 = 1 << 16;

/// Element type of a block. `Opaque` bytes are stored as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// Bytes of unknown meaning.
    Opaque = 0,
    /// bfloat16.
    Bf16 = 1,
    /// IEEE half.
    F16 = 2,
    /// IEEE single.
    F32 = 3,
    /// 8-bit float, 4 exponent bits.
    F8E4M3 = 4,
    /// 8-bit float, 5 exponent bits.
    F8E5M2 = 5,
}

impl Dtype {
    /// The type with this number in a container.
    pub fn from_u8(value: u8) -> Option<Self> {
        Some(match value {
            0 => Self::Opaque,
            1 => Self::Bf16,
            2 => Self::F16,
            3 => Self::F32,
            4 => Self::F8E4M3,
            5 => Self::F8E5M2,
            _ => return None,
        })
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Self::Opaque | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// How a plane's bytes are coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// As they are.
    None = 0,
    /// Decodes at memory speed.
    Fast = 1,
    /// Best ratio.
    Dense = 2,
    /// Portable: zstd on the exponent plane.
    Zstd = 3,
}

impl Codec {
    /// The codec with this number in a container.
    pub fn from_u8(value: u8) -> Option<Self> {
        Some(match value {
            0 => Self::None,
            1 => Self::Fast,
            2 => Self::Dense,
            3 => Self::Zstd,
            _ => return None,
        })
    }
}

/// Shape of a block: `planes` × `tokens` × `channels` elements, planes contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Element type.
    pub dtype: Dtype,
    /// Independent sub-blocks: one per layer and K or V.
    pub planes: u32,
    /// Tokens in a plane.
    pub tokens: u32,
    /// Elements of one token in one plane.
    pub channels: u32,
}

impl Shape {
    /// `len` bytes of unknown meaning, as one plane.
    pub fn opaque(len: u32) -> Self {
        Self { dtype: Dtype::Opaque, planes: 1, tokens: 1, channels: len }
    }

    /// Bytes of one raw plane; None when empty or past `u32`.
    pub fn plane_bytes(&self) -> Option<usize> {
        let elements = self.tokens.checked_mul(self.channels)?;
        let bytes = elements.checked_mul(self.dtype.size() as u32)?;
        (bytes > 0).then_some(bytes as usize)
    }

    /// Bytes of the raw block; None when empty, past 4 GiB or past the plane limit.
    pub fn raw_bytes(&self) -> Option<usize> {
        let plane = self.plane_bytes()? as u64;
        let raw = plane.checked_mul(u64::from(self.planes))?;
        let fits = self.planes <= PLANES_MAX && raw > 0 && raw <= u64::from(u32::MAX);
        fits.then_some(raw as usize)
    }
}
