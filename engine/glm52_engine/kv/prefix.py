"""Names of prefixes, and which block holds the KV of which. Pure bookkeeping, like the blocks' own."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

KEY_BYTES = 32
_TOKEN_BYTES = 8


def prefix_keys(tokens: Sequence[int], block_size: int, salt: bytes) -> tuple[bytes, ...]:
    """A key for each full block of `tokens`: BLAKE2b-256 over the key before it and the block's own token ids.

    A key therefore names the whole prefix up to the block's end, and the salt. 256 bits, since the tokens are the
    clients': nobody must be able to make two prompts with one key, or one would be answered from the other's KV.
    """
    return prefix_chain(tokens, block_size, salt)[1:]


def prefix_chain(tokens: Sequence[int], block_size: int, salt: bytes) -> tuple[bytes, ...]:
    """The same behind what stands for the key before the first block: `following_keys` goes on from the last one."""
    root = hashlib.blake2b(salt, digest_size=KEY_BYTES, person=b"salt").digest()
    return (root, *following_keys(root, tokens, block_size))


def following_keys(key: bytes, tokens: Sequence[int], block_size: int) -> tuple[bytes, ...]:
    """The like for `tokens` that stand behind the block with that key."""
    ids = memoryview(array("Q", tokens).tobytes())
    width = block_size * _TOKEN_BYTES
    keys = []
    for end in range(width, len(ids) + 1, width):
        digest = hashlib.blake2b(key, digest_size=KEY_BYTES, person=b"block")
        digest.update(ids[end - width : end])
        key = digest.digest()
        keys.append(key)
    return tuple(keys)


class PrefixIndex:
    """Keys ↔ blocks, one to one. The first block that holds a prefix keeps its name; a later twin stays nameless."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known run from the first key on."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def add(self, key: bytes, block: int) -> None:
        """Name a block, unless it or another block has this name already."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def drop(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]

    def is_consistent(self) -> bool:
        return {block: key for key, block in self._block_of.items()} == self._key_of
