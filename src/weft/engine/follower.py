"""Another rank of a sharded engine, `python -m weft.engine.follower FOLDER`: runs the engine of rank 0 with its own slices."""

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

from weft import log
from weft.engine.lockstep import AgreedChannel
from weft.engine.process import bring_up, end_with_parent, import_mlx_lm
from weft.engine.ranks import following
from weft.errors import ModelError
from weft.grammar.compiler import DEEP_STACK_BYTES, Compiler
from weft.kernels import blas


def main() -> None:
    """Load this rank's slices of the model and do what rank 0 does, until it shuts down or is gone."""
    folder = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    threading.stack_size(DEEP_STACK_BYTES)
    end_with_parent(os.getppid(), folder)
    report = blas.bind()
    import_mlx_lm()
    with following(folder) as (settings, rank):
        from weft.engine.host import Host

        log.setup(settings.log_format)
        try:
            engine, loaded = bring_up(settings, report, lambda *_: None, rank=rank)
        except ModelError:  # rank 0 finds the same, and says it
            return
        compiler = Compiler(loaded.folder / "tokenizer.json", loaded.vocab_size, loaded.eos_token_ids)
        assert compiler.tokenizer
        Host(engine, compiler, AgreedChannel(rank.lockstep, None), has_canary=False).run()


if __name__ == "__main__":
    main()
