"""The search finds the only bad interleaving of a toy, by the shortest path, and ends."""

from __future__ import annotations

from functools import partial

from tests.model.explorer import Run, Search, Violation


def increments(run: Run, atomic: bool) -> None:
    """Two threads add one to a counter: each reads, then writes."""
    counter, read, done = 0, [None, None], [False, False]
    while True:
        options = [f"{thread}" for thread in range(2) if not done[thread]]
        state = (counter, tuple(read), tuple(done))
        choice = run.pick(options, partial(tuple, state)) if options else None
        if choice is None:
            break
        thread = int(choice)
        if read[thread] is None and not atomic:
            read[thread] = counter
        else:
            counter, done[thread] = (counter if atomic else read[thread]) + 1, True
    if all(done) and counter != 2:
        raise Violation(f"the counter is {counter}")


def test_a_lost_update_is_found_by_the_shortest_path():
    found = Search(lambda run: increments(run, atomic=False)).explore()
    assert str(found.violation) == "the counter is 1"
    assert len(found.path) == 4


def test_a_program_without_a_race_is_explored_to_its_end():
    found = Search(lambda run: increments(run, atomic=True)).explore()
    assert found.closed and found.violation is None
    assert found.states == 3  # neither, one, the other; where both are done nothing is asked


def test_a_bound_is_said_to_be_hit():
    found = Search(lambda run: increments(run, atomic=True), most_states=1).explore()
    assert not found.closed and "bound hit" in str(found)


def test_what_cannot_be_repeated_is_counted():
    turn = iter(range(100))

    def changes(run: Run) -> None:
        while run.pick([f"{next(turn)}"], lambda: run.position) is not None:
            pass

    found = Search(changes).explore()
    assert found.diverged == 1 and found.violation is None
