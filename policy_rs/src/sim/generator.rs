//! Traces of the shape of a chat service, made from a seed.
//!
//! Sessions start at random; each has a shared system prompt, a first prompt of log-normal length
//! and turns that append to it after a pause. Most sessions end after a turn or two, so most blocks
//! are never used again, as in published traces.

use super::trace::{Request, Trace};
use crate::route::Rng;

/// What to generate.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Requests.
    pub requests: usize,
    /// Requests a second.
    pub rate: f64,
    /// Median tokens of a session's first prompt.
    pub first_tokens: f64,
    /// Chance that a turn is followed by another.
    pub next_turn: f64,
    /// Median seconds between turns.
    pub pause_s: f64,
    /// Tokens of a full block.
    pub block_tokens: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            requests: 4000,
            rate: 3.4,
            first_tokens: 6500.0,
            next_turn: 0.42,
            pause_s: 110.0,
            block_tokens: 512,
        }
    }
}

const TOKENS_MAX: f64 = 126_000.0;

struct Session {
    blocks: Vec<u32>,
    tokens: u32,
}

/// A trace of the given shape.
#[must_use]
pub fn generate(shape: &Shape, seed: u64) -> Trace {
    let mut rng = Rng::new(seed);
    let mut maker = Maker { shape, next_block: 1 };
    let mut requests = Vec::with_capacity(2 * shape.requests);
    let mut start_s = 0.0;
    let turns_per_session = 1.0 / (1.0 - shape.next_turn);
    while requests.len() < 2 * shape.requests {
        start_s += -(1.0 - rng.unit()).ln() * turns_per_session / shape.rate;
        maker.session(&mut rng, start_s, &mut requests);
    }
    requests.sort_by(|a: &Request, b| a.arrival_s.total_cmp(&b.arrival_s));
    // The first sessions have no predecessors: start where turns of all ages mix.
    let skip = (requests.len() - shape.requests) / 2;
    let requests: Vec<Request> = requests.drain(skip..skip + shape.requests).collect();
    Trace { block_tokens: shape.block_tokens, requests, unique_blocks: maker.next_block as usize }
}

struct Maker<'a> {
    shape: &'a Shape,
    next_block: u32,
}

impl Maker<'_> {
    fn session(&mut self, rng: &mut Rng, start_s: f64, requests: &mut Vec<Request>) {
        let first = log_normal(rng, self.shape.first_tokens, 1.1);
        let mut session = Session { blocks: vec![0], tokens: self.shape.block_tokens };
        let (mut at_s, mut appended) = (start_s, first);
        loop {
            let output = log_normal(rng, 280.0, 0.8).min(2000.0) as u32 + 1;
            self.append(&mut session, appended);
            requests.push(Request {
                arrival_s: at_s,
                input_tokens: session.tokens,
                output_tokens: output,
                blocks: session.blocks.clone(),
            });
            let over = f64::from(session.tokens) > TOKENS_MAX || rng.unit() > self.shape.next_turn;
            if over {
                return;
            }
            // A long paste is less often followed up than a short question.
            at_s += log_normal(rng, self.shape.pause_s, 0.9);
            appended = f64::from(output) + log_normal(rng, 120.0, 1.5).min(8000.0);
        }
    }

    /// Append tokens; a partial last block becomes another block when it grows.
    fn append(&mut self, session: &mut Session, tokens: f64) {
        let total = (f64::from(session.tokens) + tokens).min(TOKENS_MAX) as u32;
        if !session.tokens.is_multiple_of(self.shape.block_tokens) {
            session.blocks.pop();
        }
        session.tokens = total.max(session.tokens);
        while session.blocks.len() < session.tokens.div_ceil(self.shape.block_tokens) as usize {
            session.blocks.push(self.next_block);
            self.next_block += 1;
        }
    }
}

fn log_normal(rng: &mut Rng, median: f64, sigma: f64) -> f64 {
    let (radius, angle) = (1.0 - rng.unit(), rng.unit());
    let normal = (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos();
    median * (sigma * normal).exp()
}
