"""mooncake_serve: the memory layer for long-context LLM serving on Ray."""
