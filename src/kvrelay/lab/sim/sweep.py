"""Many cells at once: on all cores of this machine, or on a Dask cluster. Same cells, same answers, same order.

Cells and answers go between processes as JSON text, whoever carries them, and every cell is deterministic by itself; so
where it ran cannot show in its answer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec

from kvrelay.lab.sim.cells import Answer, Cell, run_cell


class DaskMissing(Exception):
    """The `dask` extra is not installed."""


class ClusterUnreachable(Exception):
    """There is no Dask scheduler at the address given."""


def run_cells(
    cells: Sequence[Cell],
    *,
    jobs: int | None = None,
    dask: str | None = None,
    on_answer: Callable[[int], None] = lambda done: None,
) -> list[Answer]:
    """`jobs`: processes on this machine, all cores if None. `dask`: a scheduler's address, or `local` for a cluster of
    processes that is started for this sweep. `on_answer` hears how many are done."""
    encoded = [msgspec.json.encode(cell) for cell in cells]
    answers: list[Answer] = []
    for answer in _answers(encoded, jobs=jobs or os.cpu_count() or 1, dask=dask):
        answers.append(msgspec.json.decode(answer, type=Answer))
        on_answer(len(answers))
    return answers


def digest(answers: Sequence[Answer]) -> str:
    """The same for the same questions to the same traces, wherever they were answered."""
    summed = hashlib.sha256()
    for answer in answers:
        source = msgspec.structs.replace(answer.cell.source, path=None)  # where the file lies says nothing
        cell = msgspec.structs.replace(answer.cell, source=source)
        summed.update(msgspec.json.encode(msgspec.structs.replace(answer, cell=cell)) + b"\n")
    return summed.hexdigest()


def _answers(encoded: Sequence[bytes], *, jobs: int, dask: str | None) -> Iterator[bytes]:
    if dask is not None:
        return _on_dask(encoded, dask, jobs)
    if jobs == 1 or len(encoded) == 1:
        return map(run_cell, encoded)
    return _on_processes(encoded, jobs)


def _on_processes(encoded: Sequence[bytes], jobs: int) -> Iterator[bytes]:
    """Fresh interpreters: forking a process that has threads is not safe."""
    with ProcessPoolExecutor(min(jobs, len(encoded)), mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_cell, encoded)


def _on_dask(encoded: Sequence[bytes], address: str, jobs: int) -> Iterator[bytes]:
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise DaskMissing(str(error)) from error
    if address != "local":
        try:
            client = Client(address, timeout="10s")
        except OSError as error:
            raise ClusterUnreachable(f"{address}: {error}") from error
        with client:
            yield from client.gather(client.map(run_cell, encoded, pure=False))
        return
    with (
        LocalCluster(
            n_workers=jobs, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        yield from client.gather(client.map(run_cell, encoded, pure=False))
