"""What a person is told when the machine cannot do what was asked."""


class MachineError(Exception):
    """The machine lacks something; the message is one line that says what to do next."""
