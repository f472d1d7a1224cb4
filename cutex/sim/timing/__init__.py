"""The simulator's clock: how long a kernel takes, and what it waits for.

A functional run records what each warp does (`record`), the machine code says what its ordinary
instructions cost (`machine_code`), and a discrete-event model replays both on units with queues
(`replay`); a few clusters stand for the grid (`predict`).
"""
