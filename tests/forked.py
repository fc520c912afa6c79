"""Something that is done in a process of its own, which may be killed; it need not import anything again."""

import os
import sys
import traceback
from collections.abc import Callable


def in_child(job: Callable[[], object]) -> int:
    """Do it in a forked process; how that ended: 0, 1 after an exception, negative for a signal."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            job()
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
