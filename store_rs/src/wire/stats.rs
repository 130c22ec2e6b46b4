//! The answer to `stats`: names and numbers, each list bounded.

use super::{Cursor, MAX_ITEMS, put_text};
use crate::error::{Error, Result};
use crate::index::Usage;

/// What a store counts, and how it is set up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StatsReply {
    /// Counters and gauges.
    pub values: Vec<(String, u64)>,
    /// Physical bytes and blocks of each tenant.
    pub tenants: Vec<(String, u64, u64)>,
    /// What is not a number.
    pub texts: Vec<(String, String)>,
    /// Bytes by tier, element type and codec.
    pub usage: Vec<(String, Usage)>,
}

impl StatsReply {
    /// Append it to `out`.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.extend((self.values.len() as u32).to_le_bytes());
        for (name, value) in &self.values {
            put_text(out, name);
            out.extend(value.to_le_bytes());
        }
        // 1024 rows of at most 272 bytes stay well inside a frame.
        let tenants = &self.tenants[..self.tenants.len().min(1024)];
        out.extend((tenants.len() as u32).to_le_bytes());
        for (name, bytes, blocks) in tenants {
            put_text(out, name);
            out.extend(bytes.to_le_bytes());
            out.extend(blocks.to_le_bytes());
        }
        out.extend((self.texts.len() as u32).to_le_bytes());
        for (name, text) in &self.texts {
            put_text(out, name);
            put_text(out, text);
        }
        out.extend((self.usage.len() as u32).to_le_bytes());
        for (tier, row) in &self.usage {
            put_text(out, tier);
            out.extend([row.dtype, row.codec]);
            let sums = [row.blocks, row.logical, row.shared_saved, row.codec_saved];
            let costs = [row.metadata, row.rounding, row.physical];
            sums.iter().chain(&costs).for_each(|value| out.extend(value.to_le_bytes()));
        }
    }

    pub(super) fn decode(at: &mut Cursor<'_>) -> Result<Self> {
        let mut stats = Self::default();
        for _ in 0..bounded(at.u32()?)? {
            stats.values.push((at.text()?.to_owned(), at.u64()?));
        }
        for _ in 0..bounded(at.u32()?)? {
            stats.tenants.push((at.text()?.to_owned(), at.u64()?, at.u64()?));
        }
        for _ in 0..bounded(at.u32()?)? {
            stats.texts.push((at.text()?.to_owned(), at.text()?.to_owned()));
        }
        for _ in 0..bounded(at.u32()?)? {
            let tier = at.text()?.to_owned();
            let (dtype, codec) = (at.u8()?, at.u8()?);
            let (blocks, logical, shared_saved) = (at.u64()?, at.u64()?, at.u64()?);
            let (codec_saved, metadata) = (at.u64()?, at.u64()?);
            let (rounding, physical) = (at.u64()?, at.u64()?);
            let row = Usage {
                dtype,
                codec,
                blocks,
                logical,
                shared_saved,
                codec_saved,
                metadata,
                rounding,
                physical,
            };
            stats.usage.push((tier, row));
        }
        Ok(stats)
    }
}

fn bounded(count: u32) -> Result<u32> {
    if count as usize > MAX_ITEMS {
        return Err(Error::protocol(format!("{count} rows in a stats reply")));
    }
    Ok(count)
}
