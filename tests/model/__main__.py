"""The long form: see penstock's `make test-model`, and check.py."""

import sys

from tests.model.check import main

sys.exit(main(sys.argv[1:]))
