//! Weights on their way in: named, checked, packed once.
//!
//! Owns: the packed order (panels of 32 columns of 32 x 32 squares, each two AMX B tiles), and the
//! list of what is still missing.
//! Invariants: a `Model` leaves here with every weight it needs; columns that pad a head or the
//! vocabulary stay zero.
//! Fails: with [`Error::Invalid`](crate::Error) for an unknown name, a wrong size, a weight that
//! comes twice, or one that is missing at the end.

use std::{collections::BTreeSet, sync::Mutex};

use crate::{
    Buffer, Error, Isa, Model, Pool, Result, Shape,
    error::require,
    ffi::PANEL,
    model::{LayerMatrices, LayerVectors, Matrix},
};

/// Row n of a matrix becomes column `first + n / run * stride + n % run` of its packed form.
struct Place {
    offset: usize,
    rows: usize,
    k: usize,
    first: usize,
    run: usize,
    stride: usize,
}

/// Takes the weights one by one, then becomes the model.
pub struct Loader {
    model: Model,
    missing: BTreeSet<(String, usize)>,
}

impl Loader {
    /// Reserves memory for the weights of `shape`, and starts its threads.
    pub fn new(shape: Shape, isa: Isa, threads: usize) -> Result<Self> {
        shape.check()?;
        require!((1..=256).contains(&threads), "threads {threads} is not between 1 and 256");
        let (mut end, sizes) = (0, shape.matrices());
        let mut reserve = |elements: usize| {
            end += elements;
            end - elements
        };
        let at = (0..shape.layers)
            .map(|_| LayerMatrices {
                qkv: reserve(sizes.qkv.elements()),
                out: reserve(sizes.out.elements()),
                gate_up: reserve(sizes.gate_up.elements()),
                down: reserve(sizes.down.elements()),
            })
            .collect();
        let head_at = reserve(Matrix { columns: shape.vocab, k: shape.hidden }.elements());
        let embedding_at = (!shape.tied).then(|| reserve(shape.vocab * shape.hidden));
        let model = Model {
            shape,
            isa,
            team: Pool::new(threads)?,
            // The decode kernel asks for lines a little ahead of where it is.
            weights: Buffer::new(end * 2 + 8192)?,
            at,
            head_at,
            embedding_at,
            vectors: (0..shape.layers).map(|_| LayerVectors::default()).collect(),
            final_norm: Vec::new(),
            cos: Vec::new(),
            sin: Vec::new(),
            scratch: Mutex::default(),
        };
        Ok(Self { model, missing: expected(&shape) })
    }

    /// A matrix as bf16, row-major `[outputs, inputs]`; `layer` is 0 for what no layer owns.
    pub fn matrix(&mut self, name: &str, layer: usize, values: &[u16]) -> Result<()> {
        self.require_missing(name, layer)?;
        if name == "embedding" {
            let size = self.model.shape.vocab * self.model.shape.hidden;
            require!(values.len() == size, "{name} has {} elements, not {size}", values.len());
            let offset = self.model.embedding_at.unwrap_or_default();
            // SAFETY: `new` reserved this range for the embedding.
            unsafe {
                let target = self.model.weights.address::<u16>().add(offset);
                target.copy_from_nonoverlapping(values.as_ptr(), size);
            }
        } else {
            let place = self.place(name, layer)?;
            let size = place.rows * place.k;
            require!(values.len() == size, "{name} has {} elements, not {size}", values.len());
            // SAFETY: `new` reserved the packed matrix at `offset`.
            unsafe { pack(&place, values, self.model.weights.address()) };
        }
        self.missing.remove(&(name.to_string(), layer));
        Ok(())
    }

    /// A vector, or a rotation table, as floats; `layer` is 0 for what no layer owns.
    pub fn vector(&mut self, name: &str, layer: usize, values: &[f32]) -> Result<()> {
        self.require_missing(name, layer)?;
        let shape = self.model.shape;
        let angles = shape.max_context * (shape.head_dim / 2);
        let qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
        let vectors = &mut self.model.vectors[layer.min(shape.layers - 1)];
        let (target, size) = match name {
            "input_norm" => (&mut vectors.input_norm, shape.hidden),
            "post_norm" => (&mut vectors.post_norm, shape.hidden),
            "qkv_bias" => (&mut vectors.qkv_bias, qkv),
            "out_bias" => (&mut vectors.out_bias, shape.hidden),
            "q_norm" => (&mut vectors.q_norm, shape.head_dim),
            "k_norm" => (&mut vectors.k_norm, shape.head_dim),
            "final_norm" => (&mut self.model.final_norm, shape.hidden),
            "cos" => (&mut self.model.cos, angles),
            "sin" => (&mut self.model.sin, angles),
            _ => return Err(Error::Invalid(format!("{name} is a matrix"))),
        };
        require!(values.len() == size, "{name} has {} elements, not {size}", values.len());
        target.extend_from_slice(values);
        // Kernels may read, and drop, up to a vector past the end of a rotation's row.
        target.resize(size + 16, 0.0);
        self.missing.remove(&(name.to_string(), layer));
        Ok(())
    }

