"""Benchmarks: `mooncake-serve bench …`, each beside its peers in the same run."""
