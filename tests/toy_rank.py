"""A rank of the toy model as a process: ``python -m tests.toy_rank STAGES SECONDS DEVICE`` and what the launcher adds.

Every forward takes ``SECONDS`` in all, or, of several with commas between, those of
its rank. ``DEVICE`` is ``cpu``, or ``emulated`` for a GPU that is.
"""

import sys

from orchestrator.rank_main import main
from tests.local_pipeline import emulated_gpu, slice_loader
from tests.served_engine import Sizes
from tests.toy_model import toy_slices

if __name__ == "__main__":
    given = [float(seconds) for seconds in sys.argv[2].split(",")]
    forward_seconds = given if len(given) > 1 else given[0]
    slices = toy_slices(int(sys.argv[1]), forward_seconds=forward_seconds)
    open_gpu = emulated_gpu if sys.argv[3] == "emulated" else None
    sys.exit(main(sys.argv[4:], slice_loader(slices, Sizes().num_blocks, open_gpu)))