    /// The model, when nothing is missing.
    pub fn finish(self) -> Result<Model> {
        if let Some((name, layer)) = self.missing.first() {
            let count = self.missing.len();
            require!(false, "{count} weights are missing, the first is {name} of layer {layer}");
        }
        Ok(self.model)
    }

    fn require_missing(&self, name: &str, layer: usize) -> Result<()> {
        let known = self.missing.contains(&(name.to_string(), layer));
        require!(known, "weight {name} of layer {layer} is not one of this model's, or came twice");
        Ok(())
    }

    fn place(&self, name: &str, layer: usize) -> Result<Place> {
        let (shape, at) = (&self.model.shape, &self.model.at[layer]);
        let (dim, padded, hidden) = (shape.head_dim, shape.padded_head(), shape.hidden);
        let head = |first: usize, heads: usize| Place {
            offset: at.qkv,
            rows: heads * dim,
            k: hidden,
            first: first * padded,
            run: dim,
            stride: padded,
        };
        let plain = |offset: usize, rows: usize, k: usize| {
            let (run, stride) = (rows, rows);
            Place { offset, rows, k, first: 0, run, stride }
        };
        let half = PANEL / 2;
        let gated = |first: usize| {
            let (offset, rows) = (at.gate_up, shape.inner);
            Place { offset, rows, k: hidden, first, run: half, stride: PANEL }
        };
        Ok(match name {
            "q" => head(0, shape.heads),
            "k" => head(shape.heads, shape.kv_heads),
            "v" => head(shape.heads + shape.kv_heads, shape.kv_heads),
            "out" => plain(at.out, hidden, shape.heads * dim),
            "gate" => gated(0),
            "up" => gated(half),
            "down" => plain(at.down, hidden, shape.inner),
            "lm_head" => plain(self.model.head_at, shape.vocab, hidden),
            _ => return Err(Error::Invalid(format!("{name} is a vector"))),
        })
    }
}

fn expected(shape: &Shape) -> BTreeSet<(String, usize)> {
    let mut names = BTreeSet::new();
    let mut layer_names =
        vec!["q", "k", "v", "out", "gate", "up", "down", "input_norm", "post_norm"];
    layer_names.extend(shape.qkv_bias.then_some("qkv_bias"));
    layer_names.extend(shape.out_bias.then_some("out_bias"));
    layer_names.extend(shape.qk_norm.then_some(["q_norm", "k_norm"]).into_iter().flatten());
    for layer in 0..shape.layers {
        names.extend(layer_names.iter().map(|n| (n.to_string(), layer)));
    }
    names.extend(["lm_head", "final_norm", "cos", "sin"].map(|n| (n.to_string(), 0)));
    names.extend((!shape.tied).then(|| ("embedding".to_string(), 0)));
    names
}

/// Where element (column, k) of a packed matrix of depth `depth` is.
pub(crate) fn packed_index(column: usize, k: usize, depth: usize) -> usize {
    let square = (column / PANEL * (depth / 32) + k / 32) * 1024;
    let tile = column % PANEL / 16 * 512;
    square + tile + k % 32 / 2 * 32 + column % 16 * 2 + k % 2
}

/// # Safety
/// `target` must hold the whole packed matrix from `place.offset` on, and nobody else use it.
unsafe fn pack(place: &Place, values: &[u16], target: *mut u16) {
    for (n, row) in values.chunks_exact(place.k).enumerate() {
        let column = place.first + n / place.run * place.stride + n % place.run;
        for (i, pair) in row.as_chunks::<2>().0.iter().enumerate() {
            let at = place.offset + packed_index(column, 2 * i, place.k);
            // SAFETY: the caller's promise; a pair lies side by side.
            unsafe { target.add(at).cast::<[u16; 2]>().write_unaligned(*pair) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_is_a_bijection() {
        let (columns, depth) = (96, 64);
        let mut seen = vec![false; columns * depth];
        for column in 0..columns {
            for k in 0..depth {
                let at = packed_index(column, k, depth);
                assert!(!std::mem::replace(&mut seen[at], true), "({column}, {k}) shares {at}");
            }
        }
        assert!(seen.into_iter().all(|s| s));
    }
}
