"""Variables that a process which computes with large arrays must have before it starts."""

KEEPS_BUFFERS = {
    # glibc keeps freed buffers: giving them back each time costs page faults (52 ms a token instead of 22).
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}

COMPUTES = KEEPS_BUFFERS | {
    # Idle OpenMP threads spin for microseconds, between two kernels, and then sleep: without an end to it they take the
    # cores from the other ranks (540 ms a token instead of 3), without spinning each kernel wakes them (2.3 ms instead
    # of 1.6).
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "10000",
}
