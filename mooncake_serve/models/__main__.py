"""`python -m mooncake_serve.models ID`: fetch and convert a model ahead of its first use."""

import sys

from mooncake_serve.config import ModelConfig
from mooncake_serve.errors import ModelError
from mooncake_serve.models.resolve import resolve_model
from mooncake_serve.progress import say


def main() -> int:
    """Exit status: 0 ready, 1 not available, 2 wrong usage."""
    if len(sys.argv) != 2:
        say("usage: python -m mooncake_serve.models ID")
        return 2
    try:
        say(f"model in {resolve_model(ModelConfig(id=sys.argv[1]))}")
    except ModelError as err:
        say(str(err))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
