"""What averaging gradients over the devices of one machine takes, by way of the host and round a ring.

For machines whose devices share one bus and have no links among each other (moDNN 6.1). Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExchangeTime:
    """Seconds, for one bucket by itself.

    host_s         gradients to the host, their sum there, and the mean back (moDNN 6.2)
    all_reduce_s   a ring all-reduce between the devices
    """

    host_s: float
    all_reduce_s: float


def predict_exchange(
    size_bytes: int, ranks: int, bus_bytes_per_s: float, sum_bytes_per_s: float, *, peer_copies: bool = False
) -> ExchangeTime:
    """Predict both from what crosses the bus, and what the host's memory has to bring.

    size_bytes        of the bucket, on each rank
    bus_bytes_per_s   of all devices together
    sum_bytes_per_s   of gradients that the host reads to add them up, all ranks together
    peer_copies       devices reach each other over the bus. Without, what goes from one to another crosses
                      it twice: to the host and from there (moDNN 6.1)

    Host accumulation moves ``size_bytes`` to the host and back on each rank, 2 `cudaMemcpy` each (moDNN 6.2,
    "2M cudaMemcpy calls"), and reads the gradients of all ranks once. A ring moves 2 (ranks - 1) / ranks of
    the bucket from each rank to the next: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms",
    2009. Its sums, on the devices, count for nothing, and so do latencies: it has 2 (ranks - 1) of them.
    """
    moved_bytes = 2 * (ranks - 1) * size_bytes * (1 if peer_copies else 2)
    return ExchangeTime(
        host_s=2 * ranks * size_bytes / bus_bytes_per_s + ranks * size_bytes / sum_bytes_per_s,
        all_reduce_s=moved_bytes / bus_bytes_per_s,
    )
