"""What a validator raises when keys do not go together."""


class Conflict(ValueError):
    """The message says the fix; `validation` adds what each of the keys is and where that was written.

    Example: `raise Conflict("set only one of low and high", "low", "high")`, keys dotted and below the section that is
    validated.
    """

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys = keys
