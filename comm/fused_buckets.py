"""Numbers of rows for which fused all-reduces are measured (`comm/fused.py`). Needs no Triton, which a CPU machine may lack."""

# rows between which steps have graphs of so many sizes that the next power of two may be nearly twice as large
FINE = 1024, 4096


def bucket(rows: int) -> int:
    """`rows` rounded up to a power of two, within FINE to a quarter of one: 1,024, 1,280, 1,536, 1,792, 2,048, 2,560."""
    power = 1 << (rows - 1).bit_length()
    unit = power // 8 if FINE[0] < rows <= FINE[1] else power
    return -(-rows // unit) * unit
