"""The tree of computed prompts on its own: who goes first when there is no room, and why a prompt missed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from driver import Clock
from weft.ipc.messages import PrefixReuse
from weft.memory.prefix_tree import MAX_EVICTED_KEYS, Node, PrefixTree


@dataclass(frozen=True)
class Bytes:
    nbytes: int

    def split(self, count: int) -> tuple[Bytes, Bytes]:
        return Bytes(count), Bytes(self.nbytes - count)


BLOCK, CHECKPOINT = Bytes(10), Bytes(2)


def tree_of(budget: int = 10_000) -> PrefixTree:
    return PrefixTree(budget, Clock(tick=1.0))


def grown(tree: PrefixTree, *chunks: tuple[int, ...], salt: str = "", is_retained: bool = False, use: bool = True) -> Node:
    """A sequence that computed these chunks and left."""
    node = tree.root(salt)
    tree.pin(node)
    for tokens in chunks:
        after = tree.enter(node, tokens, BLOCK, CHECKPOINT, is_retained=is_retained)
        tree.pin(after)
        tree.unpin(node)
        node = after
    if use:
        node.keep = True
        tree.unpin(node)
    return node


def used(tree: PrefixTree, *chunks: tuple[int, ...]) -> Node:
    found = matched(tree, *chunks)
    tree.hit(found)
    return found


def matched(tree: PrefixTree, *chunks: tuple[int, ...], salt: str = "") -> Node:
    prompt = [token for chunk in chunks for token in chunk]
    return tree.match([*prompt, 0], tree.root(salt), itertools.accumulate(map(len, chunks)))


def test_one_off_prompts_do_not_push_a_conversation_out() -> None:
    tree = tree_of(budget=120)
    grown(tree, (1, 2), (3, 4), (5, 6))
    used(tree, (1, 2), (3, 4), (5, 6))
    for number in range(100, 140):
        grown(tree, (number, 1), (number, 2))

    assert used(tree, (1, 2), (3, 4), (5, 6)).length == 6
    assert tree.held_bytes <= 120


def test_a_prompt_whose_client_will_come_again_is_protected_from_the_start() -> None:
    tree = tree_of(budget=120)
    grown(tree, (1, 2), (3, 4), is_retained=True)
    grown(tree, (7, 8), (9, 9))
    for number in range(100, 140):
        grown(tree, (number, 1), (number, 2))

    assert used(tree, (1, 2), (3, 4)).length == 4
    assert used(tree, (7, 8), (9, 9)).length == 0


def test_a_conversation_that_is_over_makes_room_for_new_ones() -> None:
    tree = tree_of(budget=120)
    for number in range(20):
        grown(tree, (number, 1), (number, 2))
        used(tree, (number, 1), (number, 2))

    assert used(tree, (19, 1), (19, 2)).length == 4
    assert used(tree, (0, 1), (0, 2)).length == 0


def test_a_new_conversation_is_kept_beside_a_protected_one_that_fills_its_share() -> None:
    tree = tree_of(budget=120)
    for number in range(5):
        grown(tree, (number, 1), (number, 2), is_retained=True)
    grown(tree, (50, 1), (50, 2))

    assert used(tree, (50, 1), (50, 2)).length == 4


def test_what_nobody_can_go_on_from_is_not_kept() -> None:
    tree = tree_of()
    end = grown(tree, (1,), (2,), (3,), (4,), (5,), (6,))
    assert [node.checkpoint is not None for node in end.path()] == [False, False, False, True, False, True]

    tree.shrink(tree.held_bytes - 1)

    assert matched(tree, (1,), (2,), (3,), (4,), (5,), (6,)).length == 4
    assert len(tree) == 4  # the fifth went with the sixth: no prompt could have begun there


def test_what_a_sequence_goes_on_from_stays_with_its_checkpoint() -> None:
    tree = tree_of()
    node = tree.enter(tree.root(), (1, 2), BLOCK, CHECKPOINT)
    for _ in range(2):
        tree.pin(node)
    tree.enter(node, (3, 4), BLOCK, CHECKPOINT)  # with one child, its checkpoint is worth nothing to later prompts
    tree.unpin(node)
    tree.shrink(0)

    assert node.checkpoint is CHECKPOINT
    assert list(tree.nodes()) == [node]
    tree.unpin(node)
    tree.shrink(0)
    assert len(tree) == 0


def test_salts_do_not_share_and_leave_nothing_behind() -> None:
    tree = tree_of()
    grown(tree, (1, 2), salt="mine")

    assert matched(tree, (1, 2)).length == 0
    assert matched(tree, (1, 2), salt="mine").length == 2
    tree.clear()
    assert tree.held_bytes == 0
    assert ("", "mine") not in tree.roots


def test_what_is_thrown_out_is_found_by_nobody_and_weighs_nothing() -> None:
    tree = tree_of()
    standing = grown(tree, (1, 2), (3, 4), (5, 6), use=False)
    grown(tree, (1, 2), (9, 9))

    assert tree.invalidate(standing.path()[1]) == 2
    assert matched(tree, (1, 2), (3, 4)).length == 2
    behind = tree.enter(standing, (7, 8), BLOCK, CHECKPOINT)  # whoever stands there goes on without troubling others
    assert behind.is_detached
    tree.unpin(standing)
    assert tree.held_bytes == sum(node.nbytes for node in tree.nodes())
    assert len(tree) == 2


class TestCuts:
    @pytest.mark.parametrize("own_cuts", [True, False])
    def test_only_a_tree_of_own_cuts_asks_where_a_prompt_was_cut(self, own_cuts: bool) -> None:
        tree = PrefixTree(10_000, own_cuts=own_cuts)
        grown(tree, (1, 2), (3, 4), (5, 6))

        assert matched(tree, (1,), (2, 3, 4), (5, 6)).length == (0 if own_cuts else 6)
        assert matched(tree, (1, 2), (3, 4), (5, 6)).length == 6

    def test_the_last_token_is_left_to_be_computed(self) -> None:
        tree = tree_of()
        grown(tree, (1, 2), (3, 4))

        assert tree.match([1, 2, 3, 4], tree.root(), iter(())).length == 0  # the checkpoint after the first was not kept
        grown(tree, (1, 2))
        assert tree.match([1, 2, 3, 4], tree.root(), iter(())).length == 0  # the third would be computed alone
        assert tree.match([1, 2, 3, 4, 5], tree.root(), iter(())).length == 4
        assert tree.match([1, 2, 3], tree.root(), iter(())).length == 2

    def test_prompts_are_cut_where_most_of_them_part(self) -> None:
        tree = tree_of()
        prompt, cut = list(range(100)), [list(range(count)) + [500] * 40 for count in (30, 30, 30, 45)]

        assert tree.best_cut(tree.root(), prompt, 64, cut) == 30
        assert tree.best_cut(tree.root(), prompt, 64, [cut[3]]) == 45
        assert tree.best_cut(tree.root(), prompt, 40, [cut[3]]) is None  # the chunk is shared whole
        assert tree.best_cut(tree.root(), prompt, 46, [cut[3]]) == 44  # two tokens at least are left
        assert tree.best_cut(tree.root(), prompt, 64, [prompt[:10] + cut[0]]) is None  # too little to be worth a cut
        assert PrefixTree(1, own_cuts=True).best_cut(tree.root(), prompt, 64, cut) is None

    def test_a_known_prompt_is_parted_from_too(self) -> None:
        tree = tree_of()
        grown(tree, tuple(range(50)))

        assert tree.best_cut(tree.root(), [*range(20), *range(900, 950)], 64, []) == 20


class TestSplitting:
    LONG, NOTHING = tuple(range(40)), Bytes(0)

    def tree(self, *, own_cuts: bool = False) -> tuple[PrefixTree, Node]:
        tree = PrefixTree(10_000, Clock(tick=1.0), own_cuts=own_cuts, can_split=True)
        node = tree.enter(tree.root(), self.LONG, Bytes(40), self.NOTHING)
        return tree, tree.enter(node, (7, 8), Bytes(2), self.NOTHING)

    def test_a_chunk_is_split_where_a_prompt_parts_from_it(self) -> None:
        tree, leaf = self.tree()
        found = tree.match([*range(25), 99, 99, 99], tree.root(), iter(()))

        assert (found.length, found.tokens, found.nbytes) == (25, self.LONG[:25], 25)
        assert [node.tokens for node in leaf.path()] == [self.LONG[:25], self.LONG[25:], (7, 8)]
        assert [node.nbytes for node in leaf.path()] == [25, 15, 2]
        assert tree.held_bytes == sum(node.nbytes for node in tree.nodes()) == 42
        assert tree.match([*self.LONG, 7, 8, 0, 0, 0], tree.root(), iter(())) is leaf
        assert [node.key for node in leaf.path()] == [node.key for node in self.built(leaf)]
        assert tree.best_cut(tree.root(), [*range(20), 99, 99], 21, []) is None  # nothing need be cut

    def built(self, leaf: Node) -> list[Node]:
        """The same chunks in a new tree."""
        tree, node = PrefixTree(10_000), PrefixTree(10_000).root()
        return [node := tree.enter(node, one.tokens, BLOCK, CHECKPOINT) for one in leaf.path()]

    @pytest.mark.parametrize(("prompt", "length"), [((*range(26),), 25), ((*range(26), 99), 26)])
    def test_up_to_the_last_token(self, prompt: tuple[int, ...], length: int) -> None:
        tree, _ = self.tree()

        assert tree.match(prompt, tree.root(), iter(())).length == length

    def test_no_token_is_left_to_be_computed_alone(self) -> None:
        tree, _ = self.tree()

        assert tree.match((*range(25), 99, 100), tree.root(), iter(())).length == 24

    def test_little_is_not_worth_it(self) -> None:
        tree, _ = self.tree()

        assert tree.match([*range(15), 99, 99, 99], tree.root(), iter(())) is tree.root()
        assert len(tree) == 2

    def test_own_cuts_are_kept(self) -> None:
        tree, _ = self.tree(own_cuts=True)

        assert tree.match([*range(25), 99, 99, 99], tree.root(), iter((25,))) is tree.root()

    def test_a_chunk_that_is_invalid_takes_its_first_part_along(self) -> None:
        tree, leaf = self.tree()
        own = leaf.parent
        assert own is not None
        before = own.key
        tree.match([*range(25), 99, 99, 99], tree.root(), iter(()))

        assert before in own.former_keys  # on disk it may still be called so
        assert tree.invalidate(own) == 3
        assert tree.held_bytes == 0


class TestWhy:
    def test_the_first_other_token_is_named(self) -> None:
        tree = tree_of()
        grown(tree, (1, 2))
        grown(tree, (1, 2), (3, 4))

        assert tree.explain_miss(tree.root(), [1, 9, 3, 4, 5], 2, "") == PrefixReuse("differs", 0, 1, 9, 2)
        found = used(tree, (1, 2))
        assert tree.explain_miss(found, [1, 2, 3, 7, 5], 4, "") == PrefixReuse("differs", 2, 3, 7, 4)

    def test_the_nearest_of_several_is_named_wherever_it_was_cut(self) -> None:
        tree = tree_of()
        grown(tree, (1, 2), (3, 4))
        grown(tree, (1,), (2, 3, 5), (6, 6))
        grown(tree, (9,))

        assert tree.explain_miss(tree.root(), [1, 2, 3, 5, 7, 7], 6, "") == PrefixReuse("differs", 0, 4, 7, 6)

    def test_a_longer_prompt_has_nothing_instead(self) -> None:
        tree = tree_of()
        grown(tree, (1, 2))

        assert tree.explain_miss(used(tree, (1, 2)), [1, 2, 3, 4, 5], 4, "") == PrefixReuse("differs", 2, 2, 3, None)

    def test_an_empty_tree_knows_nothing(self) -> None:
        assert tree_of().explain_miss(tree_of().root(), [1, 2, 3], 2, "") == PrefixReuse("differs", 0, 0, 1, None)

    def test_the_same_tokens_in_other_chunks(self) -> None:
        tree = PrefixTree(10_000, own_cuts=True)
        grown(tree, (1, 2, 3, 4))

        assert tree.explain_miss(tree.root(), [1, 2, 3, 4, 5], 2, "") == PrefixReuse("cut", 0, 4, 5, None)

    def test_a_checkpoint_that_was_not_kept(self) -> None:
        tree = tree_of()
        grown(tree, (1, 2), (3, 4))  # the first one's was dropped: it has one child

        found = matched(tree, (1, 2), (3, 5))
        assert tree.explain_miss(found, [1, 2, 3, 5, 6], 2, "") == PrefixReuse("checkpoint", 0, 3, 5, 4)

    def test_what_had_to_make_room(self) -> None:
        tree = tree_of()
        grown(tree, (1, 2), (3, 4))
        tree.shrink(0)

        assert tree.explain_miss(tree.root(), [1, 2, 3, 4, 5], 2, "") == PrefixReuse("evicted", 0)

    def test_a_salt_that_was_never_used(self) -> None:
        tree = tree_of()
        grown(tree, (1, 2))

        assert tree.explain_miss(tree.root("mine"), [1, 2, 3], 2, "mine") == PrefixReuse("salt")

    @pytest.mark.parametrize("extra", [0, 5])
    def test_not_everything_that_went_is_remembered(self, extra: int) -> None:
        tree = tree_of(budget=0)
        for number in range(MAX_EVICTED_KEYS + extra):
            grown(tree, (number,))

        cause = "differs" if extra else "evicted"
        assert tree.explain_miss(tree.root(), [0, 1], 1, "").cause == cause
