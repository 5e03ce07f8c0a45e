"Tests import what they share from tests/helpers."
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
