"How many examples a property test takes: as many as it says, or STEPWISE_FUZZ times as many in `make fuzz`."
import os


def examples(n): return n*int(os.environ.get('STEPWISE_FUZZ', 1))
