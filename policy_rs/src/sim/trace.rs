//! Requests of a trace in the Mooncake format: one JSON object a line with `timestamp` (ms),
//! `input_length`, `output_length` (tokens) and `hash_ids`, the ids of the prompt's blocks.
//!
//! Invariants of a parsed trace: requests are in order of arrival, each prompt has exactly the
//! blocks its length asks for, block ids are renumbered densely from 0.
//! Fails: with the line number and what is wrong in it.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// Dense id of a block of a trace.
pub type TraceBlock = u32;

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Arrival, seconds.
    pub arrival_s: f64,
    /// Prompt tokens.
    pub input_tokens: u32,
    /// Generated tokens.
    pub output_tokens: u32,
    /// Blocks of the prompt; the last one may be partial.
    pub blocks: Vec<TraceBlock>,
}

/// A trace, see the module.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Tokens of a full block.
    pub block_tokens: u32,
    /// Requests by arrival.
    pub requests: Vec<Request>,
    /// Distinct blocks.
    pub unique_blocks: usize,
}

#[derive(Serialize, Deserialize)]
pub(super) struct Line {
    pub(super) timestamp: f64,
    pub(super) input_length: u32,
    pub(super) output_length: u32,
    pub(super) hash_ids: Vec<u64>,
}

impl Trace {
    /// Parse the text of a trace.
    ///
    /// # Errors
    /// Names the first line that is not a request or breaks an invariant.
    pub fn parse(text: &str, block_tokens: u32) -> Result<Self, String> {
        let mut dense: HashMap<u64, TraceBlock> = HashMap::new();
        let mut requests: Vec<Request> = Vec::new();
        let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        for (number, line) in lines {
            let at = |why: String| format!("trace line {}: {why}", number + 1);
            let line: Line = serde_json::from_str(line).map_err(|error| at(error.to_string()))?;
            let blocks = line.hash_ids.len();
            if line.input_length == 0 || line.input_length.div_ceil(block_tokens) as usize != blocks
            {
                return Err(at(format!(
                    "{} tokens in {blocks} blocks of {block_tokens}; check the block size",
                    line.input_length
                )));
            }
            let arrival_s = line.timestamp / 1000.0;
            if !arrival_s.is_finite() || requests.last().is_some_and(|r| r.arrival_s > arrival_s) {
                return Err(at("timestamps must not go back".to_owned()));
            }
            let mut next = dense.len() as TraceBlock;
            let mut blocks = Vec::with_capacity(blocks);
            for id in line.hash_ids {
                blocks.push(*dense.entry(id).or_insert_with(|| {
                    next += 1;
                    next - 1
                }));
            }
            requests.push(Request {
                arrival_s,
                input_tokens: line.input_length,
                output_tokens: line.output_length,
                blocks,
            });
        }
        if requests.is_empty() {
            return Err("the trace holds no request".to_owned());
        }
        Ok(Self { block_tokens, requests, unique_blocks: dense.len() })
    }

    /// The part of the trace between two fractions of its requests.
    #[must_use]
    pub fn slice(&self, from: f64, to: f64) -> Self {
        let place = |fraction: f64| (fraction * self.requests.len() as f64).round() as usize;
        let requests = self.requests[place(from)..place(to)].to_vec();
        Self { requests, ..*self }
    }

    /// The trace as text in the Mooncake format.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for request in &self.requests {
            let line = Line {
                timestamp: (request.arrival_s * 1000.0).round(),
                input_length: request.input_tokens,
                output_length: request.output_tokens,
                hash_ids: request.blocks.iter().map(|&block| u64::from(block)).collect(),
            };
            text += &serde_json::to_string(&line).unwrap_or_default();
            text.push('\n');
        }
        text
    }
}
