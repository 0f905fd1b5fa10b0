"""Threads in which several owners have work done by turns: nobody's work waits behind all of another's. Usable by everybody."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class FairPool:
    """A pool of threads that takes the next piece of work from each owner in turn; an owner's own are done in order."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        # By owner, the next one first: what is to be done, and the futures of it. Any: each has a type of its own.
        self._waiting: OrderedDict[Hashable, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()

    def submit(self, owner: Hashable, work: Callable[[], Result]) -> Future[Result]:
        """Have work done in a thread; the future has its result or error, and if it is cancelled before, the work is dropped."""
        future: Future[Result] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((future, work))
        self._threads.submit(self._do_next)  # as often as there is work; which piece is decided when a thread is free
        return future

    def close(self) -> None:
        """Drop what has not begun, whose futures are cancelled. Threads that are at work end with their work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            left = [future for works in self._waiting.values() for future, _ in works]
            self._waiting.clear()
        for future in left:
            future.cancel()

    def _do_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            owner, works = self._waiting.popitem(last=False)
            future, work = works.popleft()
            if works:
                self._waiting[owner] = works  # behind all others
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # raised where the result is read
            future.set_exception(error)
