"""One optimizer update over all leaves, taken apart into a part for each leaf.

The whole update is traced once. Every value of the program then gets an owner: the leaf whose arrays it is made
from. What mixes leaves (a global norm, a count of non-finite elements) is *shared*: it is computed first, and
each leaf's part is then evaluated from that leaf's own arrays and the shared values alone. So one leaf's state
can be brought to the device, updated and taken away before the next one comes, for any transformation.

Only values of few elements may be shared. Leaves of which larger values mix form one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zeroj import _compat
from zeroj.optimizer.flow import Flow, Read, run_op, value_of

#: Values of at most this many elements may pass from one leaf's part to another's.
SMALL = 1024


@dataclass(frozen=True)
class SplitUpdate:
    """An update in parts.

    Attributes:
        groups: leaves that are updated together; most groups have one.
        inputs: for each group the inputs that its part reads and that belong to its leaves.
        outputs: for each group the outputs that its part makes.
        shared_inputs: inputs of leaves that the shared phase reads.
        shared_outputs: outputs that the shared phase makes (counters, and what mixes leaves).
        flow: the whole update as a list of operations.
    """

    groups: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    shared_inputs: tuple[int, ...]
    shared_outputs: tuple[int, ...]
    flow: Flow
    _wanted: tuple[int, ...]

    def shared(self, read: Read) -> tuple[dict[int, Any], dict[int, Any]]:
        """The first phase: (values that the parts need, outputs by index).

        Args:
            read: gives the value of an input; asked only for ``shared_inputs`` and inputs of no leaf, and for
                the same input again if other leaves were read in between.
        """
        known: dict[int, Any] = {}
        keep = set(self._wanted)
        for value in self._wanted:
            for op in self.flow.closure([value], known):
                known.update(run_op(op, known, read))
            if value not in known:
                known[value] = read(value)
            known = {v: x for v, x in known.items() if v in keep}
        return known, {i: value_of(self.flow.outs[i], known, read) for i in self.shared_outputs}

    def part(self, group: int, read: Read, shared: dict[int, Any]) -> dict[int, Any]:
        """One group's part: its outputs by index.

        Args:
            group: index into ``groups``.
            read: gives the value of an input; asked only for ``inputs[group]`` and inputs of no leaf.
            shared: what :meth:`shared` gave first.
        """
        known = dict(shared)
        for op in self.flow.closure(self.flow.values(self.outputs[group]), known):
            known.update(run_op(op, known, read))
        return {i: value_of(self.flow.outs[i], known, read) for i in self.outputs[group]}


def split_update(
    program: _compat.Program,
    inputs: Sequence[int | None],
    outputs: Sequence[int | None],
    small: int = SMALL,
) -> SplitUpdate:
    """Takes an update apart.

    Args:
        program: the traced update of all leaves.
        inputs: for each input the leaf that it belongs to (its param, gradient, state), or None.
        outputs: the same for each output; one of None goes to the leaf that it is made from, if it is one.
        small: values of at most this many elements may be shared.

    Returns:
        The parts. Every output is in exactly one of them.

    Example:
        >>> program, _ = _compat.trace(update, *leaves)
        >>> split = split_update(program, owners_in, owners_out)
        >>> values, outs = split.shared(flat.__getitem__)
        >>> for k in range(len(split.groups)):
        ...     outs |= split.part(k, flat.__getitem__, values)
    """
    leaves = sorted({k for k in (*inputs, *outputs) if k is not None})
    parent = {k: k for k in leaves}
    while True:
        owner = [None if k is None else _root(parent, k) for k in inputs]
        flow = Flow(program, owner, small)
        ends = [None if k is None else _root(parent, k) for k in outputs]
        merge = flow.merges | {pair for pair in _ends(flow, ends) if pair[0] != pair[1]}
        if not merge:
            break
        for a, b in merge:
            parent[_root(parent, a)] = _root(parent, b)
    return _assemble(flow, owner, ends, parent)


def _ends(flow: Flow, ends: list[int | None]) -> Iterable[tuple[int, int]]:
    """Outputs that another leaf's part would have to make: shared if small, else the leaves are one group."""
    for out, end in zip(flow.outs, ends, strict=True):
        owner = flow.owner_of(out)
        if end is None or owner is None or owner == end:
            continue
        assert isinstance(out, int)
        if flow.is_small(out):
            flow.exported.add(out)
        else:
            yield owner, end


def _assemble(
    flow: Flow, owner: list[int | None], ends: list[int | None], parent: dict[int, int]
) -> SplitUpdate:
    """Gives every output to a part, and finds what the parts need of each other."""
    roots = sorted({_root(parent, k) for k in parent})
    makers = [flow.owner_of(out) if end is None else end for out, end in zip(flow.outs, ends, strict=True)]
    outputs = [[i for i, maker in enumerate(makers) if maker == root] for root in roots]
    shared_outputs = [i for i, maker in enumerate(makers) if maker is None]
    wanted = {v for v in flow.values(shared_outputs) if v >= flow.num_inputs}
    reads: list[tuple[int, ...]] = []
    for part in outputs:
        used = flow.frontier(flow.values(part))
        wanted |= {v for v in used if flow.shareable(v)}
        reads.append(tuple(sorted(v for v in used if v < len(owner) and flow.owner_of(v) is not None)))
    order = flow.with_sources(wanted)
    seen = {v for value in order for v in flow.sources(value)}
    return SplitUpdate(
        tuple(tuple(sorted(k for k in parent if _root(parent, k) == root)) for root in roots),
        tuple(reads),
        tuple(tuple(part) for part in outputs),
        tuple(sorted(v for v in seen if v < len(owner) and owner[v] is not None)),
        tuple(shared_outputs),
        flow,
        order,
    )


def _root(parent: dict[int, int], k: int) -> int:
    while parent[k] != k:
        k = parent[k]
    return k
