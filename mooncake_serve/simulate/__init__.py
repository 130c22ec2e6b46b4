"""The cluster simulator: the product's eviction policies and routers against a trace.

The event loop and everything it decides with are Rust (`_store.policy`); this package reads
traces and profiles, runs sweeps, and prints or plots what came out.
`python -m mooncake_serve.simulate --help` shows the commands.
"""

from mooncake_serve.simulate.cli import main
from mooncake_serve.simulate.run import POLICIES, ROUTERS, Options, Profile, Trace, simulate

__all__ = ["POLICIES", "ROUTERS", "Options", "Profile", "Trace", "main", "simulate"]
