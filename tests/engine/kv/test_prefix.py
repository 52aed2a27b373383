"""Shared blocks, against a model that remembers what was written into each."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm52_engine.kv import BlockAllocator, BlockError, prefix_keys

SIZE = 2
BLOCKS = 10
SALTS = (b"a", b"b")

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
Name = tuple[bytes, tuple[int, ...]]


@given(
    one=prompts,
    other=prompts,
    salts=st.tuples(st.sampled_from(SALTS), st.sampled_from(SALTS)),
    size=st.integers(1, 4),
)
def test_a_key_names_the_salt_and_every_token_before_the_blocks_end(
    one: tuple[int, ...], other: tuple[int, ...], salts: tuple[bytes, bytes], size: int
) -> None:
    first, second = prefix_keys(one, size, salts[0]), prefix_keys(other, size, salts[1])
    assert (len(first), len(second)) == (len(one) // size, len(other) // size)
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        end = (index + 1) * size
        assert (a == b) == (salts[0] == salts[1] and one[:end] == other[:end])
    assert len({*first}) == len(first)


def test_keys_stay_as_they_are() -> None:
    """Pods that disagree about keys could not share a store; and a key must not depend on the process."""
    keys = prefix_keys((1, 2, 70000, 4, 5), 2, b"salt")
    assert [key.hex()[:16] for key in keys] == ["b16747d0f26afd48", "ab11a90d7ca0aff8"]


@dataclass
class Owner:
    salt: bytes
    prompt: tuple[int, ...]
    blocks: tuple[int, ...]
    computed: int
    """Leading blocks whose KV is there."""

    def name(self, index: int) -> Name:
        return self.salt, self.prompt[: (index + 1) * SIZE]


class SharedBlocks(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.blocks = BlockAllocator(BLOCKS)
        self.owners: dict[str, Owner] = {}
        self.written: dict[int, Name] = {}
        self.named: dict[Name, int] = {}
        self.idle: list[int] = []
        self.count = 0

    @rule(prompt=prompts, salt=st.sampled_from(SALTS), more=st.integers(0, 3))
    def allocate(self, prompt: tuple[int, ...], salt: bytes, more: int) -> None:
        need = -(-len(prompt) // SIZE) + more
        keys = prefix_keys(prompt, SIZE, salt)[: (len(prompt) - 1) // SIZE]
        found = self._known(salt, prompt, len(keys))
        held = {block for owner in self.owners.values() for block in owner.blocks}
        fits = need - len(held.intersection(found)) <= BLOCKS - len(held)
        assert self.blocks.cached(keys, need) == (len(found) if fits else None)
        self.count += 1
        owner = f"r{self.count}"
        if not fits:
            with pytest.raises(BlockError):
                self.blocks.allocate(owner, need, keys)
            return
        empty = BLOCKS - len(held) - len(self.idle)
        allocation = self.blocks.allocate(owner, need, keys)
        blocks = allocation.blocks
        assert (len(blocks), len(set(blocks)), allocation.cached) == (need, need, len(found))
        assert list(blocks[: len(found)]) == found
        for index in range(len(found)):
            assert self.written[blocks[index]] == (salt, prompt[: (index + 1) * SIZE]), "an unequal prefix was shared"
        self.idle = [block for block in self.idle if block not in found]
        fresh = blocks[len(found) :]
        assert not held.intersection(fresh), "a block in use was handed out"
        evicted = self.idle[: max(0, len(fresh) - empty)]
        assert [block for block in fresh if block in self.idle] == evicted, "least recently used first"
        self.idle = self.idle[len(evicted) :]
        self.named = {name: block for name, block in self.named.items() if block not in evicted}
        for block in fresh:
            self.written.pop(block, None)
        self.owners[owner] = Owner(salt, prompt, blocks, len(found))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owners)))
        it = self.owners[owner]
        it.computed = data.draw(st.integers(it.computed, len(it.prompt) // SIZE))
        for index in range(it.computed):
            block, name = it.blocks[index], it.name(index)
            assert self.written.setdefault(block, name) == name, "a shared block was written"
            if name not in self.named and block not in self.named.values():
                self.named[name] = block
        self.blocks.publish(owner, prefix_keys(it.prompt, SIZE, it.salt)[: it.computed])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owners)))
        self.blocks.distrust(owner)
        bad = self.owners[owner].blocks
        self.named = {name: block for name, block in self.named.items() if block not in bad}

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owners)))
        gone = self.owners.pop(owner).blocks
        self.blocks.free(owner)
        with pytest.raises(BlockError, match="freed twice"):
            self.blocks.free(owner)
        held = {block for other in self.owners.values() for block in other.blocks}
        self.idle += [b for b in reversed(gone) if b not in held and b in self.named.values()]

    @invariant()
    def books_balance(self) -> None:
        self.blocks.check_integrity()
        held = {block for owner in self.owners.values() for block in owner.blocks}
        assert (self.blocks.free_count, self.blocks.idle_count) == (BLOCKS - len(held), len(self.idle))
        assert all(self.blocks.owned(owner) == it.blocks for owner, it in self.owners.items())

    def teardown(self) -> None:
        for owner in self.owners:
            self.blocks.free(owner)
        self.blocks.check_integrity()
        assert self.blocks.free_count == BLOCKS
        # Whatever is cached can be had: nothing stays behind under a name.
        assert len(self.blocks.allocate("all", BLOCKS).blocks) == BLOCKS
        assert self.blocks.idle_count == 0

    def _known(self, salt: bytes, prompt: tuple[int, ...], most: int) -> list[int]:
        found = []
        for index in range(most):
            block = self.named.get((salt, prompt[: (index + 1) * SIZE]))
            if block is None:
                break
            found.append(block)
        return found


TestSharedBlocks = SharedBlocks.TestCase
TestSharedBlocks.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_the_start_of_a_prefix_is_evicted_last() -> None:
    blocks = BlockAllocator(4)
    keys = prefix_keys((1, 2, 3, 4, 5, 6), SIZE, b"")
    first = blocks.allocate("a", 3).blocks
    blocks.publish("a", keys)
    blocks.free("a")
    blocks.allocate("b", 2)
    assert blocks.cached(keys, 2) == 2
    assert blocks.allocate("c", 2, keys[:2]).blocks == first[:2]


def test_misuse_is_refused() -> None:
    blocks = BlockAllocator(4)
    keys = prefix_keys((1, 2, 3, 4, 5, 6), SIZE, b"")
    blocks.allocate("a", 2)
    with pytest.raises(BlockError, match="a publishes 3 blocks and owns 2"):
        blocks.publish("a", keys)
    with pytest.raises(BlockError, match="b asked for 1 blocks with the keys of 3"):
        blocks.allocate("b", 1, keys)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param(lambda b: b._holders.__setitem__(b.owned("a")[0], 2), "holds", id="reference"),
        pytest.param(lambda b: b._empty.pop(), "2 empty, 0 idle, 1 held of 4", id="leak"),
        pytest.param(lambda b: b._prefixes.add(b"k", b._empty[0]), "empty with one", id="name"),
    ],
)
def test_books_that_do_not_balance_are_noticed(broken: object, message: str) -> None:
    blocks = BlockAllocator(4)
    blocks.allocate("a", 1)
    blocks.check_integrity()
    broken(blocks)  # type: ignore[operator]
    with pytest.raises(BlockError, match=message):
        blocks.check_integrity()
