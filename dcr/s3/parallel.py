"""A bounded number of things at once."""

import itertools
import threading
from collections.abc import Callable


def in_parallel(act: Callable[[int], None], count: int, threads_max: int) -> None:
    """Call ``act(0)`` to ``act(count - 1)``, at most so many at once; returns when no call runs any more.

    Threads of its own, so that a process which ends does not wait for them.

    Raises:
        Exception: the first that a call raised; then no further ones are begun.
    """
    if count == 1:
        act(0)
        return
    numbers, lock, errors = itertools.count(), threading.Lock(), list[BaseException]()

    def work() -> None:
        while not errors:
            with lock:
                number = next(numbers)
            if number >= count:
                return
            try:
                act(number)
            except BaseException as e:  # noqa: BLE001 - raised where they are waited for
                errors.append(e)

    threads = [threading.Thread(target=work, name="dcr-s3", daemon=True) for _ in range(min(count, threads_max))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
