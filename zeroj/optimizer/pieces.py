"""How large leaves are cut: an elementwise update of a leaf can be made piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zeroj.optimizer.flow import Const, Flow, Op
from zeroj.optimizer.partition import SplitUpdate
from zeroj.plan.cuts import PIECE_BYTES, Cut, cut_along, state_piece_bytes
from zeroj.plan.memory import shard_bytes
from zeroj.plan.plan import ParamLeaf, Plan

#: Unless "sub_group_size" says otherwise, at most so many pieces: each is part of the program, and is compiled.
MAX_PIECES = 32

#: Primitives that make each element of their result from the same element of their operands, or leave the
#: other dims' order alone. What is not here (a product, a mean, random numbers) is made of whole leaves.
ELEMENTWISE = frozenset(
    "abs add add_any and atan2 broadcast_in_dim cbrt ceil clamp convert_element_type copy copy_p cos div eq erf"
    " exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg nextafter not"
    " or pad pow reduce_precision rem round rsqrt select_n sharding_constraint sign sin slice sqrt square"
    " squeeze stop_gradient sub tan tanh xor".split()
)


@dataclass(frozen=True)
class Piece:
    """One piece of a group's update: all of it where ``cut`` is None."""

    group: int
    cut: Cut | None = None
    index: int = 0

    @property
    def start(self) -> int:
        """Where along the cut's dim it begins."""
        return self.index * self.cut.size if self.cut else 0


def piece_bytes(plan: Plan) -> int:
    """Bytes of a device's optimizer state that one piece should have at most."""
    host = [(s.placement, s.dtype) for s in plan.state_leaves if s.placement.memory]
    masters = [(plan.master_placement(x), plan.master_dtype(x)) for x in plan.leaves if x.trainable]
    total = sum(shard_bytes(plan, p, d) for p, d in host + [m for m in masters if m[0].memory])
    given = state_piece_bytes(plan, total)
    return max(PIECE_BYTES, total // MAX_PIECES) if given is None else given


def cuts_of(plan: Plan, split: SplitUpdate, limit: int) -> dict[int, Cut]:
    """Group -> its cut, for the groups that hold more than ``limit`` bytes and can be cut."""
    live = [leaf for leaf in plan.leaves if leaf.trainable]
    found = {}
    for group, members in enumerate(split.groups):
        if len(members) > 1 or not (live[members[0]].state_memory or live[members[0]].param_memory):
            continue
        leaf = live[members[0]]
        cut = cut_along(leaf.placement, math.ceil(leaf_bytes(plan, leaf) / max(limit, 1)))
        if cut and _elementwise(split, group, leaf, cut.dim):
            found[group] = cut
    return found


def file_cuts(plan: Plan, split: SplitUpdate) -> dict[int, Cut]:
    """Group -> how its files are cut, for the groups that can be updated so."""
    live = [leaf for leaf in plan.leaves if leaf.trainable]
    single = {g: live[members[0]] for g, members in enumerate(split.groups) if len(members) == 1}
    cuts = {g: plan.file_cuts[leaf.path] for g, leaf in single.items()}
    return {g: cut for g, cut in cuts.items() if cut and _elementwise(split, g, single[g], cut.dim)}


def piece_plan(plan: Plan, split: SplitUpdate, cuts: dict[int, Cut]) -> Plan:
    """The plan of a model whose cut leaves have the shape of one piece."""
    live = [leaf for leaf in plan.leaves if leaf.trainable]
    by_path = {live[split.groups[g][0]].path: cut for g, cut in cuts.items()}
    leaves = tuple(
        replace(x, placement=x.placement.cut(by_path[x.path].dim, by_path[x.path].size))
        if x.path in by_path
        else x
        for x in plan.leaves
    )
    state = tuple(
        replace(s, placement=s.placement.cut(by_path[s.of].dim, by_path[s.of].size)) if s.of in by_path else s
        for s in plan.state_leaves
    )
    return replace(plan, leaves=leaves, state_leaves=state)


def in_order(turns: Sequence[int], cuts: dict[int, Cut], first: Callable[[int], bool]) -> Iterator[Piece]:
    """All pieces: groups that are ``first``, then by the turns of the groups, pieces of different leaves in turn.

    Two pieces of one leaf that follow each other would wait for each other, since a leaf is updated in place.

    Args:
        turns: for each group when its turn is; groups of equal ones are mixed.
        cuts: group -> how it is cut.
        first: whether a group goes before all others.
    """
    pieces = [
        (first(g) is False, turn, (i + 0.5) / (cut.count if cut else 1), g, Piece(g, cut, i))
        for g, turn in enumerate(turns)
        for cut in [cuts.get(g)]
        for i in range(cut.count if cut else 1)
    ]
    yield from (piece for *_, piece in sorted(pieces, key=lambda item: item[:4]))


def leaf_bytes(plan: Plan, leaf: ParamLeaf) -> int:
    """Bytes of a device's part of a leaf's master and optimizer state."""
    total = sum(shard_bytes(plan, s.placement, s.dtype) for s in plan.state_leaves if s.owner == leaf.path)
    return total + shard_bytes(plan, plan.master_placement(leaf), plan.master_dtype(leaf))


def _elementwise(split: SplitUpdate, group: int, leaf: ParamLeaf, dim: int) -> bool:
    """Whether every piece along ``dim`` of what the group makes comes from the same piece of what it reads."""
    flow = split.flow
    targets = flow.values(split.outputs[group])
    shared = {v for v in flow.frontier(targets) if flow.shareable(v)}

    def fits(operand: int | Const) -> bool:
        shape = flow.shape(operand)
        whole = len(shape) == len(leaf.shape) and shape[dim] == leaf.shape[dim]
        return shape == () or (whole and not isinstance(operand, Const))

    def simple(op: Op) -> bool:
        return op.name in ELEMENTWISE and all(map(fits, (*op.operands, *op.outputs)))

    return (
        all(map(simple, flow.closure(targets, shared)))
        and all(map(fits, split.inputs[group]))
        and all(flow.shape(v) != () and fits(v) for v in targets)
        and len(targets) == len(split.outputs[group])
    )


def same_operations(flow: Flow, other: Flow) -> bool:
    """Whether two programs differ in shapes alone, so that values of one have the same number in the other."""
    return [(op.name, op.outputs) for op in flow.ops] == [(op.name, op.outputs) for op in other.ops]
