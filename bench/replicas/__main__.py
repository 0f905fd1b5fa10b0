"""`python -m bench.replicas [PART…]`: what a pool of replicas costs and bears; each figure is printed with its bar.

Parts: offer, failures, fronts (fake engines with steps of a known length, since eight real ones would measure this machine's
cores), and real (tiny-hybrid). What must hold on any machine is a test (tests/serving/test_pool.py, test_gate.py, tests/faults).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from bench.replicas.failures import failures
from bench.replicas.fronts import fronts
from bench.replicas.offer import offer
from bench.replicas.real import real

PARTS: dict[str, Callable[[], None]] = {"offer": offer, "failures": failures, "fronts": fronts, "real": real}


def main() -> None:
    """Run the named parts, or all."""
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
