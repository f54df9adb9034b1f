"""Refuses to be imported in a sub-interpreter, where NumPy and Numba do not work and calls may hang."""

try:
    import ctypes

    _get, _main = ctypes.pythonapi.PyInterpreterState_Get, ctypes.pythonapi.PyInterpreterState_Main
    _get.restype = _main.restype = ctypes.c_void_p
    _refused = _get() != _main()
except ImportError:  # as in sub-interpreters of Python 3.12 with a lock of their own
    _refused = True

if _refused:
    raise ImportError(
        "fp8moe: got an import in a sub-interpreter; wanted the main interpreter, because NumPy and Numba do "
        "not work in others; use a process of its own, or with mod_wsgi WSGIApplicationGroup %{GLOBAL}"
    )
