//! One forward pass over a batch of sequences' new tokens.
//!
//! Owns: the scratch memory, and the order of the phases. Threads meet between phases and share out
//! rows, heads, panels or tiles inside them, never a sum.
//! Invariants: see the crate. KV of the batch's tokens is in the pool when `forward` returns.
//! Fails: with [`Error::Invalid`](crate::Error) for a token, position or block out of bounds,
//! before anything is written.

use std::{
    ptr::null,
    sync::{PoisonError, atomic::AtomicUsize},
};

use crate::{
    Buffer, LayerGate, Member, Result, Span,
    attention::{Operands, Plan, Shared, Turns},
    error::require,
    ffi::{Gemm, Heads, Kernels, PANEL, PoolView, ROWS},
    loader::packed_index,
    model::{KvPool, LayerVectors, Model, Shape},
};

/// New tokens of one sequence.
pub struct Item<'a> {
    /// Their ids.
    pub tokens: &'a [u32],
    /// Position of the first; KV of all earlier positions is in `table`.
    pub start: usize,
    /// Pool blocks by position / block_tokens.
    pub table: &'a [i32],
    /// Whether logits of the last token are wanted.
    pub logits: bool,
}

/// Activations of one forward, kept between forwards.
#[derive(Default)]
pub(crate) struct Scratch {
    memory: Option<Buffer>,
    rows: usize,
}

#[derive(Clone, Copy)]
struct Activations {
    hidden: *mut f32,
    normed: *mut u16,
    query: *mut u16,
    context: *mut u16,
    inner: *mut u16,
}

impl Scratch {
    /// Room for `rows` rows, and for the padding that matrix products read.
    fn reserve(&mut self, shape: &Shape, rows: usize) -> Result<Activations> {
        let capacity = rows.next_multiple_of(ROWS).max(self.rows);
        let wide = shape.heads * shape.head_dim;
        let sizes = [shape.hidden * 4, shape.hidden * 2, wide * 2, wide * 2, shape.inner * 2];
        if self.memory.is_none() || capacity > self.rows {
            self.memory = None;
            self.memory = Some(Buffer::new(capacity * sizes.iter().sum::<usize>())?);
            self.rows = capacity;
        }
        let base = self.memory.as_ref().map_or(std::ptr::null_mut(), Buffer::address::<u8>);
        let mut next = base;
        let mut take = |bytes: usize| {
            let at = next;
            next = next.wrapping_add(capacity * bytes);
            at
        };
        let [hidden, normed, query, context, inner] = sizes.map(&mut take);
        Ok(Activations {
            hidden: hidden.cast(),
            normed: normed.cast(),
            query: query.cast(),
            context: context.cast(),
            inner: inner.cast(),
        })
    }
}

/// The batch as rows, one for each token.
#[derive(Default)]
struct Rows {
    token: Vec<u32>,
    position: Vec<i32>,
    block: Vec<i32>,
    /// Rows whose logits are wanted.
    wanted: Vec<usize>,
}

impl Rows {
    fn new<'a>(shape: &Shape, pool: &KvPool, items: &[Item<'a>]) -> Result<(Self, Vec<Span<'a>>)> {
        let geometry = shape.geometry(pool.blocks);
        let (mut rows, mut spans) = (Self::default(), Vec::with_capacity(items.len()));
        for item in items {
            let (start, count) = (item.start, item.tokens.len());
            require!(count > 0, "an item without tokens");
            let end = start.saturating_add(count);
            require!(end <= shape.max_context, "position {end} is past {}", shape.max_context);
            let first_row = rows.token.len();
            let span = Span { table: item.table, first_row, rows: count, visible: start + 1 };
            span.check(&geometry)?;
            if let Some(token) = item.tokens.iter().find(|t| **t as usize >= shape.vocab) {
                require!(false, "token {token} is not in the vocabulary of {}", shape.vocab);
            }
            rows.token.extend_from_slice(item.tokens);
            rows.position.extend((start..end).map(|p| p as i32));
            rows.block.extend((start..end).map(|p| item.table[p / shape.block_tokens]));
            rows.wanted.extend(item.logits.then(|| first_row + count - 1));
            spans.push(span);
        }
        require!(rows.token.len() <= 1 << 20, "a batch of {} tokens", rows.token.len());
        Ok((rows, spans))
    }
}

/// Counters by which the members share one layer's phases.
#[derive(Default)]
struct LayerTurns {
    input_norm: AtomicUsize,
    project: AtomicUsize,
    attention: Turns,
    out: AtomicUsize,
    post_norm: AtomicUsize,
    gate: AtomicUsize,
    down: AtomicUsize,
}

