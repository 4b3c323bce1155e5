"""A queue for vLLM's scheduler with a lane that is served first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any


def two_lane_queue(make: Callable[[], Any]) -> Any:
    """A RequestQueue of two that `make` makes, FCFS or priority; what is put in goes to the second lane."""
    from vllm.v1.core.sched.request_queue import RequestQueue

    class TwoLaneQueue(RequestQueue):  # type: ignore[misc]
        def __init__(self) -> None:
            self.first_lane = make()
            self.second_lane = make()

        def sort(self, first: Callable[[Any], bool], ahead: Callable[[Any], bool]) -> int:
            """Puts those for which `first` holds into the first lane, others out of it. How many overtook another.

            `ahead`: whether a request outside of this queue would have been served before that request.
            """
            demoted = [request for request in self.first_lane if not first(request)]
            promoted, standing, overtaking = [], len(demoted), 0
            for request in self.second_lane:
                if first(request):
                    promoted.append(request)
                    overtaking += standing > 0 or ahead(request)
                else:
                    standing += 1
            self.first_lane.remove_requests(demoted)
            self.second_lane.remove_requests(promoted)
            for request in reversed(demoted):
                self.second_lane.prepend_request(request)
            for request in promoted:
                self.first_lane.add_request(request)
            return overtaking

        @property
        def _served(self) -> Any:
            return self.first_lane or self.second_lane

        def add_request(self, request: Any) -> None:
            self.second_lane.add_request(request)

        def pop_request(self) -> Any:
            return self._served.pop_request()

        def peek_request(self) -> Any:
            return self._served.peek_request()

        def prepend_request(self, request: Any) -> None:
            self.second_lane.prepend_request(request)

        def prepend_requests(self, requests: Any) -> None:
            self.second_lane.prepend_requests(requests)

        def remove_request(self, request: Any) -> None:
            lane = self.first_lane if request in list(self.first_lane) else self.second_lane
            lane.remove_request(request)

        def remove_requests(self, requests: Iterable[Any]) -> None:
            leaving = list(requests)
            self.first_lane.remove_requests(leaving)
            self.second_lane.remove_requests(leaving)

        def __bool__(self) -> bool:
            return bool(self.first_lane) or bool(self.second_lane)

        def __len__(self) -> int:
            return len(self.first_lane) + len(self.second_lane)

        def __iter__(self) -> Iterator[Any]:
            return chain(self.first_lane, self.second_lane)

    return TwoLaneQueue()
