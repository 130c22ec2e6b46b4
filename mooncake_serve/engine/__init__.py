"""The engine: continuous batching over a paged KV pool that shares its blocks."""
