"""The failure of one worker in one attempt: another attempt may do better."""

from __future__ import annotations

from pdserve.pd.errors import ApiError
from pdserve.pd.workers.judgement import Fault
from pdserve.pd.workers.registry import Worker


class WorkerFailedError(Exception):
    """One attempt failed at `worker`. `error` is what the client gets if there is no other attempt.

    retry: nothing has reached the client and the request itself is not known to be to blame.
    avoid: the next attempt should use another worker (false when only our knowledge of it was stale).
    fault: what the worker did; None: nothing that would be its own fault.
    """

    def __init__(
        self, worker: Worker, error: ApiError, *, retry: bool, avoid: bool = True, fault: Fault | None = None
    ) -> None:
        super().__init__(str(error))
        self.worker = worker
        self.error = error
        self.retry = retry
        self.avoid = avoid
        self.fault = fault
