//! What a store is told about its peers.

use std::path::PathBuf;

/// Files of mutual TLS, PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The authority that signs every store of the cluster.
    pub ca: PathBuf,
    /// This store's certificate, and those between it and the authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The name that every store's certificate carries.
    pub name: String,
}

/// How a store meets others. The default meets nobody.
#[derive(Clone, Default)]
pub struct PeerSettings {
    /// `host:port` to listen on; port 0 takes a free one. None: others cannot fetch from here.
    pub listen: Option<String>,
    /// The secret that all stores of a cluster share.
    pub token: Option<Vec<u8>>,
    /// Mutual TLS instead of plain TCP.
    pub tls: Option<TlsFiles>,
    /// Rate of all blocks sent to peers together; None for as fast as they go.
    pub max_bytes_per_s: Option<u64>,
    /// This node's name among its peers, unique in the cluster.
    pub node: String,
    /// Most memory of the cluster index.
    pub index_bytes: Option<u64>,
}

impl std::fmt::Debug for PeerSettings {
    /// Without the token.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerSettings")
            .field("node", &self.node)
            .field("listen", &self.listen)
            .field("tls", &self.tls)
            .field("max_bytes_per_s", &self.max_bytes_per_s)
            .finish_non_exhaustive()
    }
}
