//! Listing what is stored, a piece at a time.

use super::{Index, NONE, NodeId};
use crate::key::Key;

impl Index {
    /// Keys of readable blocks, each with its parent's, from node `from` on, `limit` at most; and
    /// where to go on, or None at the end. A block put or evicted between two calls may be listed or
    /// not.
    pub fn list(&self, from: NodeId, limit: usize) -> (Vec<(Key, Option<Key>)>, Option<NodeId>) {
        let mut found = Vec::new();
        for node in from..self.nodes.len() as NodeId {
            if found.len() == limit {
                return (found, Some(node));
            }
            if self.readable(node) {
                let parent = self.nodes[node as usize].parent;
                let parent = (parent != NONE).then(|| self.nodes[parent as usize].key);
                found.push((self.nodes[node as usize].key, parent));
            }
        }
        (found, None)
    }
}
