//! A Llama-family model's shapes and weights, packed once for the kernels.
//!
//! Owns: the packed matrices; norms, biases and rotation tables, as floats; the KV pool's memory.
//! A tied embedding is read out of the packed output matrix, so no weight is held twice.
//! Invariants: a `Model` has every weight it needs and never changes; a pool's blocks are zero
//! until a forward, or a load, writes them.
//! Fails: with [`Error::Invalid`](crate::Error) for shapes that the kernels do not take.

use std::sync::Mutex;

use crate::{
    Buffer, Dtype, Geometry, Isa, Pool, Result,
    error::require,
    ffi::{KEY_BLOCK, PANEL},
    forward::Scratch,
};

/// What the forward pass needs to know of a model.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head: 64, 80, 96 or 128.
    pub head_dim: usize,
    /// Width of the gated layer.
    pub inner: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Positions that the rotation tables cover.
    pub max_context: usize,
    /// Tokens of one KV block.
    pub block_tokens: usize,
    /// Epsilon of the norms.
    pub eps: f32,
    /// The embedding is the output matrix.
    pub tied: bool,
    /// Queries, keys and values have biases.
    pub qkv_bias: bool,
    /// The attention's output has a bias.
    pub out_bias: bool,
    /// Each query and key head is normed before its rotation.
    pub qk_norm: bool,
}

impl Shape {
    /// Refuses what the kernels cannot run.
    pub fn check(&self) -> Result<()> {
        let Self { layers, hidden, inner, vocab, max_context, head_dim, heads, .. } = *self;
        require!((1..=1024).contains(&layers), "{layers} layers");
        require!((1..=1 << 24).contains(&vocab), "a vocabulary of {vocab}");
        require!((1..=1 << 24).contains(&max_context), "a context of {max_context}");
        require!([64, 80, 96, 128].contains(&head_dim), "head_dim {head_dim}: 64, 80, 96 or 128");
        for (name, width) in
            [("hidden", hidden), ("inner", inner), ("heads x head_dim", heads * head_dim)]
        {
            require!(
                (1..=1 << 20).contains(&width) && width.is_multiple_of(32),
                "{name} is {width}, not a multiple of 32"
            );
        }
        self.geometry(1).check()
    }

    /// The attention of layer 0 over a pool of `blocks`.
    pub(crate) fn geometry(&self, blocks: usize) -> Geometry {
        Geometry {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            block_tokens: self.block_tokens,
            blocks,
            block_bytes: self.block_bytes(),
            k_offset: 0,
            v_offset: self.plane_bytes(),
            dtype: Dtype::Bf16,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
        }
    }

    /// Bytes of one layer's keys, or values, of one block.
    pub fn plane_bytes(&self) -> usize {
        self.block_tokens * self.kv_heads * self.head_dim * 2
    }

    /// Bytes of one KV block, all layers.
    pub fn block_bytes(&self) -> usize {
        2 * self.layers * self.plane_bytes()
    }

    pub(crate) fn padded_head(&self) -> usize {
        self.head_dim.next_multiple_of(PANEL)
    }

    pub(crate) fn matrices(&self) -> LayerMatrices<Matrix> {
        let all_heads = self.heads + 2 * self.kv_heads;
        LayerMatrices {
            qkv: Matrix { columns: all_heads * self.padded_head(), k: self.hidden },
            out: Matrix { columns: self.hidden, k: self.heads * self.head_dim },
            gate_up: Matrix { columns: 2 * self.inner, k: self.hidden },
            down: Matrix { columns: self.hidden, k: self.inner },
        }
    }
}

/// A packed matrix: outputs, and inputs of each.
#[derive(Clone, Copy)]
pub(crate) struct Matrix {
    pub(crate) columns: usize,
    pub(crate) k: usize,
}

impl Matrix {
    pub(crate) fn elements(&self) -> usize {
        self.columns.next_multiple_of(PANEL) * self.k
    }
}

/// One value for each matrix of a layer.
#[derive(Clone, Copy, Default)]
pub(crate) struct LayerMatrices<T> {
    pub(crate) qkv: T,
    pub(crate) out: T,
    pub(crate) gate_up: T,
    pub(crate) down: T,
}

/// A layer's small weights; empty where the model has none.
#[derive(Default)]
pub(crate) struct LayerVectors {
    pub(crate) input_norm: Vec<f32>,
    pub(crate) post_norm: Vec<f32>,
    pub(crate) qkv_bias: Vec<f32>,
    pub(crate) out_bias: Vec<f32>,
    pub(crate) q_norm: Vec<f32>,
    pub(crate) k_norm: Vec<f32>,
}

/// A loaded model. Several may live in one process; each has its own threads.
pub struct Model {
    pub(crate) shape: Shape,
    pub(crate) isa: Isa,
    pub(crate) team: Pool,
    pub(crate) weights: Buffer,
    pub(crate) at: Vec<LayerMatrices<usize>>,
    pub(crate) head_at: usize,
    /// Row-major embedding, unless it is tied.
    pub(crate) embedding_at: Option<usize>,
    pub(crate) vectors: Vec<LayerVectors>,
    pub(crate) final_norm: Vec<f32>,
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
    pub(crate) scratch: Mutex<Scratch>,
}

impl Model {
    /// The model's shapes.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Which kernels it runs on.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Bytes of its packed matrices.
    pub fn weight_bytes(&self) -> usize {
        self.weights.bytes()
    }
}

/// KV blocks of one model: `[block][layer][K|V][token][kv_head][head_dim]`, bf16.
pub struct KvPool {
    pub(crate) memory: Buffer,
    pub(crate) blocks: usize,
    block_bytes: usize,
}

impl KvPool {
    /// Zeroed and present.
    pub fn new(shape: &Shape, blocks: usize) -> Result<Self> {
        shape.geometry(blocks).check()?;
        require!(blocks > 0 && blocks <= i32::MAX as usize, "a pool of {blocks} blocks");
        let block_bytes = shape.block_bytes();
        let memory = Buffer::new(blocks * block_bytes)?;
        memory.populate()?;
        Ok(Self { memory, blocks, block_bytes })
    }

    /// Where it begins.
    pub fn address(&self) -> *mut u8 {
        self.memory.address()
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.blocks * self.block_bytes
    }
}

const _: () = assert!(KEY_BLOCK.is_multiple_of(32), "a block of keys is whole steps");
