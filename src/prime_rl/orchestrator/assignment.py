"""Which server a rollout is sent to. Pure.

The rollouts of a group share their prompt, and with it a server: its prefix cache computes the prompt once. A group
that begins, or whose server is gone, goes to where the fewest rollouts are in flight.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

MAX_GROUPS: Final = 65536
"""Groups whose server is remembered; the oldest are forgotten first."""


class Assignment:
    """The load of each address."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.load: Counter[str] = Counter()
        """Rollouts in flight by the address that they began with."""
        self._addresses = tuple(addresses)
        self._of_rollout: dict[Hashable, str] = {}
        self._of_group: OrderedDict[Hashable, str] = OrderedDict()

    def assign(self, rollout: Hashable, group: Hashable, able: Sequence[str]) -> tuple[str, ...]:
        """All addresses, in the order in which `rollout` shall try them: the `able` ones first, by load.

        Example: assign(7, 2, able=["b", "c"]) == ("c", "b", "a") where c began with group 2.
        """
        by_load = sorted(self._addresses, key=lambda address: (address not in able, self.load[address]))
        home = self._of_group.get(group)
        if home is None or home not in able:
            home = by_load[0]
            self._of_group[group] = home
            if len(self._of_group) > MAX_GROUPS:
                self._of_group.popitem(last=False)
        self._of_rollout[rollout] = home
        self.load[home] += 1
        return (home, *(address for address in by_load if address != home))

    def release(self, rollout: Hashable) -> None:
        """The rollout has ended, if it had begun."""
        address = self._of_rollout.pop(rollout, None)
        if address is not None:
            self.load[address] -= 1
