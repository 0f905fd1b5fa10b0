"""What stands in the signature of a block of thinking: our name, and the thinking itself where it is not to be shown.

Nothing is signed: a signature that comes back is not checked. `reply` makes them, `blocks` reads them.
"""

from __future__ import annotations

import base64
import binascii

NAME = "weft"


def signature(thinking: str, is_hidden: bool) -> str:
    """The signature of this thinking; hidden thinking travels in it, so that the next prompt can have it."""
    return f"{NAME}:{base64.b64encode(thinking.encode()).decode()}" if is_hidden else NAME


def hidden(signed: str) -> str:
    """The thinking that a signature carries; "" for one without, or of somebody else."""
    name, _, data = signed.partition(":")
    try:
        return base64.b64decode(data, validate=True).decode() if name == NAME else ""
    except (binascii.Error, UnicodeDecodeError):
        return ""
