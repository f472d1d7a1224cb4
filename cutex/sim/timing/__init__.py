"""The simulator's clock: the time that a kernel takes, and the waits of its warps.

A functional run records the events of each warp (`record`), the machine code gives the cost of the
ordinary instructions (`machine_code`), and a discrete-event model replays both on units with queues
(`replay`); a few clusters stand for the grid (`predict`).
"""
