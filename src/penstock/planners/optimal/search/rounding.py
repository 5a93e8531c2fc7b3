"""From fractions of periods to whole ones: error diffusion."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.core.columns import FloatArray
from penstock.core.trace import Trace
from penstock.planners.optimal.search.choices import KEEP, WAYS, Choices

HowArray = npt.NDArray[np.int8]

_SLIGHT = 0.03  # a fraction up to this is no reason to choose a way
_LOYALTY = 0.25  # of a tensor's size: what going the way it went before counts for


def round_fractions(trace: Trace, choices: Choices, fractions: FloatArray) -> HowArray:
    """[P] one way for each period, so that at any time about as many bytes go each way as in ``fractions``.

    fractions   [P, WAYS] of the relaxation

    Periods are taken in the order in which they begin; what rounding adds or leaves out is carried on
    to the next. Persistent tensors, and periods that reach into the next iteration, carry their own.
    """
    how: HowArray = np.zeros(len(choices), dtype=np.int8)
    share = np.where(choices.allowed, fractions, 0.0).clip(0.0, 1.0)
    share[:, KEEP] = np.maximum(0.0, 1.0 - share[:, 1:].sum(axis=1))
    group = np.where(choices.end > trace.kernels, 2, np.where(trace.tensor_persistent[choices.tensor], 1, 0))
    before: dict[int, int] = {}
    for which in range(3):
        periods = np.flatnonzero(group == which)
        periods = periods[np.lexsort((-choices.size_bytes[periods], choices.begin[periods]))]
        owed = [0.0] * WAYS
        for period in periods.tolist():
            size = float(choices.size_bytes[period])
            tensor = int(choices.tensor[period])
            parts = share[period].tolist()
            best, most = KEEP, -np.inf
            for way, part in enumerate(parts):
                owed[way] += part * size
                if part > _SLIGHT:
                    due = owed[way] + (_LOYALTY * size if before.get(tensor) == way else 0.0)
                    if due > most:
                        best, most = way, due
            owed[best] -= size
            how[period] = best
            if best != KEEP:
                before[tensor] = best
    return how
