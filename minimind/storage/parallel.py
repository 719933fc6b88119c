"""Work on many items by threads that an interruption does not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(
    work: Callable[[Item, threading.Event], Result], items: Sequence[Item], threads: int
) -> Generator[Result, None, None]:
    """Yield `work(item, stopped)` as each is done; raise the first error.

    `stopped` is set when the results are not wanted any more. An error waits for the work that is
    under way, Ctrl-C does not: daemon threads end with the process, those of an executor delay it.
    """
    todo: SimpleQueue[Item] = SimpleQueue()
    for item in items:
        todo.put(item)
    done: SimpleQueue[Future[Result]] = SimpleQueue()
    stopped = threading.Event()
    running = [
        threading.Thread(target=_work, args=(work, todo, done, stopped), daemon=True)
        for _ in range(min(threads, len(items)))
    ]
    for thread in running:
        thread.start()
    try:
        for _ in items:
            yield done.get().result()
    except Exception:
        stopped.set()
        for thread in running:
            thread.join()
        raise
    finally:
        stopped.set()


def _work(
    work: Callable[[Item, threading.Event], Result],
    todo: SimpleQueue[Item],
    done: SimpleQueue[Future[Result]],
    stopped: threading.Event,
) -> None:
    """Do what is left until nothing is, or one fails."""
    while not stopped.is_set():
        try:
            item = todo.get_nowait()
        except Empty:
            return
        result: Future[Result] = Future()
        try:
            result.set_result(work(item, stopped))
        except BaseException as error:
            result.set_exception(error)
            return
        finally:
            done.put(result)
