"""The one exception for what a user can mend: bad input, files or configuration.

The message is a single line that says what was got, where, what was wanted and the remedy. The command line
prints it and exits with status 2; library users catch it as a `ValueError`.
"""


class InputError(ValueError):
    """Bad input or configuration, explained in one line for the user."""
