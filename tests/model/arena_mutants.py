"""Mistakes that the arena has had, or could have: each must show."""

from __future__ import annotations

from tests.model.arena import Mutant

MUTANTS = [
    # What is written to the swap file is overtaken.
    Mutant(
        "an overtaken write becomes a copy",
        "gate.cpp",
        "  if (found->snapshot != snapshot) return Evicted::kChanged;\n",
        "",
    ),
    Mutant("a version changes no snapshot", "paging.cpp", "  ++block.snapshot;\n", ""),
    Mutant("a departure changes no snapshot", "gate.cpp", "  ++block.snapshot;\n", ""),
    Mutant(
        "what is written keeps its copy",
        "paging.cpp",
        "  if (!in_child_) block.copy.reset();  // a child's handler",
        "  // a child's handler",
    ),
    Mutant(
        "a guarded block keeps a copy that is written over",
        "paging.cpp",
        "  block->copy.reset();\n  if (loan",
        "  if (loan",
    ),
    Mutant(
        "what is out is guarded, and comes a moment later with its copy",
        "paging.cpp",
        "  if (!block->is_in()) return Answer::kNo;  // even if",
        "  if (!block->is_in()) return Answer::kYes;  // even if",
    ),
    # What was released while somebody used it.
    Mutant(
        "a staging area ends with its block",
        "arena.cpp",
        "    drop_staging(staging);\n    staging.copy.reset();\n",
        "    stagings_.erase(block->staging);\n",
    ),
    Mutant(
        "a staging area is given to others with its block",
        "landings.cpp",
        "  empty_landing(staging.landing);\n  in_memory_bytes_ -= std",
        "  drop_landing(staging.landing);\n  in_memory_bytes_ -= std",
    ),
    Mutant(
        "what was staged arrives without its memory",
        "landings.cpp",
        "  if (wanted && staging.landing.emptied) {\n",
        "  if (false) {\n",
    ),
    Mutant(
        "memory that is lent ends with its block", "arena.cpp", "  if (block.lends > 0)\n", "  if (false)\n"
    ),
    Mutant(
        "memory that is lent cannot be read once its block is released",
        "arena.cpp",
        "    protect(address, block.memory_bytes, PROT_READ);\n",
        "    {}\n",
    ),
    Mutant(
        "who faulted on lent memory before it was released finds nobody",
        "paging.cpp",
        "  if (block->place == Block::Place::kReleased) return Answer::kNo;  // it can be read since\n",
        "  if (block->place == Block::Place::kReleased) return Answer::kUnknown;\n",
    ),
    # The way back.
    Mutant(
        "what was dropped in a wait for room is read",
        "paging.cpp",
        "    if (block == nullptr || !block->is_out()) continue;  // somebody else was faster\n",
        "    if (block == nullptr || block->is_in()) continue;\n",
    ),
    Mutant(
        "what was dropped meanwhile cannot be had",
        "paging.cpp",
        "    if (error == ENODATA && !in_child_) return Answer::kAsk;\n",
        "",
    ),
    Mutant(
        "an older copy is staged",
        "landings.cpp",
        " || block->copy->in_swap_file || block",
        " || block",
    ),
    Mutant(
        "what was staged arrives over a newer copy",
        "landings.cpp",
        "block->is_out() && block->copy == staging.copy;",
        "block->is_out();",
    ),
    Mutant(
        "what was read arrives over a newer copy",
        "paging.cpp",
        "block != nullptr && block->is_out() && block->copy == copy;",
        "block != nullptr && block->is_out();",
    ),
    Mutant(
        "what comes back writable keeps its copy",
        "landings.cpp",
        "  if (!guard)\n    change_bytes(block);\n  else if",
        "  if",
    ),
    # Events.
    Mutant(
        "what has come back keeps its event",
        "landings.cpp",
        "  drop_event(block);\n  if (!guard)\n",
        "  if (!guard)\n",
    ),
    Mutant("what has left keeps its event", "gate.cpp", "  else\n    drop_event(block);\n", ""),
    Mutant(
        "what has left for a copy of its own keeps its event",
        "copies.cpp",
        "    drop_event(block);\n    return Answer::kYes;\n",
        "    return Answer::kYes;\n",
    ),
    # Counters.
    Mutant("what leaves and does not count is counted out", "gate.cpp", "  own(block);\n", ""),
    # System calls.
    Mutant(
        "what is held for the system stays protected",
        "gate.cpp",
        "  if (*error == 0 && block->guarded && !make_writable(*block)) *error = errno;\n",
        "",
    ),
    # The end.
    Mutant("closing waits for no write", "paging.cpp", "    while (writes_ > 0) changed_.wait(lock);\n", ""),
    Mutant(
        "who waits for I/O is not told of its end",
        "arena.hpp",
        "    arena_.changed_.notify();\n",
        "",
    ),
    Mutant(
        "I/O that is over stays under way",
        "arena.hpp",
        "    if (auto* block = arena_.of_serial(serial_)) block->moving = Block::Moving::kNot;\n",
        "",
    ),
    # A child.
    Mutant(
        "a child reads what its parent has written over",
        "paging.cpp",
        "    if (stale) error = ESTALE;\n",
        "",
        ("--forks", "--only", "X in a slot; fork; write X; leave by direct I/O X"),
    ),
    # Packed copies.
    Mutant(
        "a packed copy is emptied while it is read",
        "gate.cpp",
        "!block->is_out() || block->moving != Block::Moving::kNot || !block->copy->in_memory()",
        "!block->is_out() || !block->copy->in_memory()",
        ("--only", "make from Y"),
        real=True,
    ),
    Mutant(
        "memory of a packed copy is given to others while it is written",
        "gate.cpp",
        "      empty_landing(packed->memory);\n",
        "      drop_landing(packed->memory);\n",
        ("--only", "make from Y"),
        real=True,
    ),
    Mutant(
        "what was written leaves for an older copy",
        "copies.cpp",
        "  if (block.written() || block.is_dropped()",
        "  if (block.is_dropped()",
    ),
    Mutant(
        "what is packed ends with its block",
        "copies.cpp",
        "  const Visit visit(*this, *block);\n",
        "",
        ("--large", "--only", "pack X; release X", "--seconds", "60"),
        real=True,
    ),
]
