//! The codec's container: any bytes are decoded or refused.

use mooncake_codec::{
    BlockWriter, Codec, Dtype, Encoder, Header, Shape, checksum, decode_into, verify,
};

/// Blocks beyond this only cost time.
const RAW_MAX: usize = 1 << 20;

/// The header's own checksum is made right first, so that the planes are reached.
pub fn run(bytes: &[u8]) {
    let mut container = bytes.to_vec();
    if container.len() < 64 {
        return;
    }
    let planes = u32::from_le_bytes([container[8], container[9], container[10], container[11]]);
    let head = (64 + 24 * planes as usize).next_multiple_of(64);
    if head > container.len() {
        return;
    }
    container[..6].copy_from_slice(b"MKVB\x01\x00");
    container[32..40].fill(0);
    let sum = checksum(&container[..head]);
    container[32..40].copy_from_slice(&sum.to_le_bytes());
    let Ok(header) = Header::parse(&container) else { return };
    let Some(raw) = header.shape.raw_bytes().filter(|raw| *raw <= RAW_MAX) else { return };
    let mut out = vec![0; raw];
    assert_eq!(decode_into(&container, &mut out).is_ok(), verify(&container).is_ok());
}

/// A small block under each codec.
pub fn samples() -> Vec<Vec<u8>> {
    let shape = Shape { dtype: Dtype::Bf16, planes: 2, tokens: 32, channels: 64 };
    let plane: Vec<u8> = (0..32 * 64u32).flat_map(|at| [(at * 37) as u8, 0x3f]).collect();
    let block = |codec| {
        let (mut encoder, mut out) = (Encoder::new(), vec![0; 1 << 16]);
        let mut writer = BlockWriter::new(&mut encoder, codec, shape, &mut out).expect("room");
        for _ in 0..shape.planes {
            writer.plane(&plane).expect("room");
        }
        let len = writer.finish().expect("all planes");
        out.truncate(len);
        out
    };
    [Codec::None, Codec::Fast, Codec::Dense].map(block).to_vec()
}
