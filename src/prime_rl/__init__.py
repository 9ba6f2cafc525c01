"""Asynchronous reinforcement learning of language models, from a laptop's CPU to a cluster.

Three processes: an inference server that holds the current policy, an orchestrator that runs environments and turns
rollouts into batches, a trainer that turns batches into weights. `docs/architecture.md` draws how they meet.
"""

__version__ = "0.1.0"
