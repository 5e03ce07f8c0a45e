"Slips as the lab plants them in the chains that it trains on: `corrupt`, from the cells that define it."
from pathlib import Path

import nbformat
from micro_world.programs import *

LAB = nbformat.read(Path(__file__).parents[2]/'nbs'/'labs'/'01_micro_models.ipynb', as_version=4)
for cell in LAB.cells:
    if cell['id'] in ('wrong-value', 'slip', 'corrupt'): exec(cell.source)
