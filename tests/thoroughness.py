"""How much is looked at: `make conformance` wants everything, `make test` what is worth its minutes."""

from __future__ import annotations

import os

ALL = bool(os.environ.get("WEFT_TEST_ALL"))
