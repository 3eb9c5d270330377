"""The error a user can mend."""


class UserError(ValueError):
    """What the user asked for cannot be done: one line that says what is wrong, where, and how to mend it."""
