"""vLLM's scheduler, which can forget what older weights computed without giving up what is running.

vLLM's own `reset_prefix_cache` does nothing while a request holds blocks, unless all of them are preempted. Ours also
knows the way between: every entry of the prefix cache goes, blocks stay where they are, and the requests that hold them
are given a salt of their own, so that what they compute from now on, on top of older keys and values, is found by
nobody else.

Uses vLLM's internals: `kv_cache_manager.block_pool` with its maps and `reset_hash`, `Request.cache_salt`,
`Request.block_hashes` and `Request.update_block_hashes`. To be removed when vLLM's `reset_prefix_cache` can do this.
"""

import secrets
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from prime_rl import lifeline
from prime_rl.logs import get_logger

logger = get_logger(__name__)


class ForgetfulScheduler(Scheduler):
    """Also ends vLLM's engine process when the server that started it is gone: it is built in every one of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        lifeline.watch_launcher()
        super().__init__(*args, **kwargs)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget every cached prefix; running requests keep their blocks unless they are to compute them anew."""
        if reset_running_requests:
            return bool(super().reset_prefix_cache(reset_running_requests=True, reset_connector=reset_connector))
        pool = self.kv_cache_manager.block_pool
        pool.cached_block_hash_to_block = BlockHashToBlockMap()
        pool.cached_block_hashes_by_block.clear()
        for block in pool.blocks:
            block.reset_hash()
        if pool.enable_kv_cache_events:
            pool.kv_event_queue.append(AllBlocksCleared())
        for request in self.requests.values():
            if request.num_computed_tokens > 0:
                request.cache_salt = secrets.token_hex(16)
                request.block_hashes = []
                request.update_block_hashes()
        return not reset_connector or bool(self.reset_connector_cache())


class ForgetfulAsyncScheduler(ForgetfulScheduler, AsyncScheduler):
    """The same for vLLM's asynchronous scheduling."""
