"""From fractions of periods to whole ones: error diffusion."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.core.columns import FloatArray
from penstock.core.trace import Trace
from penstock.planners.optimal.search.choices import Choices
from penstock.simulator.actions import ACTIONS, KEEP

ActionArray = npt.NDArray[np.int8]

_SLIGHT = 0.03  # a fraction up to this is no reason to choose an action
_LOYALTY = 0.25  # of a tensor's size: what taking the same action as before counts for


def round_fractions(trace: Trace, choices: Choices, fractions: FloatArray) -> ActionArray:
    """[P] one action for each period, so that at any time each has about as many bytes as in ``fractions``.

    fractions   [P, A] of the linear program

    Periods are taken in the order in which they begin; what rounding adds or leaves out is carried on
    to the next. Persistent tensors, and periods that reach into the next iteration, carry their own.
    """
    actions: ActionArray = np.zeros(len(choices), dtype=np.int8)
    share = np.where(choices.allowed, fractions, 0.0).clip(0.0, 1.0)
    share[:, KEEP] = np.maximum(0.0, 1.0 - share[:, 1:].sum(axis=1))
    group = np.where(choices.end > trace.kernels, 2, np.where(trace.tensor_persistent[choices.tensor], 1, 0))
    before: dict[int, int] = {}
    for which in range(3):
        periods = np.flatnonzero(group == which)
        periods = periods[np.lexsort((-choices.size_bytes[periods], choices.begin[periods]))]
        owed = [0.0] * len(ACTIONS)
        for period in periods.tolist():
            size = float(choices.size_bytes[period])
            tensor = int(choices.tensor[period])
            parts = share[period].tolist()
            best, most = KEEP, -np.inf
            for action, part in enumerate(parts):
                owed[action] += part * size
                if part > _SLIGHT:
                    due = owed[action] + (_LOYALTY * size if before.get(tensor) == action else 0.0)
                    if due > most:
                        best, most = action, due
            owed[best] -= size
            actions[period] = best
            if best != KEEP:
                before[tensor] = best
    return actions
