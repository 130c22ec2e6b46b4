//! Which codec the DRAM tier uses, and why: what was asked for, or what this machine's rates say.
//!
//! `auto` stores coded only where that does not slow a read: a plane is decoded and copied in turns,
//! and coding is chosen if decoding keeps up with copying. Both rates are in the stats.

use std::time::Instant;

use mooncake_codec::{Codec, Dtype, Shape, decode_into, encode, max_encoded_len};

use super::options::CodecChoice;
use crate::error::{Error, Result};

/// Rates differ by a few percent between runs.
const KEEPS_UP: f64 = 0.95;
const ROUNDS: usize = 5;
const SAMPLE: Shape = Shape { dtype: Dtype::Bf16, planes: 64, tokens: 256, channels: 256 };

/// How blocks are stored in DRAM.
#[derive(Debug, Clone)]
pub(crate) struct DramCodec {
    /// What a put codes with.
    pub(crate) on_put: Codec,
    /// What idle blocks are coded again with.
    pub(crate) when_idle: Option<Codec>,
    /// One sentence for the stats.
    pub(crate) why: String,
}

impl DramCodec {
    pub(crate) fn choose(choice: CodecChoice) -> Result<Self> {
        let asked = "as configured".to_owned();
        Ok(match choice {
            CodecChoice::None => Self { on_put: Codec::None, when_idle: None, why: asked },
            CodecChoice::Fast => Self { on_put: Codec::Fast, when_idle: None, why: asked },
            CodecChoice::Dense => {
                let why = "as configured: fast on put, dense once idle".to_owned();
                Self { on_put: Codec::Fast, when_idle: Some(Codec::Dense), why }
            }
            CodecChoice::Auto => Self::measured(codec_rate(Codec::None)?, codec_rate(Codec::Fast)?),
        })
    }

    fn measured(copy: f64, decode: f64) -> Self {
        let keeps_up = decode >= KEEPS_UP * copy;
        let verb = if keeps_up { "keeps up with" } else { "is slower than" };
        let why = format!("auto: decoding at {decode:.1} GB/s {verb} copying at {copy:.1} GB/s");
        let on_put = if keeps_up { Codec::Fast } else { Codec::None };
        Self { on_put, when_idle: None, why }
    }

    /// The setting this amounts to.
    pub(crate) fn name(&self) -> &'static str {
        match (self.on_put, self.when_idle) {
            (Codec::None, _) => "none",
            (_, None) => "fast",
            _ => "dense",
        }
    }
}

/// Median rate of verified reads of a sample block under `codec`, in GB/s of raw bytes.
pub(crate) fn codec_rate(codec: Codec) -> Result<f64> {
    let failed = |error| Error::unavailable(format!("measure the codec: {error}"));
    let raw = sample();
    let mut container = vec![0; max_encoded_len(&SAMPLE).unwrap_or(0)];
    let len = encode(codec, &SAMPLE, &raw, &mut container).map_err(failed)?;
    let mut out = vec![0; raw.len()];
    let mut seconds = [0.0; ROUNDS];
    for seconds in &mut seconds {
        let begin = Instant::now();
        decode_into(&container[..len], &mut out).map_err(failed)?;
        *seconds = begin.elapsed().as_secs_f64();
    }
    seconds.sort_unstable_by(f64::total_cmp);
    Ok(raw.len() as f64 / seconds[ROUNDS / 2].max(1e-9) / 1e9)
}

/// bfloat16 with exponents spread as in KV: sums of uniform numbers, by a fixed generator.
fn sample() -> Vec<u8> {
    let mut state = 1u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from_bits(0x3F80_0000 | state >> 9) - 1.5
    };
    let elements = (SAMPLE.planes * SAMPLE.tokens * SAMPLE.channels) as usize;
    let value = |_| (uniform() + uniform() + uniform()).to_bits() >> 16;
    (0..elements).map(value).flat_map(|bits| (bits as u16).to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_goes_by_the_rates() {
        assert_eq!(DramCodec::measured(8.0, 4.0).name(), "none");
        let chosen = DramCodec::measured(8.0, 8.1);
        assert_eq!(chosen.name(), "fast");
        assert_eq!(chosen.why, "auto: decoding at 8.1 GB/s keeps up with copying at 8.0 GB/s");
    }

    #[test]
    fn the_sample_is_coded_like_kv() {
        let mut container = vec![0; max_encoded_len(&SAMPLE).expect("a shape")];
        let len = encode(Codec::Fast, &SAMPLE, &sample(), &mut container).expect("codes");
        let ratio = len as f64 / sample().len() as f64;
        assert!((0.6..0.75).contains(&ratio), "{ratio}");
        assert!(DramCodec::choose(CodecChoice::Auto).expect("measures").why.starts_with("auto: "));
    }
}
