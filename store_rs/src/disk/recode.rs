//! The form blocks have on disk: as in memory, or coded anew on the way down.
//!
//! Coding takes its share of one core, as for idle blocks in memory: what comes while the share is
//! spent goes down as it is, so no write waits for it. So does what would not get smaller, what is
//! damaged (its reader finds out), and what is larger than the buffer. `auto` goes by the rate at
//! which the disk gives back what was written first: below the rate of decoding, the dense form is
//! read sooner than the raw one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use mooncake_codec::{Codec, Decoder, Encoder};

use crate::block;
use crate::server::{CodecChoice, codec_rate};

/// Least bytes whose reading tells the disk's rate.
const MEASURED_MIN: usize = 1 << 20;

/// What the tier's statistics say of its codec.
pub(super) struct Form {
    recoded: AtomicU64,
    why: Mutex<String>,
}

impl Form {
    pub(super) fn new(choice: Option<CodecChoice>) -> Self {
        let why = match choice {
            None => "as in memory",
            Some(CodecChoice::Auto) => "auto: as in memory until the disk's rate is known",
            Some(_) => "as configured",
        };
        Self { recoded: AtomicU64::new(0), why: Mutex::new(why.to_owned()) }
    }

    /// Blocks coded anew for the disk.
    pub(super) fn recoded(&self) -> u64 {
        self.recoded.load(Ordering::Relaxed)
    }

    /// One sentence: which form, and why.
    pub(super) fn why(&self) -> String {
        self.why.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_why(&self, why: String) {
        *self.why.lock().unwrap_or_else(PoisonError::into_inner) = why;
    }
}

/// Codes blocks for the disk.
#[derive(Default)]
pub(super) struct Recoder {
    codec: Option<Codec>,
    undecided: bool,
    share: f64,
    free_at: Option<Instant>,
    decoder: Decoder,
    encoder: Encoder,
    buffer: Vec<u8>,
}

impl Recoder {
    /// Codes with `share` of a core, in `bytes` of memory.
    pub(super) fn new(choice: Option<CodecChoice>, share: f64, bytes: usize) -> Self {
        let codec = match choice {
            None | Some(CodecChoice::Auto) => None,
            Some(CodecChoice::None) => Some(Codec::None),
            Some(CodecChoice::Fast) => Some(Codec::Fast),
            Some(CodecChoice::Dense) => Some(Codec::Dense),
        };
        let undecided = choice == Some(CodecChoice::Auto);
        let buffer = vec![0; if codec.is_some() || undecided { bytes } else { 0 }];
        Self { codec, undecided, share, buffer, ..Self::default() }
    }

    /// The container to write for one in memory.
    pub(super) fn form<'a>(&'a mut self, container: &'a [u8], form: &Form) -> &'a [u8] {
        let Some(codec) = self.codec else { return container };
        let begin = Instant::now();
        let is_so = block::describe(container).is_ok_and(|it| it.kind.codec == codec as u8);
        if is_so || self.free_at.is_some_and(|at| begin < at) {
            return container;
        }
        let (decoder, encoder) = (&mut self.decoder, &mut self.encoder);
        let coded = block::recode(decoder, encoder, container, codec, &mut self.buffer);
        let spent = begin.elapsed();
        self.free_at = Some(begin + spent.div_f64(self.share.clamp(0.001, 1.0)));
        match coded {
            Ok(Some(stored)) if (stored.len as usize) < container.len() || codec == Codec::None => {
                form.recoded.fetch_add(1, Ordering::Relaxed);
                &self.buffer[..stored.len as usize]
            }
            _ => container,
        }
    }

    /// Whether `decide` has something to decide from `bytes` read.
    pub(super) fn wants(&self, bytes: usize) -> bool {
        self.undecided && bytes >= MEASURED_MIN
    }

    /// The disk gave `bytes` back in `time`.
    pub(super) fn decide(&mut self, bytes: usize, time: Duration, form: &Form) {
        self.undecided = false;
        let disk = bytes as f64 / time.as_secs_f64().max(1e-9) / 1e9;
        // Without a rate of decoding, blocks stay as they are in memory.
        let decoding = codec_rate(Codec::Dense).unwrap_or(0.0);
        self.codec = (disk < decoding).then_some(Codec::Dense);
        let (name, verb) = match self.codec {
            Some(_) => ("dense", "slower"),
            None => ("as in memory", "no slower"),
        };
        form.set_why(format!(
            "auto: {name}: the disk reads at {disk:.1} GB/s, {verb} than decoding at \
             {decoding:.1} GB/s"
        ));
    }
}
