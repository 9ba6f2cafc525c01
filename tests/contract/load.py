"""Requests that are under way when something happens, however fast the machine is."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

Answer = TypeVar("Answer")


async def while_asking(
    change: Coroutine[Any, Any, object], ask: Callable[[int], Awaitable[Answer]], clients: int
) -> list[Answer]:
    """Run `change` while clients ask; each asks again as soon as it is answered, until the change is done.

    So requests are under way at every moment of it, and each client's last answer comes after it. Clients whose
    requests differ in length are not between two requests at the same time.
    """
    changing = asyncio.create_task(change)

    async def client(number: int) -> list[Answer]:
        answers = [await ask(number)]
        while not changing.done():
            answers.append(await ask(number))
        return answers

    answers = await asyncio.gather(*(client(number) for number in range(clients)))
    await changing
    return [answer for of_client in answers for answer in of_client]
