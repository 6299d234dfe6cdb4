"""Overlap: split in time what was split in space, so that transfers run beside compute.

    flow       which edges of a partitioned program move values, before anything is emitted
    chunks     forms of chunks: rows, parts, blocks; a split in time
    regions    what can run in chunks around the moves, read from the equations
    choose     the best form of every region, by timeline's march of the candidates
    arrange    the order of nodes and chunks
    weave      the program of a rank with the chosen regions in chunks
    schedule   its launches, events and slots as lines; check proves them for all ranks together
    places     the lines of all ranks of a pipeline, messages between stages included
    races      the same proof for moves in the peers' memory, from what a lowered program does
"""
