"""Run on each rank: what was sent and received may leave once the program has waited for it."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import penstock
from tests.support.ranks import leave
from tests.support.runs import HARDWARE

STEPS, ELEMENTS = 6, 1 << 18  # 1 MiB; so many in a step, of which all stay


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with penstock.offload(device_budget="12MiB", spill_dir=sys.argv[1], hardware=HARDWARE) as run:
        kept = []
        for number in range(STEPS):
            with run.step():
                sent = [torch.full((ELEMENTS,), float(number + i + rank)) for i in range(3)]
                got = [torch.empty(ELEMENTS) for _ in sent]
                work = [dist.isend(each, 1 - rank, tag=i) for i, each in enumerate(sent)]
                work += [dist.irecv(each, 1 - rank, tag=i) for i, each in enumerate(got)]
                in_flight = run._clock._collectives._flights
                assert len(in_flight) >= len(work), "nobody has waited"
                for each in work:
                    each.wait()
                kept += [*sent, *got]
        assert not in_flight and not any(managed.pins for managed in run._clock.storages.all())
        assert run.report().peak_bytes <= 12 << 20
        for number in range(STEPS):
            for i in range(3):
                mine, other = kept[6 * number + i], kept[6 * number + 3 + i]
                assert float(mine.min()) == float(mine.max()) == number + i + rank
                assert float(other.min()) == float(other.max()) == number + i + 1 - rank
    leave()


main()
