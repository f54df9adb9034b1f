"""Interrupts (Ctrl-C) at the moments at which Python handles signals in a call: at the beginning of a
function of Python, and after a call of a function of C."""

import random
import sys


def _call(work, moment):
    """Call work(), with a KeyboardInterrupt at a moment; returns the number of moments that have passed."""
    passed = 0

    def handler(frame, event, argument):
        nonlocal passed
        # Python ignores, with a message, what is raised in a __del__, such as those of torch's storages
        if event in ("call", "c_return") and not _is_within_del(frame):
            passed += 1
            if passed == moment:
                raise KeyboardInterrupt

    sys.setprofile(handler)
    try:
        work()
    except KeyboardInterrupt:
        assert passed == moment
    finally:
        sys.setprofile(None)
    return passed - 1  # the last one is setprofile's


def _is_within_del(frame):
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def at_moments(work, most=400):
    """Call work() again and again, each time with a KeyboardInterrupt at another moment: at every one, or at
    ``most`` of them: the first, the last, and others that are drawn; yields after each call."""
    count = _call(work, None)
    drawn = random.sample(range(2, count), min(most, count) - 2)
    for moment in (1, *drawn, count):
        _call(work, moment)
        yield moment
