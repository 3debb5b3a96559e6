"""Whether KV can be named: the engine's contract, formed in the background, and what follows from it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from msgspec import structs

from kvrelay.core.contract.fields import Contract, ContractError
from kvrelay.core.contract.identity import Namespace
from kvrelay.edge.connectors.vllm.kv.chain import namespace_for
from kvrelay.edge.connectors.vllm.kv.facts import MemoryFacts
from kvrelay.edge.connectors.vllm.kv.scheduler import Unidentified
from kvrelay.edge.connectors.vllm.kv.settings import Epochs

log = logging.getLogger(__name__)


class Standing:
    """Until the contract is formed nothing is loaded and nothing is saved: hashing the weights of a large model takes
    minutes the first time, and the engine serves meanwhile."""

    def __init__(
        self,
        form: Callable[[Sequence[MemoryFacts]], Contract],
        *,
        tenant: str,
        secret: bytes,
        epochs: Epochs,
        adapter_digest: Callable[[str], str],
        compare: Callable[[Contract], tuple[str, ...]] = lambda contract: (),
    ) -> None:
        self._form = form
        self._tenant = tenant
        self._secret = secret
        self._epochs = epochs
        self._adapter_digest = adapter_digest
        self._compare = compare
        self._digest: bytes | None = None
        self.contract: Contract | None = None
        self.fault: str | None = None
        self.differs: tuple[str, ...] = ()

    def begin(self, memory: Sequence[MemoryFacts]) -> None:
        """Forms the contract (again: after a reset the files may be others)."""
        self._digest = self.fault = None
        threading.Thread(target=self._run, args=(memory,), name="kvrelay-contract", daemon=True).start()

    def _run(self, memory: Sequence[MemoryFacts]) -> None:
        try:
            contract = self._form(memory)
        except ContractError as fault:
            self.fault = str(fault)
            log.error("KV is not shared: %s", fault)
            return
        except Exception as mistake:
            self.fault = type(mistake).__name__
            log.error("KV is not shared: the contract could not be formed (%s)", type(mistake).__name__, exc_info=True)
            return
        self.contract, self._digest = contract, contract.digest()
        log.info("KV is shared under contract %s", self._digest.hex()[:16])
        try:
            self.differs = self._compare(contract)
        except Exception as mistake:
            log.error("the store's contracts could not be compared (%s)", type(mistake).__name__, exc_info=True)
        if self.differs:
            log.warning("others in this store differ in: %s; nothing of theirs can be used", ", ".join(self.differs))

    def told(self) -> dict[str, object]:
        """For a receipt."""
        digest = None if self._digest is None else self._digest.hex()[:16]
        return {"contract": digest, **({"contract_differs": list(self.differs)} if self.differs else {})}

    def told_in_full(self) -> dict[str, object]:
        contract = None if self.contract is None else structs.asdict(self.contract)
        return {"fields": contract, "fault": self.fault, **self.told()}

    def namespace_of(self, salt: str | None, adapter_path: str | None) -> Namespace:
        """Called in background threads. Raises Unidentified."""
        digest = self._digest
        if digest is None:
            raise Unidentified("contract_pending" if self.fault is None else "contract_incomplete")
        try:
            adapter = None if adapter_path is None else self._adapter_digest(adapter_path)
        except (OSError, ValueError):
            raise Unidentified("adapter_unknown") from None
        try:
            epoch = self._epochs.now()
        except (OSError, ValueError):
            raise Unidentified("epoch_unknown") from None
        return namespace_for(
            contract_digest=digest,
            tenant=self._tenant,
            secret=self._secret,
            epoch=epoch,
            salt=salt,
            adapter=adapter,
        )
