"""CUDA graphs of one function at several batch sizes."""

from bisect import bisect_left
from collections.abc import Callable

import torch


def batch_sizes(most: int) -> list[int]:
    """Sizes that are captured, ascending, up to `most`: close together, for a batch pays for the next one above it.

    Example: batch_sizes(20) == [1, 2, 4, 8, 16, 20]
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, most + 1, 64)]
    return [size for size in sizes if size < most] + [most]


class Graphs:
    """Replays `run(size)` for any number of rows up to the largest size. The graphs share their memory."""

    def __init__(self, run: Callable[[int], None], sizes: list[int], *, eager: bool = False) -> None:
        """`eager`: call `run` instead, with the very number of rows."""
        self._run = run
        self._sizes = sizes
        self._graphs: list[torch.cuda.CUDAGraph] = []
        if eager:
            return
        # One run outside: Triton and cuBLAS compile, load and allocate, which a capture must not.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for size in sizes:
                run(size)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        for size in sizes:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run(size)
            self._graphs.append(graph)

    def size_for(self, rows: int) -> int:
        """How many rows a call with `rows` computes; those beyond must hold something that can be computed."""
        return self._sizes[bisect_left(self._sizes, rows)] if self._graphs else rows

    def __call__(self, rows: int) -> None:
        if self._graphs:
            self._graphs[bisect_left(self._sizes, rows)].replay()
        else:
            self._run(rows)
