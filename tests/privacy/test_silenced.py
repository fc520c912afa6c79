"""Silence around private work ends with the last block of any thread."""

import logging
import threading

from pl_privknn.privacy.redaction import silenced


def test_a_block_that_ends_first_leaves_those_of_other_threads_silent(capfd):
    entered, left = threading.Event(), threading.Event()

    def longer():
        with silenced():
            entered.set()
            left.wait()
            print("record-4711", flush=True)
            logging.getLogger("some.library").critical("record-4711")

    with silenced():
        thread = threading.Thread(target=longer)
        thread.start()
        entered.wait()
    left.set()
    thread.join()
    print("heard again", flush=True)
    assert capfd.readouterr() == ("heard again\n", "")
    assert not logging.root.manager.disable
