"""Which batch sizes a device budget allows, asked of a function that makes the step of any of them."""

from __future__ import annotations

from collections.abc import Callable

from penstock.capture.tracer import fake_mode, trace
from penstock.core.arguments import require_types, type_phrase
from penstock.core.hardware import Hardware
from penstock.core.plan import Plan
from penstock.core.trace import Trace
from penstock.errors import InvalidArgument
from penstock.planners import Problem, solve
from penstock.planners.batch_sizes import BatchSizes, choose_batch_size
from penstock.units import parse_budget


def best_batch(
    make_step: Callable[[int], Callable[[], object]],
    hardware: Hardware,
    policy: str = "optimal",
    *,
    device_budget: int | str | None = None,
    device: str = "cpu",
    least: int = 1,
    most: int = 1 << 20,
    slowdown: float = 0.05,
    recompute: bool = True,
    time_limit_s: float = 2.0,
) -> BatchSizes:
    """The largest batch that runs in a device budget, the largest that is not slowed down, and the fastest a
    sample, each with its plan. Nothing is run: the steps of a few sizes are traced without memory.

        def make_step(samples):
            model = Model()
            optimizer = torch.optim.AdamW(model.parameters())
            batch = torch.randn(samples, 3, 224, 224)

            def step():
                model(batch).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        found = penstock.best_batch(make_step, hardware, device_budget="8GiB")
        found.largest.samples, found.unslowed.samples, found.fastest.samples

    make_step            returns a function that runs one iteration of a batch of so many samples. It is
                         called inside one `penstock.fake_mode()`: a model that it makes takes no memory, and
                         may serve all sizes
    policy               a name in penstock.planners.POLICIES
    device_budget        an integer, or text such as "600MiB"; all of the device's memory when not given
    device               where kernel times are for, as in `penstock.trace`
    least, most          samples that a batch may have
    slowdown             fraction of the step in memory that does not count as slower
    recompute            tensors may be recomputed instead of being moved
    time_limit_s         for planning one size; about ten are planned

    Raises BudgetTooSmall where not even ``least`` samples fit, with what their step needs, SpillSpaceFull
    where the lower tiers have no room, and InvalidArgument where a step cannot be traced without running it,
    or does not grow with its batch.
    """
    require_types(hardware=hardware)
    if not callable(make_step):
        raise InvalidArgument(
            f"make_step is {type_phrase(make_step)}: give a function of the number of samples"
        )
    budget = hardware.device_bytes if device_budget is None else parse_budget(device_budget)

    mode = fake_mode()

    def trace_of(samples: int) -> Trace:
        try:
            with mode:
                step = make_step(samples)
            return trace(step, device=device, mode=mode)
        except InvalidArgument:
            raise
        except (ValueError, RuntimeError) as error:  # such as batch normalization of a single value
            raise InvalidArgument(
                f"the step of a batch of {samples} cannot be traced: {str(error).rstrip('.')}. "
                "Where a batch has to have more samples, say so with `least`"
            ) from error

    def plan_of(trace: Trace) -> Plan:
        return solve(Problem(trace, hardware, budget, recompute, time_limit_s=time_limit_s), policy)

    return choose_batch_size(trace_of, plan_of, budget, least=least, most=most, slowdown=slowdown)
