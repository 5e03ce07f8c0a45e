"""How large the numbers are and how long the chains, by level 1 to 6; index 0 is unused."""

LARGEST_OPERAND = (None, 15, 30, 60, 150, 400, 3000)
LARGEST_FACTOR = (None, 5, 9, 9, 12, 25, 99)
CHAIN_LENGTH = (None, 1, 2, 3, 4, 5, 2)  # of the puzzles of micro-omni