struct Run<'a> {
    model: &'a Model,
    kernels: &'static Kernels,
    rows: &'a Rows,
    plan: &'a Plan<'a>,
    view: PoolView,
    scale: f32,
    act: Activations,
    logits: *mut f32,
    gate: Option<&'a LayerGate>,
    turns: Vec<LayerTurns>,
    embed: AtomicUsize,
    last_norm: AtomicUsize,
    head: AtomicUsize,
}

impl Model {
    /// Runs the batch, writes its KV into the pool, and fills `logits` with one row of `vocab`
    /// floats for each item that wants them, in order.
    ///
    /// With a gate, the KV before the batch is still arriving: each layer's attention waits for its
    /// layer. When the gate fails, what was computed means nothing.
    pub fn forward(
        &self,
        pool: &KvPool,
        items: &[Item<'_>],
        logits: &mut [f32],
        gate: Option<&LayerGate>,
    ) -> Result<()> {
        let (rows, spans) = Rows::new(&self.shape, pool, items)?;
        require!(
            logits.len() == rows.wanted.len() * self.shape.vocab,
            "{} logits for {} rows of {}",
            logits.len(),
            rows.wanted.len(),
            self.shape.vocab
        );
        require!(
            pool.bytes() == pool.blocks * self.shape.block_bytes(),
            "the pool belongs to another model"
        );
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let geometry = self.shape.geometry(pool.blocks);
        let kernels = self.isa.kernels();
        let run = Run {
            model: self,
            kernels,
            rows: &rows,
            plan: &Plan::new(&geometry, &spans, kernels, self.team.threads()),
            view: geometry.view(pool.address()),
            scale: geometry.scale,
            act: scratch.reserve(&self.shape, rows.token.len())?,
            logits: logits.as_mut_ptr(),
            gate,
            turns: (0..self.shape.layers).map(|_| LayerTurns::default()).collect(),
            embed: AtomicUsize::new(0),
            last_norm: AtomicUsize::new(0),
            head: AtomicUsize::new(0),
        };
        let run = Shared(&run);
        // SAFETY: every index has been checked, the scratch is ours while its lock is held, and
        // the phases write disjoint rows, heads or panels.
        self.team.run(|member| unsafe { run.get().member(member) })
    }
}

impl Run<'_> {
    fn count(&self) -> usize {
        self.rows.token.len()
    }

    fn product(&self, a: *const u16, at: usize, k: usize) -> Gemm {
        let weights = self.model.weights.address::<u16>().wrapping_add(at).cast_const();
        Gemm { a, weights, rows: self.count() as i32, k: k as i32 }
    }

    /// How many units one turn takes: few enough that the threads finish together.
    fn piece(&self, total: usize) -> usize {
        (total / (8 * self.model.team.threads())).max(1)
    }

    fn share(
        &self,
        member: &Member<'_>,
        turn: &AtomicUsize,
        total: usize,
        mut work: impl FnMut(i32, i32),
    ) {
        member.share(turn, total, self.piece(total), |r| work(r.start as i32, r.end as i32));
        member.barrier();
    }

    /// # Safety
    /// Every member of the team runs this once, with the same `Run`.
    unsafe fn member(&self, member: &Member<'_>) {
        self.share(member, &self.embed, self.count(), |from, to| {
            for row in from as usize..to as usize {
                // SAFETY: one member has the row.
                unsafe { self.embed_row(row) };
            }
        });
        for layer in 0..self.model.shape.layers {
            // SAFETY: as for this function.
            unsafe {
                self.attention_half(member, layer);
                self.gated_half(member, layer);
            }
        }
        // SAFETY: as for this function.
        unsafe { self.head(member) };
    }

    unsafe fn embed_row(&self, row: usize) {
        let (token, width) = (self.rows.token[row] as usize, self.model.shape.hidden);
        let weights = self.model.weights.address::<u16>().cast_const();
        for k in 0..width {
            let at = match self.model.embedding_at {
                Some(at) => at + token * width + k,
                None => self.model.head_at + packed_index(token, k, width),
            };
            // SAFETY: the token is in the vocabulary, and the row is one of the batch's.
            unsafe {
                let bits = u32::from(*weights.add(at)) << 16;
                self.act.hidden.add(row * width + k).write(f32::from_bits(bits));
            }
        }
    }

    unsafe fn norm(&self, member: &Member<'_>, turn: &AtomicUsize, weight: &[f32]) {
        let (width, eps) = (self.model.shape.hidden, self.model.shape.eps);
        self.share(member, turn, self.count(), |from, to| {
            let at = from as usize * width;
            // SAFETY: one member has the rows.
            unsafe {
                let (input, out) = (self.act.hidden.add(at), self.act.normed.add(at));
                (self.kernels.rms_norm)(input, weight.as_ptr(), to - from, width as i32, eps, out);
            }
        });
    }

