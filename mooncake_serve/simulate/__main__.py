"""`python -m mooncake_serve.simulate`."""

import sys

from mooncake_serve.errors import MooncakeError
from mooncake_serve.simulate.cli import main

try:
    sys.exit(main(sys.argv[1:]))
except MooncakeError as err:
    sys.exit(f"simulate: {err}")
