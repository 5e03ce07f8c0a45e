"""Compares tables with others, number by number, and fails where more than the last digits differ:
`python .ci/tables.py tables COMMITTED`, two folders of .csv files."""
import sys
from pathlib import Path

from stepwise_routing.run.publish import compared, table_differences

made, committed = map(Path, sys.argv[1:])
lines = table_differences(made, committed)
print('tables:', compared(made, committed))
sys.exit('\n'.join([*lines[:20], f'error: {len(lines)} differences in the tables']) if lines else 0)