    unsafe fn attention_half(&self, member: &Member<'_>, layer: usize) {
        let (shape, at) = (&self.model.shape, &self.model.at[layer]);
        let (turns, vectors) = (&self.turns[layer], &self.model.vectors[layer]);
        let offset = (2 * layer * shape.plane_bytes()) as i64;
        let view = PoolView {
            k_offset: offset,
            v_offset: offset + shape.plane_bytes() as i64,
            ..self.view
        };
        let heads = self.heads(vectors);
        let wide = shape.heads * shape.head_dim;
        let query = self.product(self.act.normed, at.qkv, shape.hidden);
        let out = self.product(self.act.context, at.out, wide);
        let operands = Operands {
            view,
            query: self.act.query.cast_const().cast(),
            out: self.act.context.cast(),
            row_elements: wide,
            scale: self.scale,
        };
        // SAFETY: the shapes and addresses are this model's, and each unit has one member.
        unsafe {
            self.norm(member, &turns.input_norm, &vectors.input_norm);
            self.share(member, &turns.project, shape.heads + 2 * shape.kv_heads, |from, to| {
                (self.kernels.project_heads)(&query, &heads, &view, from, to);
            });
            if let Some(gate) = self.gate {
                gate.wait(layer);
            }
            self.plan.run(member, &operands, &turns.attention);
            member.barrier();
            let (bias, columns) = (address(&vectors.out_bias), shape.hidden as i32);
            self.share(member, &turns.out, shape.hidden / PANEL, |from, to| {
                (self.kernels.add_product)(&out, bias, self.act.hidden, columns, from, to);
            });
        }
    }

    unsafe fn gated_half(&self, member: &Member<'_>, layer: usize) {
        let (shape, at) = (&self.model.shape, &self.model.at[layer]);
        let (turns, vectors) = (&self.turns[layer], &self.model.vectors[layer]);
        let gate = self.product(self.act.normed, at.gate_up, shape.hidden);
        let down = self.product(self.act.inner, at.down, shape.inner);
        let (inner, hidden) = (shape.inner as i32, shape.hidden as i32);
        // SAFETY: the shapes and addresses are this model's, and each unit has one member.
        unsafe {
            self.norm(member, &turns.post_norm, &vectors.post_norm);
            self.share(member, &turns.gate, 2 * shape.inner / PANEL, |from, to| {
                (self.kernels.gated_product)(&gate, self.act.inner, inner, from, to);
            });
            self.share(member, &turns.down, shape.hidden / PANEL, |from, to| {
                (self.kernels.add_product)(&down, null(), self.act.hidden, hidden, from, to);
            });
        }
    }

    unsafe fn head(&self, member: &Member<'_>) {
        let (shape, wanted) = (&self.model.shape, &self.rows.wanted);
        let width = shape.hidden;
        member.share(&self.last_norm, wanted.len(), 1, |range| {
            for i in range {
                let weight = self.model.final_norm.as_ptr();
                // SAFETY: one member has the row; `normed` is free after the last layer.
                unsafe {
                    let input = self.act.hidden.add(wanted[i] * width);
                    let out = self.act.normed.add(i * width);
                    (self.kernels.rms_norm)(input, weight, 1, width as i32, shape.eps, out);
                }
            }
        });
        member.barrier();
        let mut product = self.product(self.act.normed, self.model.head_at, width);
        product.rows = wanted.len() as i32;
        let panels = if wanted.is_empty() { 0 } else { shape.vocab.div_ceil(PANEL) };
        self.share(member, &self.head, panels, |from, to| {
            let vocab = shape.vocab as i32;
            // SAFETY: `logits` holds `vocab` floats for each wanted row.
            unsafe { (self.kernels.store_product)(&product, self.logits, vocab, from, to) };
        });
    }

    fn heads(&self, vectors: &LayerVectors) -> Heads {
        Heads {
            heads: self.model.shape.heads as i32,
            eps: self.model.shape.eps,
            bias: address(&vectors.qkv_bias),
            q_norm: address(&vectors.q_norm),
            k_norm: address(&vectors.k_norm),
            cos: self.model.cos.as_ptr(),
            sin: self.model.sin.as_ptr(),
            position: self.rows.position.as_ptr(),
            block: self.rows.block.as_ptr(),
            query: self.act.query,
        }
    }
}

/// Null for what the model does not have.
fn address(values: &[f32]) -> *const f32 {
    if values.is_empty() { null() } else { values.as_ptr() }
}
