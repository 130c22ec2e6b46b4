//! Block keys: a chain of BLAKE3 hashes over a namespace and token ids.
//!
//! `root = H(namespace ‖ tenant salt)`, `key_i = H(key_{i-1} ‖ tokens of block i as u32 le)`. A key
//! therefore names a block *and* everything before it, so equal keys mean equal prefixes. Nothing
//! here depends on the process, the machine or a seed: the same input gives the same bytes
//! everywhere, which a golden vector in the tests pins. These functions cannot fail.

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;

/// A BLAKE3 digest that names a block.
pub type Key = [u8; KEY_BYTES];

/// The key that stands for "no parent" on the wire; no digest is all zeros in practice.
pub const NO_KEY: Key = [0; KEY_BYTES];

const ROOT_CONTEXT: &str = "mooncake_serve 2026 block key root v1";
const SALT_CONTEXT: &str = "mooncake_serve 2026 tenant salt v1";

/// The root of all chains of one namespace and tenant.
///
/// `tenant_salt` is empty for the shared tenant. The lengths are hashed too, so no two pairs of
/// namespace and salt give the same input.
pub fn root_key(namespace: &str, tenant_salt: &[u8]) -> Key {
    let mut hasher = blake3::Hasher::new_derive_key(ROOT_CONTEXT);
    for part in [namespace.as_bytes(), tenant_salt] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    *hasher.finalize().as_bytes()
}

/// Keys of the ⌊len / block_tokens⌋ full blocks of `token_ids`, in order.
///
/// # Panics
/// If `block_tokens` is 0.
pub fn block_keys(
    namespace: &str,
    salt: &[u8],
    token_ids: &[u32],
    block_tokens: usize,
) -> Vec<Key> {
    let mut parent = root_key(namespace, salt);
    let mut bytes = Vec::with_capacity(block_tokens * 4);
    let mut keys = Vec::with_capacity(token_ids.len() / block_tokens);
    for block in token_ids.chunks_exact(block_tokens) {
        bytes.clear();
        bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
        let mut hasher = blake3::Hasher::new();
        hasher.update(&parent);
        hasher.update(&bytes);
        parent = *hasher.finalize().as_bytes();
        keys.push(parent);
    }
    keys
}

/// The salt of a tenant: keyed BLAKE3 of its name under the cluster's secret.
pub fn tenant_salt(cluster_secret: &[u8], tenant: &str) -> Key {
    let key = blake3::derive_key(SALT_CONTEXT, cluster_secret);
    *blake3::keyed_hash(&key, tenant.as_bytes()).as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(key: &Key) -> String {
        key.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn only_full_blocks_have_keys() {
        let tokens: Vec<u32> = (0..11).collect();
        assert_eq!(block_keys("ns", b"", &tokens, 4).len(), 2);
        assert_eq!(block_keys("ns", b"", &tokens[..3], 4).len(), 0);
    }

    #[test]
    fn a_key_depends_on_everything_before_it() {
        let tokens: Vec<u32> = (0..8).collect();
        let mut other = tokens.clone();
        other[0] = 99;
        let (a, b) = (block_keys("ns", b"", &tokens, 4), block_keys("ns", b"", &other, 4));
        assert_ne!(a[0], b[0]);
        assert_ne!(a[1], b[1]);
        assert_eq!(a[..1], block_keys("ns", b"", &tokens[..4], 4)[..]);
    }

    #[test]
    fn namespace_and_salt_do_not_run_together() {
        assert_ne!(root_key("ab", b"c"), root_key("a", b"bc"));
        assert_ne!(tenant_salt(b"secret", "a"), tenant_salt(b"secret", "b"));
        assert_ne!(tenant_salt(b"secret", "a"), tenant_salt(b"other", "a"));
    }

    #[test]
    fn the_golden_vector_holds() {
        let tokens: Vec<u32> = (0..8).collect();
        let salt = tenant_salt(b"cluster", "acme");
        let keys = block_keys("model/bf16/256", &salt, &tokens, 4);
        assert_eq!([hex(&salt), hex(&keys[0]), hex(&keys[1])], GOLDEN);
    }

    const GOLDEN: [&str; 3] = [
        "26607d86a44aca467d51a04873b594a48ebb10da79d4c848fd20b0993e1692f6",
        "059c201b263e5d0e66edd1ff9b6629f35ed23795d070f846f00e08757c0fe3ad",
        "d6cd8ab77c4fb4dd069ce1886aed0aa01b06f7d29cd8481aa30a32f2792f19c0",
    ];
}
