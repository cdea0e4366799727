"""A small discrete-event model of training, in whole nanoseconds: host threads, device streams, collectives, a Ray driver with actors.

In: a `Program` (seeded, or written by hand). Out: its run as Kineto-shaped traces in a folder, and the truth about it: how long its
steps are, and how long they are with one cause removed or made larger.
Knows nothing of the analysis: no rule of tracetools is used here, so that the two can be held against each other.
"""
