"""Threads of a backend: what work gives, in order, from any thread and in a process that was forked off."""

import os
import signal
import threading

from dcr.data_plane.kernels.threads import Threads


def test_work_that_itself_spreads_work_ends():
    threads = Threads("test", 3)
    inner = threads.map(lambda k: sum(threads.map(lambda j: 10 * k + j, range(50))), range(20))
    assert inner == [500 * k + 1225 for k in range(20)]


def test_a_forked_process_has_threads_of_its_own():
    """A fork copies the executor and none of its threads, on which it then waits for ever."""
    threads = Threads("test", 2)
    threads.map(lambda _: threading.get_ident(), range(64))
    child = os.fork()
    if not child:
        signal.alarm(120)  # ends a child that waits
        both = threading.Barrier(2, timeout=100)
        found = threads.map(lambda _: (both.wait(), threading.get_ident())[1], range(2))
        os._exit(int(len(set(found)) != 2))
    assert os.waitpid(child, 0)[1] == 0
    assert threads.map(lambda x: -x, range(9)) == [-x for x in range(9)]
