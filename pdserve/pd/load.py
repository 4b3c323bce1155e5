"""How much each worker has to do, over all processes of the proxy: each has its own row, everybody adds them up.

A row has one writer, so no lock is needed; a process that died leaves a row that its successor clears.
"""

from __future__ import annotations

from pdserve.pd.shared_numbers import Numbers

MAX_WORKERS = 256
_FIELDS = 2
_ROW = MAX_WORKERS * _FIELDS


class WorkerLoad:
    """The figures of one worker."""

    __slots__ = ("_cells", "_first", "_mine")

    def __init__(self, cells: memoryview[float], process: int, index: int) -> None:
        self._cells = cells
        self._first = index * _FIELDS
        self._mine = process * _ROW + self._first

    @property
    def requests(self) -> int:
        """Legs in flight."""
        return self._sum(self._first)

    @property
    def prompt_tokens(self) -> int:
        """Estimated tokens of prompts in flight that are not prefilled yet."""
        return self._sum(self._first + 1)

    def add_request(self, count: int) -> None:
        self._cells[self._mine] += count

    def add_prompt_tokens(self, count: int) -> None:
        self._cells[self._mine + 1] += count

    def _sum(self, index: int) -> int:
        cells = self._cells
        return int(cells[index] if len(cells) == _ROW else sum(cells[index::_ROW]))


class LoadBoard:
    """All workers' figures, as one process sees and writes them."""

    def __init__(self, numbers: Numbers) -> None:
        self._process = numbers.process
        self._cells = numbers.take(_ROW * numbers.processes)
        for index in range(_ROW):
            self._cells[self._process * _ROW + index] = 0
        self._names: dict[str, int] = {}

    @staticmethod
    def cells(processes: int) -> int:
        """How many numbers it takes."""
        return _ROW * processes

    def worker(self, name: str) -> WorkerLoad:
        """Workers get their numbers in the order in which they are asked for: the same in every process. ValueError:
        there are too many."""
        index = self._names.setdefault(name, len(self._names))
        if index >= MAX_WORKERS:
            raise ValueError(f"more than {MAX_WORKERS} workers")
        return WorkerLoad(self._cells, self._process, index)
