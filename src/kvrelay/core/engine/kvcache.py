"""Prefix caching: which blocks a sequence can re-use, which it needs, and what becomes findable when it computes.

Names and payloads are both chained over the tokens but made by unrelated functions (see `payload.py`). The name decides
what is re-used; the payload tells whether that was right.
"""

from __future__ import annotations

from kvrelay.core.contract.keys import Keyer
from kvrelay.core.engine.blockpool import Block, BlockPool
from kvrelay.core.engine.payload import PayloadModel
from kvrelay.core.engine.sequence import EngineRequest, Sequence
from kvrelay.core.model.events import BlocksStored
from kvrelay.core.model.prompt import TokenIds


class KvCache:
    """Block tables of all sequences over one pool."""

    def __init__(self, pool: BlockPool, *, model: PayloadModel, keyer: Keyer, block_size_tokens: int) -> None:
        self.pool = pool
        self._model = model
        self._keyer = keyer
        self._block_size = block_size_tokens

    def open(self, request: EngineRequest, *, arrived_s: float) -> Sequence:
        """A sequence that holds nothing yet."""
        names = self._keyer.prompt_keys(
            request.token_ids, self._block_size, adapter=request.adapter, salt=request.salt
        ).tolist()
        root_payload = self._model.root(adapter=request.adapter, salt=request.salt)
        return Sequence(request, arrived_s=arrived_s, names=names, root_payload=root_payload)

    def reusable(self, sequence: Sequence) -> list[Block]:
        """The longest findable prefix. One token at least is left to compute: its output is asked for."""
        self._extend_names(sequence, (sequence.total_tokens - 1) // self._block_size)
        hits: list[Block] = []
        for name in sequence.names[: (sequence.total_tokens - 1) // self._block_size]:
            block = self.pool.find(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def findable(self, token_ids: TokenIds, *, adapter: str | None, salt: str | None) -> int:
        """How many leading full blocks of these tokens carry a name that is known now."""
        names = self._keyer.prompt_keys(token_ids, self._block_size, adapter=adapter, salt=salt).tolist()
        return next((depth for depth, name in enumerate(names) if self.pool.find(name) is None), len(names))

    def payloads(self, token_ids: TokenIds, *, adapter: str | None, salt: str | None) -> list[bytes]:
        """What the findable leading blocks of these tokens hold now."""
        held: list[bytes] = []
        for name in self._keyer.prompt_keys(token_ids, self._block_size, adapter=adapter, salt=salt).tolist():
            block = self.pool.find(name)
            if block is None:
                break
            held.append(block.payload)
        return held

    def adopt(self, token_ids: TokenIds, payloads: list[bytes], *, adapter: str | None, salt: str | None) -> int:
        """Blocks computed elsewhere become findable here, from the first on; how many were not there before. They are
        believed as a real engine believes what a connector loads: whether they are right shows when they are read."""
        names = self._keyer.prompt_keys(token_ids, self._block_size, adapter=adapter, salt=salt).tolist()
        held: list[Block] = []
        adopted = 0
        for i, (name, payload) in enumerate(zip(names, payloads, strict=False)):
            block = self.pool.find(name)
            if block is not None:
                self.pool.touch([block])
            elif self.pool.free_blocks:
                (block,) = self.pool.take(1)
                self.pool.give_name(block, name, payload)
                self._announce_adopted(token_ids, names, i, adapter=adapter, salt=salt)
                adopted += 1
            else:
                break
            held.append(block)
        self.pool.release(reversed(held))
        return adopted

    def fits_whole(self, sequence: Sequence, hits: list[Block]) -> bool:
        """Whether all tokens known so far could be computed without taking a block from somebody."""
        blocks = -(-sequence.total_tokens // self._block_size)
        return self._free_beside(hits) >= blocks - len(hits)

    def attach(self, sequence: Sequence, hits: list[Block]) -> None:
        """The sequence reads these blocks from now on; each payload is compared with what it must be."""
        assert not sequence.blocks, f"{sequence.request.request_id} already has blocks"
        self.pool.touch(hits)
        sequence.blocks = hits
        sequence.named_blocks = len(hits)
        sequence.computed_tokens = len(hits) * self._block_size
        for i, block in enumerate(hits):
            if block.payload != self._expected_payload(sequence, i):
                sequence.wrong_reuse_blocks += 1
                sequence.taint = self._model.read_wrong(sequence.taint, block.payload, i)

    def reserve(self, sequence: Sequence, new_tokens: int) -> bool:
        """Blocks for the next `new_tokens`; False, and nothing changes, when there are not enough."""
        needed = -(-(sequence.computed_tokens + new_tokens) // self._block_size) - len(sequence.blocks)
        if needed > self.pool.free_blocks:
            return False
        if needed > 0:
            sequence.blocks += self.pool.take(needed)
        return True

    def write(self, sequence: Sequence, new_tokens: int) -> None:
        """The step that now begins computes `new_tokens`: blocks that become full are findable at once, so that another
        request of the same step can share them (as in vLLM, where attention reads a layer after it is written)."""
        first = sequence.named_blocks
        full = min(sequence.computed_tokens + new_tokens, sequence.total_tokens) // self._block_size
        if full <= first:
            return
        self._extend_names(sequence, full)
        for i in range(first, full):
            self.pool.give_name(sequence.blocks[i], sequence.names[i], self._payload(sequence, i))
        sequence.named_blocks = full
        self._announce(sequence, first, full)

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back, tail first: the end of a chain is worth less than its beginning."""
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.named_blocks = 0
        sequence.computed_tokens = 0
        sequence.taint = b""

    def next_token(self, sequence: Sequence) -> int:
        """Sample after everything up to the last token is computed."""
        full = sequence.total_tokens // self._block_size
        payload = sequence.blocks[full - 1].payload if full else sequence.root_payload
        tail = sequence.slice_bytes(full * self._block_size, sequence.total_tokens)
        return self._model.next_token(
            payload, sequence.taint, tail, position=sequence.total_tokens, variant=sequence.request.variant
        )

    def corrupt(self, *, name: int | None, every: int) -> int:
        """Overwrite the payload of all copies of one name, or of every n-th findable block; how many were hit."""
        if name is not None:
            victims = [block for block in self.pool.named() if block.name == name]
        else:
            victims = list(self.pool.named())[::every]
        for block in victims:
            block.payload = self._model.corrupt(block.payload)
        return len(victims)

    def _free_beside(self, hits: list[Block]) -> int:
        return self.pool.free_blocks - sum(1 for block in hits if block.references == 0)

    def _extend_names(self, sequence: Sequence, blocks: int) -> None:
        """Names of blocks that contain generated tokens are known only now."""
        depth = len(sequence.names)
        if blocks <= depth:
            return
        request, size = sequence.request, self._block_size
        parent = sequence.names[-1] if depth else self._keyer.root(size, adapter=request.adapter, salt=request.salt)
        tokens = sequence.slice_ids(depth * size, blocks * size)
        sequence.names += self._keyer.extend(parent, depth, tokens, size).tolist()

    def _payload(self, sequence: Sequence, i: int) -> bytes:
        """What computing block i really writes, given what was really read before it."""
        expected = self._expected_payload(sequence, i)
        read = sequence.blocks[i - 1].payload if i else sequence.root_payload
        clean = not sequence.taint and (i == 0 or read == sequence.expected_payloads[i - 1])
        if clean:
            return expected
        return self._model.block(read, self._block_bytes(sequence, i), sequence.taint)

    def _expected_payload(self, sequence: Sequence, i: int) -> bytes:
        chain = sequence.expected_payloads
        while len(chain) <= i:
            parent = chain[-1] if chain else sequence.root_payload
            chain.append(self._model.block(parent, self._block_bytes(sequence, len(chain))))
        return chain[i]

    def _block_bytes(self, sequence: Sequence, i: int) -> bytes:
        return sequence.slice_bytes(i * self._block_size, (i + 1) * self._block_size)

    def _announce(self, sequence: Sequence, first: int, full: int) -> None:
        request = sequence.request
        self.pool.announce(
            BlocksStored(
                hashes=tuple(sequence.names[first:full]),
                parent=sequence.names[first - 1] if first else None,
                token_ids=sequence.slice_ids(first * self._block_size, full * self._block_size),
                block_size_tokens=self._block_size,
                adapter=request.adapter,
                salt=request.salt if first == 0 else None,  # the engine names the salt with the first block only
            )
        )

    def _announce_adopted(
        self, token_ids: TokenIds, names: list[int], i: int, *, adapter: str | None, salt: str | None
    ) -> None:
        size = self._block_size
        self.pool.announce(
            BlocksStored(
                hashes=(names[i],),
                parent=names[i - 1] if i else None,
                token_ids=token_ids[i * size : (i + 1) * size],
                block_size_tokens=size,
                adapter=adapter,
                salt=salt if i == 0 else None,
            )
        )
